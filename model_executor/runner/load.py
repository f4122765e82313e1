"""The construction of a ModelRunner: weights, KV pool, layers, recorded steps, threads.

The scheduler process, the benchmarks and the tests all build their runners here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from ...srt import env
from ...srt.model_files.model_config import ModelConfig
from .. import cpu_extension
from ..attention.base import AttentionBackend
from ..attention.registry import HOPPER, create_attention_backend
from ..device.accelerator import Accelerator, make_accelerator
from ..device.device_buffers import Uploads
from ..device.heap import keep_freed_memory, trim_heap
from ..device.memory import Memory, host_memory
from ..kernels.host_compiler import needs_c_compiler
from ..layers.adapted_layers import AdaptedParameters, LoraLayers
from ..layers.kinds import LayerKinds, is_compiled, layers_for
from ..models.family import Model, Parameters, family_of
from ..row_states import LayerStates
from ..sampling.row_logprobs import block_bytes
from ..sampling.sampler import Sampler
from ..step import StepInputs
from ..weights.cache_folder import open_cache_folder
from ..weights.loader import load_parameters
from .adapters import few_rows_bytes, make_adapters
from .cpu_graph_runner import CpuGraphRunner
from .cuda_graph_runner import CudaGraphRunner, batch_sizes, max_work_lens
from .host_kv import HostKV, device_bytes
from .kv_budget import check_adapters, check_host_kv, check_random_weights, check_states, check_weights, num_kv_tokens
from .kv_pool import kv_bytes_per_token, make_kv_pool
from .model_runner import ModelRunner, RunnerBytes
from .recorded_steps import DecodeInputs
from .recurrent_settings import states_of_settings
from .settings import RunnerSettings, weight_bytes
from .slot_table import make_slot_table
from .step_memory import activation_bytes, recurrence_bytes, rotation_bytes, saved_split_bytes, torch_attention_bytes
from .warmup import all_allowed, low_tile_tokens, warmup_steps
from .weight_update import BuiltModel, WeightUpdater

logger = logging.getLogger(__name__)

_BYTES_PER_GRAPH = 8 << 20
"""Memory kept free for the driver's own data of each graph."""


def load_runner(settings: RunnerSettings, config: ModelConfig) -> ModelRunner:
    """Load the weights and build a runner that is ready for its first `launch`.

    It also changes this process: freed memory stays with the process, and for a compiled model the compiled operations
    take torch's threads and leave one to torch.

    Raises ValueError if the checkpoint does not match its config, if the memory does not suffice, if the host's KV
    memory has a size that makes no sense, or if Triton has no GPU.
    """
    with _needs_device_memory():
        runner = _build_runner(settings, config)
    trim_heap()
    keep_freed_memory()
    if runner.model.compiled:
        cpu_extension.take_threads()
    return runner


def _build_runner(settings: RunnerSettings, config: ModelConfig) -> ModelRunner:
    builder = _RunnerBuilder(settings, config)
    if settings.attention_backend == "triton" and builder.accelerator is None and not env.triton_interpreted():
        raise ValueError("--attention-backend triton needs a GPU, but the device is cpu, which has cpu and torch")
    runner = builder.build_on_accelerator() if builder.accelerator is not None else builder.build_on_cpu()
    if settings.host_kv is not None:
        runner.host_kv = HostKV(runner.kv_pool, settings.host_kv, builder.uploads, builder.accelerator)
    runner.weights = builder.weight_updater(runner)
    return runner


@contextmanager
def _needs_device_memory() -> Iterator[None]:
    """Raises ValueError that says what to change if the memory of a GPU does not suffice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            "the GPU has not enough memory for the weights and the largest steps; lower --max-prefill-tokens, "
            "--max-running-requests, --max-saved-states or --context-length, or end other programs on the GPU "
            f"({error})"
        ) from error


class _RunnerBuilder:
    """The state of one `load_runner` call."""

    def __init__(self, settings: RunnerSettings, config: ModelConfig) -> None:
        self.settings = settings
        self.config = config
        self.accelerator = make_accelerator(settings.device)
        if settings.cpu_kernels is not None:
            settings.cpu_kernels.tuning.apply()  # before layers are recorded
        self.weight_bytes = weight_bytes(settings, config)
        if self.accelerator is not None:
            # Before loading, which takes minutes, and before the system kills a process for lack of memory.
            check_weights(self.weight_bytes, self.accelerator.memory())
            check_host_kv(self._host_kv_bytes, host_memory().available, on_cpu=False)
        elif config.load_format == "dummy":
            check_random_weights(self.weight_bytes, host_memory().available)
        # Before what takes long, and takes memory for each row. The runner that is measured and the runner that serves
        # share it, so that the measurement includes it.
        self.table = make_slot_table(settings.max_running_requests, settings.context_len, settings.device)
        self.states: tuple[LayerStates, ...] = ()
        self._state_bytes = 0
        if config.delta_net is not None:
            self.states = states_of_settings(settings, config.delta_net)
            self._state_bytes = sum(tensor.nbytes for layer in self.states for tensor in layer)
        self.uploads = Uploads(settings.device, self.accelerator)
        self.adapters = make_adapters(settings, config, self.uploads)
        self._adapter_bytes = 0 if self.adapters is None else self.adapters.num_bytes
        self.parameters: Parameters = load_parameters(
            config,
            settings.dtype,
            settings.device,
            seed=settings.seed,
            cache=open_cache_folder(settings.weight_cache),
            weight_dtype=settings.weight_dtype,
            forms=settings.weight_forms,
            packed=self._layers(settings, settings.attention_backend).compiled and not settings.onednn,
            compact=settings.compact,
        )
        self.sampler = Sampler(
            settings.max_running_requests,
            config.vocab_size,
            settings.device,
            self.uploads,
            use_kernels=settings.attention_backend == "triton",
        )
        self.bytes_per_token = kv_bytes_per_token(settings, config)

    @property
    def _host_kv_bytes(self) -> int:
        """The size of the host's KV memory."""
        return 0 if self.settings.host_kv is None else self.settings.host_kv.num_bytes

    def build_on_cpu(self) -> ModelRunner:
        # The layers read the weights later, the host's KV memory is made later, and adapters are loaded later: their
        # memory is still free.
        host = host_memory()
        left = max(host.available - self.weight_bytes, 0)
        check_adapters(self._adapter_bytes, left)
        left -= self._adapter_bytes
        check_states(self._state_bytes, left)
        left -= self._state_bytes
        check_host_kv(self._host_kv_bytes, left, on_cpu=True)
        memory = Memory(host.total, left - self._host_kv_bytes)
        runner = self._build(self._pool_tokens(memory, self.cpu_reserve(memory)))
        self.parameters = {}  # the layers hold what they need, so that an update of the weights frees it
        if runner.model.compiled and self.settings.record_steps:
            runner.record_steps(self._record_on_cpu(runner, runner.model))
        return runner

    def build_on_accelerator(self) -> ModelRunner:
        """Build the runner of a GPU, in two passes.

        The first pass runs the largest steps on a pool of one page, because the memory that libraries take can only be
        measured. It also compiles all kernels that serving needs. The second pass builds the pool on the memory left.
        """
        accelerator = self.accelerator
        assert accelerator is not None
        logger.info("Measuring the memory of the largest steps; a first start compiles kernels, which takes minutes")
        with needs_c_compiler():
            measured = self._build(self.settings.page_size)
            sizes, reserve = self._measure(measured, accelerator)
        memory = accelerator.memory()  # that is left beside a model's tables, because the next model has them, too
        del measured
        runner = self._build(self._pool_tokens(memory, reserve))
        if sizes:
            runner.record_steps(self._record_on_accelerator(runner, accelerator, sizes))
        return runner

    def cpu_reserve(self, memory: Memory) -> int:
        """Bytes to keep free for the largest step, which also decodes all rows.

        `memory`: the memory without the weights.
        """
        settings, config = self.settings, self.config
        num_rows = settings.max_choices
        compiled = is_compiled(self._layers(settings, settings.attention_backend), config)
        step_bytes = partial(
            activation_bytes,
            config,
            settings.dtype,
            compiled=compiled,
            quantized=settings.rounds_to_integers,
            widened=settings.widens_activations,
            lora=settings.lora,
        )
        reserve = step_bytes(tokens=settings.max_prefill_tokens + num_rows, rows=num_rows)
        reserve += self.sampler.max_edit_bytes(num_rows) + self.sampler.max_choice_bytes(num_rows)
        reserve += block_bytes(config.vocab_size, compiled=cpu_extension.load() is not None)
        if compiled and settings.record_steps:
            # A recorded step keeps its tensors, and shares memory only among tensors of equal size. Those of sampled
            # rows are smaller than those of tokens.
            rows = settings.max_recorded_rows
            reserve += step_bytes(tokens=2 * settings.max_recorded_tokens + rows, rows=rows)
        # A sequence is no longer than the pool. Only the cpu backend's layers have a table of angles.
        longest = min(
            settings.context_len,
            memory.available // self.bytes_per_token,
            settings.max_total_tokens or settings.context_len,
        )
        if settings.attention_backend == "cpu":
            reserve += rotation_bytes(config, longest) + saved_split_bytes(config, rows=num_rows, longest=longest)
        if config.delta_net is not None and not compiled:
            reserve += recurrence_bytes(config.delta_net, rows=settings.max_running_requests)
        if settings.attention_backend == "torch":
            reserve += torch_attention_bytes(settings, config, longest)
        return reserve

    def _layers(self, settings: RunnerSettings, attention_backend: str) -> LayerKinds:
        return layers_for(
            attention_backend,
            settings.dtype,
            quantized=settings.rounds_to_integers,
            widths=self.config.multiplied_widths,
            onednn=settings.onednn,
            compact=settings.compact,
            fuse_small_steps=settings.fuse_small_steps,
            dependent_launch=settings.dependent_launch,
        )

    def _pool_tokens(self, memory: Memory, reserve: int) -> int:
        settings = self.settings
        return num_kv_tokens(
            memory,
            self.bytes_per_token,
            page_size=settings.page_size,
            context_len=settings.context_len,
            mem_fraction_static=settings.mem_fraction_static,
            max_total_tokens=settings.max_total_tokens,
            on_cpu=self.accelerator is None,
            reserve=reserve,
        )

    def _build(self, pool_tokens: int) -> ModelRunner:
        """Build a runner with a pool of `pool_tokens` tokens."""
        settings, config = self.settings, self.config
        kv_pool = make_kv_pool(settings, config, pool_tokens)
        backend = HOPPER if settings.hopper_prefill else settings.attention_backend
        attention = create_attention_backend(backend, family_of(config).attention(config), kv_pool)
        model = self._model(settings, self.parameters, attention)
        num_bytes = RunnerBytes(self.weight_bytes + self._adapter_bytes, pool_tokens * self.bytes_per_token)
        runner = ModelRunner(
            settings,
            config,
            model,
            attention,
            kv_pool,
            self.table,
            self.sampler,
            self.uploads,
            self.accelerator,
            num_bytes,
        )
        runner.adapters = self.adapters
        runner.states = self.states
        return runner

    def _model(self, settings: RunnerSettings, parameters: Parameters, attention: AttentionBackend) -> Model:
        layers = self._layers(settings, attention.name)
        if self.adapters is not None:
            layers, parameters = LoraLayers(layers), AdaptedParameters(parameters, self.adapters.tables)
        build = family_of(self.config).build
        return build(self.config, parameters, attention, layers, settings.context_len, self.states)

    def weight_updater(self, runner: ModelRunner) -> WeightUpdater:
        """What loads other weights into the runner."""

        def build(settings: RunnerSettings, parameters: Parameters) -> BuiltModel:
            model = self._model(settings, parameters, runner.attention)
            is_recorded = model.compiled and self.settings.record_steps
            return BuiltModel(model, self._record_on_cpu(runner, model) if is_recorded else None)

        def use(built: BuiltModel) -> None:
            runner.model = built.model
            if built.recorded is not None:
                runner.record_steps(built.recorded)

        in_place, self.parameters = {} if self.accelerator is None else self.parameters, {}
        return WeightUpdater(
            self.settings,
            self.config,
            host_memory=host_memory,
            build=build,
            use=use,
            accelerator=self.accelerator,
            in_place=in_place,
        )

    def _measure(self, runner: ModelRunner, accelerator: Accelerator) -> tuple[list[int], int]:
        """Measure the largest steps. Returns the batch sizes of recorded decode steps, and the bytes to keep free."""
        settings = self.settings
        step_bytes = 0
        steps = warmup_steps(
            settings.max_running_requests,
            settings.context_len,
            settings.max_prefill_tokens,
            low_tile_tokens(settings, self.config),
            None if settings.max_saved_states is None else settings.max_running_requests + 1,
        )
        for step in steps:
            # Greedy tokens without masks have kernels of their own.
            run = partial(_run, runner, step, masked=step is not steps[-1])
            step_bytes = max(step_bytes, accelerator.peak_bytes(run))
        max_tokens = accelerator.memory().available // self.bytes_per_token
        # A few tokens after a long prefix may take more for their attention than any of these steps. So may decoding
        # requests that share one, in steps that are not recorded.
        decode_parts = runner.attention.decode_part_bytes(
            settings.max_running_requests, settings.context_len, max_tokens
        )
        step_bytes += max(runner.attention.max_part_bytes(settings.context_len), decode_parts)
        if settings.attention_backend == "torch":  # requests may be longer than those of the warm-up steps
            step_bytes += torch_attention_bytes(settings, self.config, settings.context_len, writes_scores=True)
        reserve = step_bytes + few_rows_bytes(settings, self.config)
        reserve += self.sampler.max_edit_bytes(settings.max_choices)
        if settings.host_kv is not None:
            reserve += device_bytes(settings.page_size * self.bytes_per_token)
        if runner.attention.num_splits(np.ones(1, np.int32)) is None:
            return [], reserve
        sizes = batch_sizes(settings.max_recorded_rows)
        # Decode steps keep memory of their own: the logits, and in graphs the tensors of the largest graph.
        decode = partial(self._decode_padding, runner, sizes[-1], max_tokens)
        if settings.fuse_small_steps:
            from ..kernels.skinny_linear import MAX_ROWS  # importing Triton takes half a second

            # Few rows and many have kernels of their own. Either kind may be absent from the recorded steps.
            for num_rows in (1, min(settings.max_running_requests, MAX_ROWS + 1)):
                self._decode_padding(runner, num_rows, max_tokens)
        reserve += accelerator.peak_bytes(decode, to_record=settings.record_steps)
        if settings.record_steps:
            # A pool of one page divides what a graph does in one launch, so that the peak lacks its partial results.
            reserve += decode_parts + len(sizes) * _BYTES_PER_GRAPH
        return sizes, reserve

    def _decode_padding(self, runner: ModelRunner, size: int, pool_tokens: int) -> None:
        """Run a decode step of padding with the lengths of the largest graph for a pool of `pool_tokens` tokens."""
        lens = max_work_lens(size, pool_tokens, self.settings.context_len)
        rows = torch.zeros(size, dtype=torch.int64, device=self.settings.device)
        with torch.inference_mode():
            runner.decode(DecodeInputs(rows, rows + 1, rows), lens, self._logits_buffer(size))

    def _logits_buffer(self, size: int) -> torch.Tensor:
        return torch.empty((size, self.config.vocab_size), dtype=torch.float32, device=self.settings.device)

    @torch.inference_mode()
    def _record_on_accelerator(
        self, runner: ModelRunner, accelerator: Accelerator, sizes: list[int]
    ) -> CudaGraphRunner:
        return CudaGraphRunner(
            accelerator,
            self.uploads,
            runner.decode,
            runner.attention,
            sizes=sizes,
            pool_tokens=runner.max_total_num_tokens,
            context_len=self.settings.context_len,
            logits=self._logits_buffer(sizes[-1]),
            record=self.settings.record_steps,
        )

    @torch.inference_mode()
    def _record_on_cpu(self, runner: ModelRunner, model: Model) -> CpuGraphRunner:
        return CpuGraphRunner(
            model,
            max_tokens=self.settings.max_recorded_tokens,
            max_rows=self.settings.max_recorded_rows,
            newest_tokens=runner.future_tokens,
            table=runner.table,
            row_adapters=None if self.adapters is None else self.adapters.rows,
        )


def _run(runner: ModelRunner, step: StepInputs, *, masked: bool) -> None:
    launched = runner.launch(step)
    launched.sample(all_allowed(step.num_sampled, runner.config.vocab_size) if masked else None)
    launched.wait()

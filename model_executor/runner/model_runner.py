"""Runs one step of the model: StepInputs in, next tokens out, everything between on the device."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from ...mem_cache.token_to_kv_pool import MHATokenToKVPool
from ...srt.model_files.model_config import ModelConfig
from ..attention.registry import create_attention_backend, default_page_size, kv_panel, resolve_attention_backend
from ..device.accelerator import make_accelerator
from ..device.device_buffers import Downloads, StepTokens, Uploads
from ..device.dtypes import resolve_dtype
from ..device.heap import trim_heap
from ..forward_batch import FROM_DEVICE, ForwardBatch, ForwardMode, Int32Array, StepInputs
from ..models.decoder import Parameters
from ..models.registry import create_model
from ..sampling.sampler import Sampler
from ..weights.loader import checkpoint_dtype, load_parameters
from ..weights.quantization import check_quantization, parameter_bytes
from ..weights.weight_cache import open_weight_cache
from .cpu_graph_runner import CpuGraphRunner
from .cuda_graph_runner import CudaGraphRunner, DecodeInputs, batch_sizes, longest_lens
from .kv_budget import Memory, host_memory, num_kv_tokens
from .warmup import largest_steps

DEFAULT_GRAPH_MAX_BS = 256
DEFAULT_PREFILL_TOKENS = 16384
_BYTES_OF_A_GRAPH = 8 << 20
"""kept free for what the driver remembers of each graph beside the memory it works on"""


class ModelRunner:
    """A loaded model with its KV pool, attention backend and sampler, on one device.

    The scheduler reads `max_total_num_tokens` to make its allocator, makes a ReqToTokenPool of `num_rows` rows of
    `context_len`, and hands that table over with `bind` before the first `launch`.

    Raises ValueError for settings that do not fit the model or the machine.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_running_requests: int,
        device: str = "cpu",
        dtype: str = "auto",
        quantization: str | None = None,
        weight_cache: str = "off",
        attention_backend: str = "auto",
        page_size: int | None = 1,
        context_len: int | None = None,
        mem_fraction_static: float | None = None,
        max_total_tokens: int | None = None,
        max_prefill_tokens: int | None = None,
        disable_cuda_graph: bool = False,
        cuda_graph_max_bs: int | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            page_size: None: what suits the attention backend
            max_prefill_tokens: prompt tokens of the largest step, for which memory of a GPU is kept
            disable_cuda_graph: record no decode steps, on a GPU or a CPU
            cuda_graph_max_bs: requests of the largest decode step that is recorded
        """
        self.config = config
        self.device = resolve_device(device)
        self._accelerator = make_accelerator(self.device)
        self.dtype = resolve_dtype(dtype, checkpoint_dtype(config), self.device)
        self.num_rows = max_running_requests
        self.context_len = context_len or config.context_len
        self.attention_backend = resolve_attention_backend(attention_backend, self.device)
        self.page_size = page_size or default_page_size(self.attention_backend, config.head_dim, self.dtype)
        self.quantization = quantization
        check_quantization(quantization, self.attention_backend, self.device)
        cache = open_weight_cache(weight_cache)
        params = load_parameters(config, self.dtype, self.device, seed, cache, quantization)
        self.weight_bytes = sum(parameter_bytes(config, self.dtype.itemsize, quantization).values())
        self._uploads = Uploads(self.device, self._accelerator)
        self._downloads = Downloads(self.num_rows, self._accelerator)
        use_kernels = self.attention_backend == "triton"
        self.sampler = Sampler(self.num_rows, config.vocab_size, self.device, self._uploads, use_kernels=use_kernels)
        self.future_tokens = torch.zeros(self.num_rows + 1, dtype=torch.int64, device=self.device)
        """newest token of each row; the next step reads it here, so the host need not know it yet"""
        self._shares_table = self._accelerator is None
        self._host_table = np.zeros((0, 0), np.int32)
        self._table = torch.zeros((0, 0), dtype=torch.int32)
        if not self._shares_table:
            self._table = torch.zeros((self.num_rows + 1, self.context_len), dtype=torch.int32, device=self.device)

        self._decodes: CudaGraphRunner | CpuGraphRunner | None = None
        sizes, reserve = self._plan_memory(params, max_prefill_tokens, disable_cuda_graph, cuda_graph_max_bs)
        self.max_total_num_tokens = num_kv_tokens(
            self._memory_beside_weights(),
            self._bytes_per_token,
            page_size=self.page_size,
            context_len=self.context_len,
            mem_fraction_static=mem_fraction_static,
            max_total_tokens=max_total_tokens,
            on_cpu=self._accelerator is None,
            reserve=reserve,
        )
        self.kv_bytes = self.max_total_num_tokens * self._bytes_per_token
        self._build(params, self.max_total_num_tokens)
        del params
        trim_heap()
        self._decodes = self._make_decodes(sizes, record=not disable_cuda_graph)
        self._record_rows = 0
        if self.runs_compiled and not disable_cuda_graph:
            self._record_rows = min(self.num_rows, cuda_graph_max_bs or DEFAULT_GRAPH_MAX_BS)
        self.graph_bytes = 0 if self._decodes is None else self._decodes.num_bytes

    @property
    def is_asynchronous(self) -> bool:
        """Whether `launch` returns before the step is done. A CPU has computed it by then: overlapping steps would keep
        every token back for one of them."""
        return self._accelerator is not None

    @property
    def runs_compiled(self) -> bool:
        """Whether the layers are a CPU's compiled operations."""
        return self.model.compiled

    @property
    def _bytes_per_token(self) -> int:
        config = self.config
        return MHATokenToKVPool.bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, self.dtype)

    def _memory_beside_weights(self) -> Memory:
        """On a CPU the weights have yet to be read, by the layers that are made of them."""
        if self._accelerator is not None:
            return self._accelerator.memory()
        memory = host_memory()
        return Memory(memory.total, max(memory.available - self.weight_bytes, 0))

    def _build(self, params: Parameters, pool_tokens: int) -> None:
        """The model over a pool of this size."""
        config = self.config
        self.kv_pool = MHATokenToKVPool(
            pool_tokens,
            self.page_size,
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            self.dtype,
            self.device,
            kv_panel(self.attention_backend, self.page_size, config.head_dim, self.dtype),
        )
        self.attention = create_attention_backend(self.attention_backend, config, self.kv_pool)
        quantized = self.quantization is not None
        self.model = create_model(config, params, self.attention, self.context_len, quantized=quantized)

    def _plan_memory(
        self, params: Parameters, max_prefill_tokens: int | None, disable_graphs: bool, graph_max_bs: int | None
    ) -> tuple[list[int], int]:
        """Batch sizes to pad decode steps to, and bytes that must stay free beside weights and KV.

        Found by doing the largest steps on a pool of hardly more than the dummy page: nothing is known about what
        libraries and compilers take until they are asked. This compiles what serving needs, too.
        """
        accelerator = self._accelerator
        if accelerator is None:
            return [], 0
        self._build(params, self.page_size)
        step_bytes = 0
        for step in largest_steps(self.num_rows, self.context_len, max_prefill_tokens or DEFAULT_PREFILL_TOKENS):
            step_bytes = max(step_bytes, accelerator.peak_bytes(partial(self._rehearse, step)))
        reserve = step_bytes + self.sampler.most_edit_bytes
        if self.attention.num_splits(np.ones(1, np.int32)) is None:
            return [], reserve
        sizes = batch_sizes(min(self.num_rows, graph_max_bs or DEFAULT_GRAPH_MAX_BS))
        most_tokens = accelerator.memory().available // self._bytes_per_token
        # What decode steps keep, apart from everybody else: the logits, and in graphs as much as the largest takes.
        reserve += accelerator.peak_bytes(partial(self._decode_padding, sizes[-1], most_tokens))
        return sizes, reserve + (0 if disable_graphs else len(sizes) * _BYTES_OF_A_GRAPH)

    def _rehearse(self, step: StepInputs) -> None:
        self.launch(step).wait()

    def _decode_padding(self, size: int, pool_tokens: int) -> None:
        """A decode step of nobody, with the buffers of the largest graph for a pool of this size."""
        lens = longest_lens(size, pool_tokens, self.context_len)
        rows = torch.zeros(size, dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            self._decode(DecodeInputs(rows, rows + 1, rows), lens, self._logits_buffer(size))

    def _logits_buffer(self, size: int) -> torch.Tensor:
        return torch.empty((size, self.config.vocab_size), dtype=torch.float32, device=self.device)

    @torch.inference_mode()
    def _make_decodes(self, sizes: list[int], *, record: bool) -> CudaGraphRunner | None:
        if not sizes:
            return None
        assert self._accelerator is not None
        return CudaGraphRunner(
            self._accelerator,
            self._uploads,
            self._decode,
            self.attention,
            sizes=sizes,
            pool_tokens=self.max_total_num_tokens,
            context_len=self.context_len,
            logits=self._logits_buffer(sizes[-1]),
            record=record,
        )

    def bind(self, req_to_token: Int32Array) -> None:
        """Takes the scheduler's table, int32 [num_rows + 1, context_len]. A CPU shares its memory; another device has
        a copy that each `launch` brings up to date."""
        assert req_to_token.dtype == np.int32 and req_to_token.flags.c_contiguous
        assert req_to_token.shape == (self.num_rows + 1, self.context_len), req_to_token.shape
        self._host_table = req_to_token
        table = torch.from_numpy(req_to_token)
        if self._shares_table:
            self._table = table
            self._decodes = self._record_decodes()
        else:
            self._table.copy_(table)  # in place: graphs know where it is

    @torch.inference_mode()
    def _record_decodes(self) -> CpuGraphRunner | None:
        """Where the table is shared: recorded steps know where it is."""
        if not self._record_rows:
            return None
        return CpuGraphRunner(
            self.model,
            most_rows=self._record_rows,
            hidden_size=self.config.hidden_size,
            dtype=self.dtype,
            newest_tokens=self.future_tokens,
            req_to_token=self._table,
        )

    @torch.inference_mode()
    def launch(self, step: StepInputs) -> StepTokens:
        """Queues the step; `wait` on the result gives the sampled rows' tokens, -1 for invalid logits."""
        for new_row in step.new_rows:
            self.sampler.set_row(new_row)
        if step.mode is ForwardMode.DECODE:
            logits, sampled_rows = self._launch_decode(step)
            rows, seq_lens = step.rows, step.seq_lens
        else:
            assert step.sampled is not None
            logits, sampled_rows = self._launch_extend(step)
            rows, seq_lens = step.rows[step.sampled], step.seq_lens[step.sampled]
        if len(rows) == 0:
            return StepTokens(torch.empty(0, dtype=torch.int64))
        tokens = self.sampler.sample(logits, rows, seq_lens)
        # The row of an invalid token may run one more step before the host knows: any id will do for it.
        self.future_tokens.index_copy_(0, sampled_rows, tokens.clamp(min=0))
        return self._downloads.fetch(tokens)

    def forward(self, batch: ForwardBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        """float32 logits [num_sampled, vocab], in `out` where that is given"""
        self.attention.plan(batch)
        hidden = self.model.forward(batch.input_ids, batch.positions, batch)
        return self.model.logits(hidden, out)

    def _launch_decode(self, step: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and the rows (int64) that are sampled: all of the step's."""
        if step.table_updates and not self._shares_table:
            self._update_table(*self._uploads.send(*self._table_updates(step)))
        size = None if self._decodes is None else self._decodes.size_for(len(step.rows))
        if self._decodes is not None and size is not None:
            return self._decodes.run(size, step.rows, step.seq_lens, step.out_cache_loc)
        inputs = DecodeInputs(*self._uploads.send(*map(_int64, (step.rows, step.seq_lens, step.out_cache_loc))))
        return self._decode(inputs, step.seq_lens), inputs.rows

    def _decode(self, inputs: DecodeInputs, seq_lens: Int32Array, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of a decode step, launched or being recorded: nothing here may depend on what is in a tensor, or on
        `seq_lens` but for how much attention work there may be."""
        rows, lens, slots = inputs
        positions = lens - 1
        if not self._shares_table:
            self._update_table(rows * self.context_len + positions, slots.int())
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            rows=rows,
            seq_lens=lens,
            input_ids=self.future_tokens.index_select(0, rows),
            positions=positions,
            out_cache_loc=slots,
            req_to_token=self._table,
            logits_indices=None,
            extend_start_loc=None,
            prefix_lens=None,
            seq_lens_host=seq_lens,
            extend_lens_host=None,
        )
        return self.forward(batch, out)

    def _launch_extend(self, step: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and the rows (int64) that are sampled."""
        extend_lens, input_ids, sampled = step.extend_lens, step.input_ids, step.sampled
        assert extend_lens is not None and input_ids is not None and sampled is not None
        prefix_lens_host = step.seq_lens - extend_lens
        start_loc_host = np.concatenate(([0], np.cumsum(extend_lens, dtype=np.int64)))
        unknown = np.flatnonzero(input_ids == FROM_DEVICE)
        sent = self._uploads.send(
            *self._table_updates(step),
            unknown,
            _int64(np.repeat(step.rows, extend_lens)[unknown]),
            _int64(step.rows),
            _int64(step.seq_lens),
            _int64(step.out_cache_loc),
            _int64(input_ids),
            _ranges(prefix_lens_host, extend_lens),
            start_loc_host,
            _int64(prefix_lens_host),
            (start_loc_host[1:] - 1)[sampled],
            _int64(step.rows[sampled]),
        )
        index, new_slots, at, from_rows, rows, seq_lens, slots, ids, positions, starts, prefix_lens, last, chosen = sent
        if len(index):
            self._update_table(index, new_slots)
        if len(unknown):
            ids.index_copy_(0, at, self.future_tokens.index_select(0, from_rows))
        batch = ForwardBatch(
            mode=ForwardMode.EXTEND,
            rows=rows,
            seq_lens=seq_lens,
            input_ids=ids,
            positions=positions,
            out_cache_loc=slots,
            req_to_token=self._table,
            logits_indices=last,
            extend_start_loc=starts,
            prefix_lens=prefix_lens,
            seq_lens_host=step.seq_lens,
            extend_lens_host=extend_lens,
        )
        return self.forward(batch), chosen

    def _table_updates(self, step: StepInputs) -> tuple[npt.NDArray[np.int64], Int32Array]:
        """What the device does not know of the host's table: places in the flattened table, and what belongs there."""
        if self._shares_table or not step.table_updates:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        rows, starts, ends = np.array(step.table_updates, dtype=np.int64).T
        index = np.repeat(rows * self.context_len, ends - starts) + _ranges(starts, ends - starts)
        return index, self._host_table.reshape(-1)[index]

    def _update_table(self, index: torch.Tensor, slots: torch.Tensor) -> None:
        self._table.view(-1).index_copy_(0, index, slots)


def resolve_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N`. Raises ValueError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but torch sees no GPU here")
    return device


def _int64(array: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    return array.astype(np.int64)


def _ranges(starts: npt.NDArray[np.integer], lens: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """[starts[0], starts[0] + 1, ..., then starts[1], ...], lens[i] numbers of each."""
    ends = np.cumsum(lens, dtype=np.int64)
    return np.arange(ends[-1], dtype=np.int64) + np.repeat(starts - (ends - lens), lens)

"""The settings of a runner, resolved once from the server's: "auto" and missing values are replaced."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...srt import env
from ...srt.model_files.model_config import ModelConfig
from ...srt.model_files.quantization_config import Fp8Config
from ...srt.server_args import ServerArgs
from ...srt.settings.scheduler import MAX_VERIFIED_TOKENS
from .. import cpu_extension
from ..attention.registry import default_page_size, resolve_attention_backend, resolve_kv_dtype
from ..cpu_calibration import ChosenTuning, resolve_tuning
from ..device.dtypes import resolve_dtype
from ..layers.fp8_weight import FP8_FORMS
from ..layers.lora_layers import LoraSize
from ..layers.onednn_layers import keeps_bits, part_shapes
from ..models.family import family_of
from ..models.parameters import is_expert
from ..weights.loader import checkpoint_dtype, stored_forms, stored_fp8_forms, stored_matrix_dtype
from ..weights.quantization import (
    BITS_PER_WEIGHT,
    FP8,
    check_experts,
    check_quantization,
    is_linear,
    is_multiplied,
    parameter_bytes,
    quantized_forms,
)
from .kernel_flags import check_hopper_prefill, check_kernel_flags
from .latent_settings import check_latent_attention
from .recurrent_settings import gpu_bytes_of, resolve_rows, resolve_saved_states

logger = logging.getLogger(__name__)

_LARGE_BYTES = 64 << 20
"""Weights that most caches do not hold."""
_DEFAULT_RECORDED_ROWS = 256
_RECORDED_TOKENS = 256
"""Most new tokens of a recorded step of a CPU, or more if a decode step may have more rows. A recording keeps memory
for as many, and larger steps gain less."""
_DEFAULT_HOST_GB = 1.0
"""Size of the host's KV memory above files. It holds what is read and written, and what was used last."""
_MIN_LIMITS_FOR_PAGES = (2048, 128, 128)
"""Tokens of the KV pool, of a step's prompts and of a chunk. Below any of these, the default page size is 1."""


class HostKVSettings(NamedTuple):
    """The settings of the host's KV memory."""

    num_bytes: int
    has_storage: bool
    """whether files are below it; without them it must be larger than the KV pool to be of any use"""


class WeightTypes(NamedTuple):
    """How matrices are kept in memory."""

    dtype: torch.dtype
    """type of those that are not quantized"""
    forms: Mapping[str, str]
    """quantized form of parameters, by name"""


@dataclass(frozen=True, kw_only=True)
class RunnerSettings:
    """The resolved settings of a runner."""

    device: torch.device
    dtype: torch.dtype
    """type of activations, norms and biases"""
    weight_dtype: torch.dtype
    """type of the matrices that are not quantized"""
    weight_forms: Mapping[str, str]
    """quantized form of parameters, by name"""
    kv_dtype: torch.dtype
    """type of the KV pool"""
    cpu_kernels: ChosenTuning | None
    """the tuning of the compiled CPU operations; None if they are not used"""
    onednn: bool
    """whether linear layers are oneDNN's"""
    compact: bool
    """whether weights of bfloat16 take 12 bits a number"""
    attention_backend: str
    """one of attention.registry.BACKEND_NAMES"""
    quantization: str | None
    weight_cache: str
    page_size: int
    context_len: int
    max_running_requests: int
    max_saved_states: int | None
    """states of recurrent layers that the prefix cache keeps; None: there are no such layers, or no cache"""
    max_prefill_tokens: int
    """most prompt tokens of a step; memory is kept free for it"""
    chunked_prefill_size: int
    """most prompt tokens of one request in one step"""
    mem_fraction_static: float | None
    """share of the memory for weights and KV pool; None: the default of `kv_budget.num_kv_tokens`"""
    max_total_tokens: int | None
    """tokens of the KV pool; None: computed from the memory"""
    record_steps: bool
    """whether steps are recorded as graphs: decode steps, and on a CPU extend steps of few tokens, too"""
    max_choices: int
    """most tokens that a step chooses: one for each request, or several in a decode step with drafts"""
    max_recorded_rows: int
    """most requests, and most chosen tokens, of a recorded step"""
    max_recorded_tokens: int
    """most new tokens of a recorded step on a CPU"""
    fuse_small_steps: bool
    """whether steps of few tokens have fused kernels"""
    dependent_launch: bool
    """whether these kernels are dependent launches"""
    hopper_prefill: bool
    """whether the attention of prompts has the kernel for Hopper GPUs"""
    host_kv: HostKVSettings | None
    """the host's KV memory; None: there are no tiers below the KV pool"""
    seed: int
    """seed of dummy weights; 0 by default"""
    lora: LoraSize | None = None
    """the size of the tables of LoRA adapters; None: no layer has adapters"""

    @property
    def rounds_to_integers(self) -> bool:
        """Whether weights and activations are rounded to integers, which only a CPU's layers do."""
        return self.quantization in BITS_PER_WEIGHT

    @property
    def widens_activations(self) -> bool:
        """Whether a CPU's linear layers widen activations of bfloat16 to float32."""
        if self.dtype != torch.bfloat16 or self.rounds_to_integers or self.cpu_kernels is None:
            return False
        return self.cpu_kernels.tuning.bfloat16 == "widened"

    @property
    def has_fp8_weights(self) -> bool:
        """Whether weights are fp8, as only Triton layers have them."""
        return not FP8_FORMS.isdisjoint(self.weight_forms.values())

    @property
    def multiplied_dtype(self) -> torch.dtype:
        """The type of the numbers that linear layers multiply, or that experts do, which have most of the weights."""
        if self.has_fp8_weights and not any(map(is_expert, self.weight_forms)):
            return torch.float8_e4m3fn
        return torch.int8 if self.rounds_to_integers else self.dtype


def resolve_settings(server_args: ServerArgs, config: ModelConfig) -> RunnerSettings:
    """Resolve the server's settings for a model. Raises ValueError if they do not suit the model or the machine."""
    device = resolve_device(server_args.device)
    on_cpu = device.type == "cpu"
    dtype = resolve_dtype(server_args.dtype, checkpoint_dtype(config), device)
    backend = resolve_attention_backend(server_args.attention_backend, device, 0 if config.latent else config.head_dim)
    check_quantization(server_args.quantization, backend, device)
    check_kernel_flags(server_args, backend, dtype, device)
    context_len = server_args.context_length or config.context_len
    if context_len > config.context_len:
        raise ValueError(f"--context-length must be at most the model's {config.context_len}, got {context_len}")
    gpu_bytes = None if config.delta_net is None else gpu_bytes_of(device)
    max_choices = num_rows = resolve_rows(server_args, config, dtype, device, gpu_bytes)
    max_recorded_rows = min(max_choices, server_args.cuda_graph_max_bs or _DEFAULT_RECORDED_ROWS)
    if server_args.speculative_algorithm is not None:
        if not on_cpu or backend == "triton":
            raise ValueError(
                f"--speculative-algorithm {server_args.speculative_algorithm} needs --device cpu, and "
                f"--attention-backend cpu or torch, got {device.type} and {backend}"
            )
        max_choices = max(max_choices, MAX_VERIFIED_TOKENS)
        max_recorded_rows = max(max_recorded_rows, MAX_VERIFIED_TOKENS)
    if config.latent is not None:
        check_latent_attention(server_args, backend, device, dtype)
    kv_dtype = resolve_kv_dtype(server_args.kv_cache_dtype, dtype, backend)
    if kv_dtype == torch.float8_e4m3fn and dtype == torch.float32 and device.type == "cuda":
        raise ValueError(
            f"--kv-cache-dtype {server_args.kv_cache_dtype} needs --dtype bfloat16 or float16 on a GPU: with float32, "
            "its kernels lack registers"
        )
    page_size = _page_size(server_args) or default_page_size(
        backend, config.head_dim, kv_dtype, device, config.latent_dim
    )
    if server_args.hopper_prefill:
        check_hopper_prefill(backend, device, dtype, kv_dtype, config.head_dim, page_size)
    cpu_kernels = resolve_tuning(server_args.cpu_kernels, server_args.weight_cache) if backend == "cpu" else None
    weights = resolve_weights(dtype, config, backend, server_args.quantization, cpu_kernels)
    if server_args.fuse_small_steps and weights.forms:
        raise ValueError("--fuse-small-steps has no kernels for fp8 weights: leave it out")
    linears = resolve_linears(cpu_kernels, dtype, weights, config)
    return RunnerSettings(
        device=device,
        dtype=dtype,
        weight_dtype=weights.dtype,
        weight_forms=weights.forms,
        kv_dtype=kv_dtype,
        cpu_kernels=cpu_kernels,
        onednn=linears.onednn,
        compact=linears.compact,
        attention_backend=backend,
        quantization=server_args.quantization,
        weight_cache=server_args.weight_cache,
        page_size=page_size,
        context_len=context_len,
        max_running_requests=num_rows,
        max_saved_states=resolve_saved_states(server_args, config, dtype, device, gpu_bytes),
        max_prefill_tokens=server_args.max_prefill_tokens or (2048 if on_cpu else 16384),
        chunked_prefill_size=server_args.chunked_prefill_size or (1024 if on_cpu else 8192),
        mem_fraction_static=server_args.mem_fraction_static,
        max_total_tokens=server_args.max_total_tokens,
        record_steps=not server_args.disable_cuda_graph,
        max_choices=max_choices,
        max_recorded_rows=max_recorded_rows,
        max_recorded_tokens=max(max_recorded_rows, _RECORDED_TOKENS),
        fuse_small_steps=server_args.fuse_small_steps,
        dependent_launch=server_args.dependent_launch,
        hopper_prefill=server_args.hopper_prefill,
        # `with_lora_limits` has set both.
        lora=LoraSize(server_args.max_loras or 0, server_args.max_lora_rank or 0) if server_args.enable_lora else None,
        host_kv=_host_kv(server_args),
        seed=server_args.random_seed or 0,
    )


def resolve_weights(
    dtype: torch.dtype,
    config: ModelConfig,
    backend: str,
    quantization: str | None,
    chosen: ChosenTuning | None,
) -> WeightTypes:
    """How matrices are kept in memory. `chosen`: the tuning of the compiled CPU operations; None without them.

    Matrices have the form of the setting `quantization`. Without it, a CPU keeps them as their file stores them if the
    compiled operations can convert them to the type of the activations, `dtype`, when they multiply: each one that is
    quantized, or all if they are bfloat16 and `dtype` is float32. That changes no bit of a result. Other matrices have
    the type `dtype`. An embedding that is not the output head is kept as its file stores it with any `quantization`.

    With the backend triton, fp8 weights stay as their file stores them. Elsewhere they are widened to `dtype`.

    Raises ValueError and OSError for a checkpoint that cannot be read, and ValueError for one that no layers compute.
    """
    if isinstance(config.quantization, Fp8Config) and backend == "triton" and quantization in (None, FP8):
        return WeightTypes(dtype, stored_fp8_forms(config))
    if quantization is not None:
        if quantization != FP8:
            check_experts(config, dtype)
        rounded = quantized_forms(config, quantization)
        if chosen is None or config.tie_word_embeddings:
            return WeightTypes(dtype, rounded)
        return WeightTypes(dtype, stored_forms(config, dtype) | rounded)
    if chosen is None:
        return WeightTypes(dtype, {})
    if dtype == torch.float32:
        if _has_whole_words(config, torch.bfloat16) and stored_matrix_dtype(config) == torch.bfloat16:
            return WeightTypes(torch.bfloat16, {})
    elif (
        not _has_whole_words(config, dtype)
        or not _multiplies_natively(dtype, chosen)
        or chosen.tuning.prefers_onednn(dtype)
    ):
        return WeightTypes(dtype, {})
    return WeightTypes(dtype, stored_forms(config, dtype))


def _has_whole_words(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether rows of this type are whole words of 32 bits, as the compiled operations need."""
    return all(width * dtype.itemsize % 4 == 0 for width in (config.hidden_size, *config.feed_forward_widths))


def _multiplies_natively(dtype: torch.dtype, chosen: ChosenTuning) -> bool:
    """Whether linear layers multiply bfloat16, the type of the activations, without widening it."""
    return dtype == torch.bfloat16 and cpu_extension.multiplies(dtype) and chosen.tuning.bfloat16 == "native"


class CpuLinears(NamedTuple):
    """The linear layers of a CPU: fields of RunnerSettings."""

    onednn: bool
    compact: bool


def resolve_linears(
    chosen: ChosenTuning | None, dtype: torch.dtype, weights: WeightTypes, config: ModelConfig
) -> CpuLinears:
    """Choose the linear layers of a CPU. `chosen`: None without the compiled operations."""
    if chosen is None:
        return CpuLinears(onednn=False, compact=False)
    onednn = uses_onednn(chosen, dtype, weights, config)
    return CpuLinears(onednn, compact=not onednn and uses_compact(chosen, dtype, weights, config))


def uses_onednn(chosen: ChosenTuning, dtype: torch.dtype, weights: WeightTypes, config: ModelConfig) -> bool:
    """Whether linear layers are oneDNN's: it is faster here, matrices have the type of the activations, `dtype`, and a
    row has the same bits in every batch. Logs it if only the last is not true."""
    fits = weights.dtype == dtype and not weights.forms and _has_whole_words(config, dtype)
    if not fits or not chosen.tuning.prefers_onednn(dtype):
        return False
    parameters = {parameter.name: parameter for parameter in family_of(config).parameters(config)}
    for name, parameter in parameters.items():
        if not is_linear(parameter):
            continue
        is_gated, has_bias = name.endswith("gate_up_proj.weight"), name.removesuffix("weight") + "bias" in parameters
        if not all(map(keeps_bits, part_shapes(parameter.shape, dtype, is_gated=is_gated, has_bias=has_bias))):
            logger.warning("oneDNN's linear layers are not used: bits of a row of %s depend on the batch", name)
            return False
    return True


def uses_compact(chosen: ChosenTuning, dtype: torch.dtype, weights: WeightTypes, config: ModelConfig) -> bool:
    """Whether weights of bfloat16 are compact: the processor multiplies them, and reading them limits decode steps."""
    if not _multiplies_natively(dtype, chosen) or chosen.tuning.compact == "never":
        return False
    sizes = parameter_bytes(config, dtype.itemsize, matrix_bytes=dtype.itemsize, forms={})
    multiplied = [
        sizes[parameter.name]
        for parameter in family_of(config).parameters(config)
        if is_multiplied(parameter, config) and parameter.name not in weights.forms
    ]
    return sum(multiplied) >= _LARGE_BYTES or (bool(multiplied) and chosen.tuning.compact == "always")


def weight_bytes(settings: RunnerSettings, config: ModelConfig) -> int:
    """The size of all parameters in bytes. Compact ones take less."""
    matrix_bytes = settings.weight_dtype.itemsize
    sizes = parameter_bytes(config, settings.dtype.itemsize, matrix_bytes=matrix_bytes, forms=settings.weight_forms)
    return sum(sizes.values())


def resolve_device(name: str) -> torch.device:
    """The device called `name`: `auto`, `cpu`, `cuda` or `cuda:N`. Raises ValueError for a device that is missing.

    For a GPU it also sets what torch's allocator reads at its first use.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("--device cuda needs a GPU, but torch finds none")
        env.set_allocator_defaults()  # here, because whoever uses the device asks for it first
    return device


def _host_kv(server_args: ServerArgs) -> HostKVSettings | None:
    if not server_args.enable_hierarchical_cache:
        return None
    size = _DEFAULT_HOST_GB if server_args.hicache_size is None else server_args.hicache_size
    return HostKVSettings(int(size * 2**30), server_args.hicache_storage_dir is not None)


def _page_size(server_args: ServerArgs) -> int | None:
    """The page size: the setting, or 1 for a small pool or small steps, or None for the backend's default."""
    limits = server_args.max_total_tokens, server_args.max_prefill_tokens, server_args.chunked_prefill_size
    is_small = any(
        limit is not None and limit < smallest for limit, smallest in zip(limits, _MIN_LIMITS_FOR_PAGES, strict=True)
    )
    return server_args.page_size or (1 if is_small else None)

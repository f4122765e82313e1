"""The table of attention backends: their names, the default of each device, and the KV layout that they need."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch

from ...mem_cache.joined_kv_pool import JoinedKVPool
from ...mem_cache.token_to_kv_pool import TokenToKVPool
from .. import cpu_extension
from ..kernels.tuning import INTERPRETER, MAX_HEAD_DIM, arch_of, extend_tile, latent_extend_tile
from .base import AttentionBackend, AttentionSpec
from .joined_backend import JoinedAttentionBackend

_PACKAGE = __package__
HOPPER = "hopper"
"""What `--hopper-prefill` makes of the backend triton."""
_LATENT = "latent"
"""What latent attention makes of it."""
# Modules are imported on use: importing the Triton backend takes half a second that a CPU server does not need.
_BACKENDS = {
    "torch": ("torch_backend", "TorchAttentionBackend"),
    "cpu": ("cpu_backend", "CpuAttentionBackend"),
    "triton": ("triton_backend", "TritonAttentionBackend"),
    HOPPER: ("hopper_backend", "HopperAttentionBackend"),
    _LATENT: ("latent_backend", "LatentAttentionBackend"),
}
BACKEND_NAMES = ("torch", "cpu", "triton")
"""What a user may choose."""
_KV_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn}
PAGE_OF_PANELS = 32
"""The default page size for a pool in panels: a multiple of the panel of every build."""
PAGE_OF_KV_TILES = 64
"""The default page size on GPUs with a paged tile of extend attention: a multiple of its `block_n`."""


def resolve_attention_backend(name: str, device: torch.device, head_dim: int = 0) -> str:
    """Turn `auto` into the name of a backend: on a GPU triton, or torch for heads that are too wide for its kernels.

    On a CPU it is cpu if its operations are built, else torch. `head_dim`: of the widest heads that are not latents.

    Raises ValueError for an unknown name and for a backend that cannot run on this device.
    """
    if name == "auto":
        if device.type == "cuda":
            return "triton" if head_dim <= MAX_HEAD_DIM else "torch"
        return "cpu" if cpu_extension.load() else "torch"
    if name not in BACKEND_NAMES:
        raise ValueError(f"attention backend must be auto, {', '.join(BACKEND_NAMES)}, got {name!r}")
    if name == "cpu" and (device.type != "cpu" or not cpu_extension.load()):
        hint = cpu_extension.build_hint()
        raise ValueError(f"attention backend cpu needs a CPU and the compiled C++ kernels. {hint}")
    return name


def resolve_kv_dtype(name: str, dtype: torch.dtype, backend: str) -> torch.dtype:
    """Turn the setting --kv-cache-dtype into a type. `dtype`: type of the activations; `backend`: a resolved name.

    Raises ValueError for an unknown name, and if the backend does not have the type.
    """
    if name == "auto":
        return dtype
    if name not in _KV_DTYPES:
        raise ValueError(f"kv_cache_dtype must be auto, {', '.join(_KV_DTYPES)}, got {name!r}")
    if backend != "triton":
        raise ValueError(f"--kv-cache-dtype {name} needs the attention backend triton, but it is {backend}")
    return _KV_DTYPES[name]


def kv_panel(
    backend: str, page_size: int, head_dim: int, dtype: torch.dtype, latent_dim: int | None = None
) -> int | None:
    """The panel of the KV pool in slots, or None if the pool has no panels (`TokenToKVPool`).

    `backend`: a name from `resolve_attention_backend`. `latent_dim`: that of latent attention, or None.
    """
    panel = cpu_extension.kv_panel(dtype, head_dim, latent_dim) if backend == "cpu" else None
    return panel if panel is not None and page_size % panel == 0 else None


def default_page_size(
    backend: str, head_dim: int, kv_dtype: torch.dtype, device: torch.device, latent_dim: int | None = None
) -> int:
    """The default page size in tokens: PAGE_OF_PANELS if the pool can have panels, PAGE_OF_KV_TILES if extend attention
    has a paged tile for the GPU, else 1.

    `backend`: a name from `resolve_attention_backend`. `latent_dim`: that of latent attention, or None.
    """
    if backend == "triton":
        arch, fp8, fp32 = arch_of(device), kv_dtype == torch.float8_e4m3fn, kv_dtype == torch.float32
        if arch == INTERPRETER:  # only tests, whose pools are small
            return 1
        if latent_dim is not None:  # one look-up for a tile: fewer registers hold addresses (docs/performance.md)
            return PAGE_OF_KV_TILES if latent_extend_tile(arch, PAGE_OF_KV_TILES).paged else 1
        return PAGE_OF_KV_TILES if extend_tile(arch, head_dim, fp8, fp32=fp32, page_size=PAGE_OF_KV_TILES).paged else 1
    return 1 if kv_panel(backend, PAGE_OF_PANELS, head_dim, kv_dtype, latent_dim) is None else PAGE_OF_PANELS


def create_attention_backend(name: str, specs: Sequence[AttentionSpec], kv_pool: TokenToKVPool) -> AttentionBackend:
    """Make the backend called `name`: HOPPER, or a result of `resolve_attention_backend`. `specs`: one per layer."""
    if isinstance(kv_pool, JoinedKVPool):
        of_pools: list[list[AttentionSpec]] = [[] for _ in kv_pool.pools]
        for spec, (pool, _) in zip(specs, kv_pool.places, strict=True):
            of_pools[pool].append(spec)
        pairs = zip(of_pools, kv_pool.pools, strict=True)
        return JoinedAttentionBackend([create_attention_backend(name, own, pool) for own, pool in pairs], kv_pool)
    if name == "triton" and specs[0].latent_dim is not None:
        name = _LATENT
    module, cls = _BACKENDS[name]
    backend = getattr(import_module(f".{module}", _PACKAGE), cls)(specs, kv_pool)
    assert isinstance(backend, AttentionBackend)
    return backend

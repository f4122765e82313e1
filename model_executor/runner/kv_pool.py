"""The KV pool of a runner."""

from __future__ import annotations

import torch

from ...mem_cache.joined_kv_pool import JoinedKVPool
from ...mem_cache.token_to_kv_pool import StoredConvolutions, TokenToKVPool
from ...srt.model_files.gemma4_config import Heads
from ...srt.model_files.model_config import ModelConfig
from ..attention.registry import kv_panel
from .settings import RunnerSettings


def kv_bytes_per_token(settings: RunnerSettings, config: ModelConfig) -> int:
    """The size of a token's slot in the pool, in bytes."""
    convolutions = stored_convolutions(config, settings.dtype)
    of_convolutions = 0 if convolutions is None else convolutions.bytes_per_token
    return attended_bytes_per_token(settings, config) + of_convolutions


def attended_bytes_per_token(settings: RunnerSettings, config: ModelConfig) -> int:
    """The size of a token's K and V in all layers, in bytes."""
    return sum(
        TokenToKVPool.bytes_per_token(
            len(layers), *heads, settings.kv_dtype, _panel(settings, config, heads.head_dim), config.latent_dim
        )
        for heads, layers in _layers_by_heads(config).items()
    )


def make_kv_pool(settings: RunnerSettings, config: ModelConfig, num_tokens: int) -> TokenToKVPool:
    """Make a pool of `num_tokens` tokens. Raises ValueError if its memory cannot be allocated."""
    by_heads = _layers_by_heads(config)
    try:
        pools = [
            TokenToKVPool(
                num_tokens,
                settings.page_size,
                len(layers),
                *heads,
                settings.kv_dtype,
                settings.device,
                _panel(settings, config, heads.head_dim),
                config.latent_dim,
                stored_convolutions(config, settings.dtype),
            )
            for heads, layers in by_heads.items()
        ]
    except OSError as error:  # a limit on the address space, or a system that does not overcommit memory
        num_mib = num_tokens * kv_bytes_per_token(settings, config) >> 20
        raise ValueError(
            f"a KV pool of {num_tokens} tokens ({num_mib} MiB) cannot be allocated: "
            f"{error.strerror}; choose a smaller --max-total-tokens, or raise the limit of memory (ulimit -v)"
        ) from None

    if len(pools) == 1:
        return pools[0]
    places = {layer: (pool, at) for pool, layers in enumerate(by_heads.values()) for at, layer in enumerate(layers)}
    return JoinedKVPool(pools, [places[layer] for layer in config.kv_layers])


def _layers_by_heads(config: ModelConfig) -> dict[Heads, list[int]]:
    """The layers that store K and V, by their heads."""
    found: dict[Heads, list[int]] = {}
    for layer in config.kv_layers:
        found.setdefault(config.heads(layer), []).append(layer)
    return found


def stored_convolutions(config: ModelConfig, dtype: torch.dtype) -> StoredConvolutions | None:
    """What the pool stores for short convolutions. `dtype`: that of activations; None: the model has no such layers."""
    if config.convolutions is None:
        return None
    return StoredConvolutions(len(config.convolutions.layers), config.convolutions.channels, dtype)


def _panel(settings: RunnerSettings, config: ModelConfig, head_dim: int) -> int | None:
    return kv_panel(settings.attention_backend, settings.page_size, head_dim, settings.kv_dtype, config.latent_dim)

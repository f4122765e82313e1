"""Latent attention (MLA, arXiv 2405.04434) in plain torch.

The pool has one key for each token: its latent, then the rotated components. Keys and values of the heads are linear
functions of the latent, but they are never made. Instead each query is multiplied by the matrix of its head's keys, so
that its product with a latent is the score, and the weighted sum of latents is multiplied by the matrix of its head's
values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...srt.model_files.latent_config import LatentConfig
from ..attention.base import AttentionBackend
from ..forward_batch import ForwardBatch
from .layernorm import RMSNorm
from .linear import Linear, can_pack
from .residual import Layer
from .rotary import CosSin, rotate


class LatentLayers(NamedTuple):
    """The layers and weights of latent attention, besides the first and the last linear layer."""

    kv_norm: RMSNorm
    """of the latents of keys and values"""
    query_norm: RMSNorm | None
    """of the latents of queries; None: queries have no latents"""
    query_proj: Layer | None
    """from the latents of queries to queries"""
    kv_b: torch.Tensor
    """What makes the keys and values of each head from a latent, [num_heads, nope_dim + value_dim, latent_dim]. Layers
    that pack it do not keep it."""


class HeadProducts:
    """A linear layer of each head: x [T, heads, in] -> [T, heads, out]; weight: [heads, in, out], not copied."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1)


class HeadLayers:
    """`HeadProducts` on a CPU: a linear layer of each head, which packs its weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._layers = [Linear(of_head.t().contiguous()) for of_head in weight]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        heads = zip(self._layers, x.unbind(1), strict=True)
        return torch.stack([layer(of_head.contiguous()) for layer, of_head in heads], 1)


def _head_products(weight: torch.Tensor) -> HeadLayers | HeadProducts:
    return HeadLayers(weight) if can_pack(weight) else HeadProducts(weight)


class LatentAttention:
    """Attention from the outputs of the first linear layer: [T, n] -> [T, heads * value_dim].

    Their columns are the queries, or the latents of queries, then the latent and the rotated components of keys.
    """

    def __init__(
        self,
        layer_id: int,
        backend: AttentionBackend,
        sizes: LatentConfig,
        layers: LatentLayers,
        angles: Callable[[Any], CosSin],
    ) -> None:
        """`angles`: makes what `rotate` takes from a rotation of the model."""
        self._layer_id = layer_id
        self._backend = backend
        self._sizes = sizes
        self._kv_norm, self._query_norm, self._query_proj = layers.kv_norm, layers.query_norm, layers.query_proj
        self._angles = angles
        to_keys, to_values = layers.kv_b.split((sizes.nope_dim, sizes.value_dim), 1)
        self._absorb_keys, self._absorb_values = _head_products(to_keys), _head_products(to_values.transpose(1, 2))

    def __call__(self, projected: torch.Tensor, rotation: Any, batch: ForwardBatch) -> torch.Tensor:
        sizes, num_heads = self._sizes, self._backend.num_heads
        num_tokens, key_dim, latent_dim = len(projected), sizes.key_dim, sizes.latent_dim
        queries, latents, rotated = projected.split((projected.shape[1] - key_dim, latent_dim, sizes.rope_dim), 1)
        if self._query_proj is not None:
            assert self._query_norm is not None
            queries = self._query_proj(self._query_norm(queries.contiguous()), batch)
        queries = queries.view(num_tokens, num_heads, sizes.query_dim)
        cos_sin = self._angles(rotation)
        k = projected.new_empty(num_tokens, 1, key_dim)
        k[:, 0, :latent_dim] = self._kv_norm(latents.contiguous())
        k[..., latent_dim:] = rotate(rotated[:, None], cos_sin)
        q = projected.new_empty(num_tokens, num_heads, key_dim)
        q[..., :latent_dim] = self._absorb_keys(queries[..., : sizes.nope_dim])
        q[..., latent_dim:] = rotate(queries[..., sizes.nope_dim :], cos_sin)
        attended = self._backend.forward(q, k, k[..., :latent_dim], self._layer_id, batch)
        return self._absorb_values(attended.view(num_tokens, num_heads, latent_dim)).reshape(num_tokens, -1)


def same_angles(rotation: CosSin) -> CosSin:
    """The rotation of RotaryEmbedding as `rotate` takes it."""
    return rotation


def angles_of_halves(rotation: CosSin) -> CosSin:
    """The rotation of a table, [T, rope_dim / 2] each, as `rotate` takes it."""
    cos, sin = rotation.cos[:, None], rotation.sin[:, None]
    return CosSin(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))

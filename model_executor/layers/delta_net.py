"""Gated DeltaNet (arXiv 2412.06464) as in Qwen 3.5, in plain torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import silu, softplus

from ...srt.model_files.delta_net_config import DeltaNetConfig
from ..forward_batch import ForwardBatch
from ..row_states import LayerStates, copy_states

_L2_EPS = 1e-6
"""of the norms of queries and keys"""


class DeltaNetWeights(NamedTuple):
    """The weights of a Gated DeltaNet between its two linear layers."""

    convolution: torch.Tensor
    """[channels, 1, width], those of the oldest token first"""
    decay_log: torch.Tensor
    """float32 [num_value_heads], logarithms of the rates of decay"""
    decay_bias: torch.Tensor
    """float32 [num_value_heads]"""
    norm: torch.Tensor
    """[value_dim]"""


class DeltaNet:
    """A Gated DeltaNet between two linear layers: [T, sum(projected_sizes)] -> [T, value_size].

    Of each token and value head, with the query q, the key k and the value v after the convolution and its SiLU, and
    both q and k of length 1:

        strength = sigmoid(b),  decay = exp(-exp(decay_log) * softplus(a + decay_bias))
        state = decay * state
        state = state + k (strength * (v - state^T k))^T
        out = RMSNorm(state^T q / sqrt(key_dim)) * silu(gate)

    All of it is computed in float32, token by token.
    """

    def __init__(self, sizes: DeltaNetConfig, states: LayerStates, weights: DeltaNetWeights, eps: float) -> None:
        """`eps`: that of the norm of outputs."""
        self._sizes = sizes
        self._states = states
        self._convolution = weights.convolution.flatten(1).t().float().contiguous()
        """[width, channels]"""
        self._decay_rate = weights.decay_log.float().exp()
        self._decay_bias = weights.decay_bias.float()
        self._norm = weights.norm.float()
        self._eps = eps

    def __call__(self, projected: torch.Tensor, rotation: Any, batch: ForwardBatch) -> torch.Tensor:
        if batch.extend_start_loc is None:
            return self._advance(projected, batch.rows, batch.positions)
        assert batch.extend_lens_host is not None
        out = projected.new_empty(len(projected), self._sizes.value_size)
        lens, starts = torch.from_numpy(batch.extend_lens_host), batch.extend_start_loc[:-1]
        for index in range(int(lens.max())):
            longer = (lens > index).nonzero().flatten().to(projected.device)
            tokens = starts[longer] + index
            out[tokens] = self._advance(projected[tokens], batch.rows[longer], batch.positions[tokens])
            if batch.saved_states is not None:
                is_saved = batch.saved_states.lens[longer] == batch.positions[tokens] + 1
                saved = longer[is_saved]
                copy_states([self._states], batch.rows[saved], batch.saved_states.rows[saved])
        return out

    def _advance(self, projected: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute one token of each of B rows: [B, sum(projected_sizes)] -> [B, value_size]."""
        sizes = self._sizes
        mixed, gate, strength, decay = projected.split(sizes.projected_sizes, 1)
        q, k, v = self._convolve(mixed, rows, positions).split((sizes.key_size, sizes.key_size, sizes.value_size), 1)
        q, k = (self._of_value_heads(x) for x in (q, k))
        v = v.unflatten(1, (sizes.num_value_heads, -1))
        decay = torch.exp(-self._decay_rate * softplus(decay.float() + self._decay_bias))

        state = self._states.matrices[rows].masked_fill_((positions == 0)[:, None, None, None], 0)
        state *= decay[..., None, None]
        change = (v - (state * k[..., None]).sum(2)) * strength.float().sigmoid()[..., None]
        state += k[..., None] * change[:, :, None, :]
        self._states.matrices[rows] = state
        out = (state * q[..., None]).sum(2) * sizes.key_dim**-0.5
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + self._eps) * self._norm
        return (out.flatten(1) * silu(gate.float())).to(projected.dtype)

    def _convolve(self, inputs: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The SiLU of the convolution, float32 [B, channels]. Stores the inputs."""
        recent, num_recent = self._states.recent, self._sizes.width - 1
        total = torch.zeros_like(inputs, dtype=torch.float32)
        for index in range(num_recent):
            earlier = positions - (num_recent - index)
            found = recent[rows, earlier % num_recent].float().masked_fill_((earlier < 0)[:, None], 0)
            total = total + found * self._convolution[index]
        total = total + inputs.float() * self._convolution[-1]
        recent[rows, positions % num_recent] = inputs.to(recent.dtype)
        return silu(total)

    def _of_value_heads(self, x: torch.Tensor) -> torch.Tensor:
        """The queries or keys of the value heads, of length 1: [B, key_size] -> [B, num_value_heads, key_dim]."""
        x = x.unflatten(1, (self._sizes.num_key_heads, -1))
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)
        return x.repeat_interleave(self._sizes.num_value_heads // self._sizes.num_key_heads, 1)

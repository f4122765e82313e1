"""The memory that a step takes on a CPU in addition to weights, K and V, computed from shapes.

On a GPU it is measured (warmup.py). On a CPU the largest step would take minutes.
"""

from __future__ import annotations

import torch

from ...srt.model_files.model_config import ModelConfig
from ..layers.quantized_weight import GROUP

_FLOAT_BYTES = 4
_SCRATCH_BYTES_OF_GROUP = GROUP + 12
"""Bytes per group of activations quantized to 8 bits: the values, and the group's 12 bytes in csrc/cpu/quantized.h."""


def activation_bytes(
    config: ModelConfig, dtype: torch.dtype, *, tokens: int, rows: int, compiled: bool, quantized: bool
) -> int:
    """An upper bound in bytes of the memory of a step with `tokens` tokens, including the logits of `rows` tokens.

    `compiled`: whether all layers are compiled operations.
    """
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inter = config.hidden_size, config.intermediate_size
    # Input, residual and its norm; queries, keys and values; the attention outputs of this layer and the one before.
    attention = (3 * hidden + 3 * q_size + 2 * kv_size) * dtype.itemsize
    # Input, residual, its norm and the output; the attention output; the gated activations.
    feed_forward = (4 * hidden + q_size + inter) * dtype.itemsize
    if not compiled:
        attention += (2 * q_size + 2 * kv_size) * 2 * _FLOAT_BYTES  # rotated in float32
        feed_forward += 2 * inter * dtype.itemsize  # the outputs of the gate and up projections
    in_a_norm = 0 if compiled else 2 * hidden * _FLOAT_BYTES
    scratch = max(hidden, q_size, inter) // GROUP * _SCRATCH_BYTES_OF_GROUP if quantized else 0
    per_logit = _FLOAT_BYTES if compiled else _FLOAT_BYTES + dtype.itemsize
    return tokens * (max(attention, feed_forward) + in_a_norm + scratch) + rows * config.vocab_size * per_logit


def rotation_bytes(config: ModelConfig, num_positions: int) -> int:
    """The size in bytes of the table of cosines and sines (layers/cpu_layers.py)."""
    return num_positions * config.head_dim * _FLOAT_BYTES

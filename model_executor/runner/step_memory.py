"""Memory that steps take on a CPU, beside weights, keys and values. On a GPU it is measured (warmup.py); here the
largest step would take minutes, so it is worked out from shapes."""

from __future__ import annotations

import torch

from ...srt.model_files.model_config import ModelConfig
from ..layers.quantized_weight import GROUP

_FLOAT_BYTES = 4
_SCRATCH_BYTES_OF_GROUP = GROUP + 12
"""of a row that is multiplied with quantized weights: its numbers in 8 bits, and what csrc/cpu/quantized.h says of each
group of them"""


def activation_bytes(
    config: ModelConfig, dtype: torch.dtype, *, tokens: int, rows: int, compiled: bool, quantized: bool
) -> int:
    """At most so many bytes for a step of `tokens` tokens, with the logits of `rows` of them.

    `compiled`: whether all layers are compiled operations.
    """
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inter = config.hidden_size, config.intermediate_size
    # Input, residual and its norm; queries, keys and values; what this layer finds, and the layer before has found.
    attention = (3 * hidden + 3 * q_size + 2 * kv_size) * dtype.itemsize
    # The same three and the output; what attention has found; the gated numbers.
    feed_forward = (4 * hidden + q_size + inter) * dtype.itemsize
    if not compiled:
        attention += (2 * q_size + 2 * kv_size) * 2 * _FLOAT_BYTES  # rotated in float32
        feed_forward += 2 * inter * dtype.itemsize  # gate and up projection before they are multiplied
    in_a_norm = 0 if compiled else 2 * hidden * _FLOAT_BYTES
    scratch = max(hidden, q_size, inter) // GROUP * _SCRATCH_BYTES_OF_GROUP if quantized else 0
    per_logit = _FLOAT_BYTES if compiled else _FLOAT_BYTES + dtype.itemsize
    return tokens * (max(attention, feed_forward) + in_a_norm + scratch) + rows * config.vocab_size * per_logit


def rotation_bytes(config: ModelConfig, num_positions: int) -> int:
    """Of cosines and sines (layers/cpu_layers.py)."""
    return num_positions * config.head_dim * _FLOAT_BYTES

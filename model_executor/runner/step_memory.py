"""The memory that a step takes on a CPU in addition to weights, K and V, computed from shapes.

On a GPU it is measured (warmup.py), and only the memory of torch's attention is also computed. On a CPU the largest
step would take minutes.
"""

from __future__ import annotations

import math

import torch

from ...srt.model_files.delta_net_config import DeltaNetConfig
from ...srt.model_files.experts_config import ExpertsConfig
from ...srt.model_files.model_config import ModelConfig
from ...srt.model_files.short_convolutions import ShortConvolutions
from ..attention.torch_backend import gathered_tokens, scores_at_once
from ..layers.lora_layers import LoraSize
from ..layers.quantized_weight import GROUP
from ..models.family import family_of
from ..weights.lora_checkpoint import lora_shapes
from .settings import RunnerSettings

_FLOAT_BYTES = 4
_SLOT_BYTES = 8 + 1
"""An index of a slot, and its place in a mask."""
_PLANNING_BYTES = 8 + 8 + 4
"""Per token of a rectangle while its slots are looked up: columns, positions, slots of 32 bits."""
_SCORE_BYTES = 3 * _FLOAT_BYTES
"""Per query head and pair of positions: scores, probabilities and the mask as numbers."""
_SPLIT = 256
"""Keys of a split: `kSplit` of csrc/cpu/attention_plan.h."""
_WIDTH = 32
"""A saved result, and a row of the sums of experts, has a multiple of this many numbers, or of a half of it."""
_MOST_STACKED = 4
"""Most matrices that are stacked in a layer: queries, keys, values and gates."""
_SCRATCH_BYTES_OF_GROUP = 2 * GROUP + 12
"""Bytes per group of activations quantized to 8 bits (csrc/cpu/quantized.h): values of at most 2 bytes, and 12 more."""


def activation_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    tokens: int,
    rows: int,
    compiled: bool,
    quantized: bool = False,
    widened: bool = False,
    lora: LoraSize | None = None,
) -> int:
    """An upper bound in bytes of the memory of a step with `tokens` tokens, including the logits of `rows` tokens.

    `compiled`: whether all layers are compiled operations. `quantized`, `widened`: whether linear layers round their
    inputs to integers, or widen them to float32. `lora`: None if no layer has adapters.
    """
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, latent = config.hidden_size, config.latent
    inter = config.intermediate_size if config.has_dense_layers else 0
    # Input, residual and its norm; queries, keys and values; the attention outputs of this layer and the one before.
    attention = (3 * hidden + 3 * q_size + 2 * kv_size) * dtype.itemsize
    if latent is not None:
        # The outputs of the first layer and their parts; queries and the outputs of heads, both also in another order.
        first = config.num_heads * latent.query_dim if latent.query_rank is None else latent.query_rank
        of_heads = config.num_heads * (latent.query_dim + latent.value_dim)
        attention += 2 * (first + latent.key_dim + of_heads) * dtype.itemsize
    attention += config.num_attention_gates * dtype.itemsize
    mixed_size = max(q_size, _other_mixed_size(config))
    # Input, residual, its norm and the output; the attention output; the gated activations.
    feed_forward = (4 * hidden + mixed_size + inter) * dtype.itemsize
    if not compiled:
        attention += (2 * q_size + 2 * kv_size) * 2 * _FLOAT_BYTES  # rotated in float32
        attention += 2 * config.num_attention_gates * _FLOAT_BYTES
        feed_forward += 2 * inter * dtype.itemsize  # the outputs of the gate and up projections
    if config.convolutions is not None:
        convolution = 3 * hidden * dtype.itemsize + _convolution_bytes(config.convolutions, dtype, compiled=compiled)
        attention = max(attention, convolution)
    if config.delta_net is not None:
        attention = max(attention, 3 * hidden * dtype.itemsize + _delta_net_bytes(config.delta_net, dtype))
    if config.experts is not None:
        bytes_of = _compiled_expert_bytes if compiled else _expert_bytes
        experts = (4 * hidden + mixed_size) * dtype.itemsize + bytes_of(config.experts, hidden, dtype)
        if config.experts.float32_router and dtype != torch.float32:
            experts += hidden * _FLOAT_BYTES  # the input of the router
        feed_forward = max(feed_forward, experts, _shared_expert_bytes(config, dtype, compiled=compiled))
    # Norms of outputs have weights of float32, so torch converts what they normalise.
    in_a_norm = 0 if compiled else (3 if config.output_norms else 2) * hidden * _FLOAT_BYTES
    longest_latent = 0 if latent is None else max(latent.latent_dim, latent.query_rank or 0)
    if not compiled:  # of latents, torch also keeps the input of the norm while it makes the output
        in_a_norm = max(in_a_norm, 3 * longest_latent * _FLOAT_BYTES)
    widest = max(hidden, longest_latent, q_size, config.num_heads * config.value_dim, *config.feed_forward_widths)
    if compiled and config.experts is not None:  # their input and the products of gate and up exist together
        widest = max(widest, hidden + config.experts.num_experts_per_token * config.experts.intermediate_size)
    scratch = widest // GROUP * _SCRATCH_BYTES_OF_GROUP if quantized else widest * _FLOAT_BYTES if widened else 0
    floats_of_adapter = 0
    if lora is not None:
        scratch += _lora_bytes(config, dtype, lora, compiled=compiled)
        if not compiled:  # torch multiplies the matrices of a layer in float32
            floats_of_adapter = lora.max_rank * max(
                sum(shape.rows) + len(shape.rows) * shape.columns for shape in lora_shapes(config).values()
            )
    per_logit = _FLOAT_BYTES if compiled else _FLOAT_BYTES + dtype.itemsize
    per_token = max(attention, feed_forward) + in_a_norm + scratch
    if config.gemma4 is not None:
        per_token = max(per_token + _layer_end_bytes(config, dtype), _layer_input_bytes(config, dtype))
    return tokens * per_token + rows * config.vocab_size * per_logit + floats_of_adapter * _FLOAT_BYTES


def _layer_end_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """An upper bound in bytes of what the layers of Gemma 4 take for a token besides what others do."""
    assert config.gemma4 is not None
    kv_size, input_dim = config.num_kv_heads * config.head_dim, config.gemma4.input_dim
    # The projection with a copy of the keys; the norm of values in float32. The inputs of all layers, the gate of one,
    # both beside each other, and their product.
    projected = (config.num_heads * config.head_dim + 2 * kv_size) * dtype.itemsize + 2 * kv_size * _FLOAT_BYTES
    return projected + (config.num_layers + 4) * input_dim * dtype.itemsize


def _layer_input_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """An upper bound in bytes of what making the inputs of layers takes for a token, with its embedding."""
    assert config.gemma4 is not None
    # The cosines and sines of both kinds of layers.
    rotations = 4 * config.head_dim * _FLOAT_BYTES
    # The projected embedding, its norm, also in float32, and the rows of the table.
    of_number = 3 * dtype.itemsize + 2 * _FLOAT_BYTES
    return 2 * config.hidden_size * dtype.itemsize + rotations + config.num_layers * config.gemma4.input_dim * of_number


def _convolution_bytes(convolutions: ShortConvolutions, dtype: torch.dtype, *, compiled: bool) -> int:
    """An upper bound in bytes of what a short convolution takes for a token, with its output and that of the layer
    before."""
    # The three vectors, and both outputs.
    numbers = 5 * convolutions.channels * dtype.itemsize
    if compiled:
        return numbers
    # The product of two vectors; the sum, what is added to it, that as floats, and its product; rows, positions, slots.
    return numbers + convolutions.channels * (2 * dtype.itemsize + 4 * _FLOAT_BYTES) + 4 * 8


def _other_mixed_size(config: ModelConfig) -> int:
    """Components that the mixers of layers without attention make of a token."""
    if config.delta_net is not None:
        return config.delta_net.value_size
    return 0 if config.convolutions is None else config.convolutions.channels


def _delta_net_bytes(sizes: DeltaNetConfig, dtype: torch.dtype) -> int:
    """An upper bound in bytes of what a Gated DeltaNet takes for a token, without what `recurrence_bytes` counts."""
    # The outputs of the first layer; the own outputs, and those of the layer before.
    return (sum(sizes.projected_sizes) + 2 * sizes.value_size) * dtype.itemsize


def recurrence_bytes(sizes: DeltaNetConfig, *, rows: int) -> int:
    """An upper bound in bytes of what a Gated DeltaNet in torch takes for one token of each of `rows` rows at once."""
    # The states, and a product with each number of them; a copy for the row that is stored.
    of_states = 3 * math.prod(sizes.state_shape)
    # The chosen outputs of the first layer; the convolution, what is added to it, that as floats, and its SiLU; queries
    # and keys of value heads, their products and their norms; the outputs in steps.
    of_vectors = 9 * sum(sizes.projected_sizes) + 6 * sizes.num_value_heads * sizes.key_dim
    return rows * (of_states + of_vectors) * _FLOAT_BYTES


def _lora_bytes(config: ModelConfig, dtype: torch.dtype, lora: LoraSize, *, compiled: bool) -> int:
    """An upper bound in bytes of what a layer with adapters takes for a token: all tokens may have the same one."""
    dense = 2 * config.intermediate_size if config.has_dense_layers else 0
    if config.experts is not None and config.experts.shared is not None:
        dense = max(dense, 2 * config.experts.shared.intermediate_size)
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inputs = max(config.hidden_size, q_size, _other_mixed_size(config), dense // 2)
    hidden = (_MOST_STACKED * lora.max_rank + _WIDTH) * _FLOAT_BYTES
    if compiled:
        return hidden + inputs * _FLOAT_BYTES  # some types are widened
    outputs = max(config.hidden_size, q_size + 2 * kv_size + config.num_attention_gates, dense)
    if config.convolutions is not None:
        outputs = max(outputs, 3 * config.convolutions.channels)
    if config.delta_net is not None:
        outputs = max(outputs, sum(config.delta_net.projected_sizes))
    # The inputs of the tokens, and as floats; the products of each stacked matrix and of all, the old and new outputs.
    return hidden + inputs * (dtype.itemsize + _FLOAT_BYTES) + outputs * (3 * _FLOAT_BYTES + 2 * dtype.itemsize)


def _expert_bytes(experts: ExpertsConfig, hidden: int, dtype: torch.dtype) -> int:
    """An upper bound in bytes of what a mixture of experts takes for a token: all tokens may choose the same expert."""
    # Logits, probabilities, and both in order, with their indices; the chosen ones, and what finds their tokens.
    choice = experts.num_experts * (4 * _FLOAT_BYTES + 8) + experts.num_experts_per_token * (3 * 8 + _FLOAT_BYTES + 1)
    if experts.num_groups > 1:  # the experts of the chosen groups, and their probabilities
        choice += experts.num_experts * (8 + _FLOAT_BYTES)
    # The sum; that of the tokens of an expert, its weighted output, and the new sum.
    sums = 4 * hidden * _FLOAT_BYTES
    # The tokens of an expert, its gate and up projections, their product and its output; the two places of a token.
    return choice + sums + (2 * hidden + 3 * experts.intermediate_size) * dtype.itemsize + 2 * 8


def _compiled_expert_bytes(experts: ExpertsConfig, hidden: int, dtype: torch.dtype) -> int:
    """The same for the compiled operation (csrc/cpu/experts_ops.h)."""
    # Logits; expert, token and weight of each choice, by token and by expert.
    choice = experts.num_experts * _FLOAT_BYTES + experts.num_experts_per_token * 4 * _FLOAT_BYTES
    sums = -(-hidden // _WIDTH) * _WIDTH * _FLOAT_BYTES
    return choice + sums + experts.num_experts_per_token * experts.intermediate_size * dtype.itemsize


def _shared_expert_bytes(config: ModelConfig, dtype: torch.dtype, *, compiled: bool) -> int:
    """An upper bound in bytes of what a layer takes for a token while it computes the shared expert."""
    if config.experts is None or config.experts.shared is None:
        return 0
    hidden, inter = config.hidden_size, config.experts.shared.intermediate_size
    # Input, residual, its norm, the output of the other experts and the own one; the attention output; the gated
    # activations. The gate.
    numbers = 5 * hidden + config.num_heads * config.head_dim + inter
    if compiled:
        return numbers * dtype.itemsize + _FLOAT_BYTES
    # The outputs of gate and up projections; the gate and its sigmoid in steps, and the product with it.
    return (numbers + 2 * inter) * dtype.itemsize + (4 + hidden) * _FLOAT_BYTES


def gather_bytes(config: ModelConfig, dtype: torch.dtype, *, tokens: int, chunk: int, rows: int, longest: int) -> int:
    """An upper bound in bytes of what the torch attention backend takes in a step, besides its inputs and outputs.

    It gathers K and V of one rectangle or one chunk at a time. The slots and masks of all of them exist during the
    whole step, once for each kind of window. `tokens`: prompt tokens of the step. `chunk`: most of them in one request.
    `rows`: requests. `longest`: most tokens that a request attends to.
    """
    kv_bytes = 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
    gathered = gathered_tokens(rows, longest) * (kv_bytes + _PLANNING_BYTES)
    num_windows = len(set(config.sliding_windows))
    slots_and_masks = num_windows * (rows * longest * _SLOT_BYTES + min(tokens, rows * chunk) * longest)
    # torch converts the mask of a chunk to the type of the scores; making the mask takes two more of bytes.
    return gathered + slots_and_masks + chunk * longest * (dtype.itemsize + 2)


def bytes_in_steps(config: ModelConfig, *, chunk: int, rows: int, longest: int) -> int:
    """An upper bound in bytes of what torch attention takes besides `gather_bytes` for layers that compute in steps.

    These have sinks, soft caps or latents, and compute in float32. Arguments as in `gather_bytes`.
    """
    kv = 2 * config.num_kv_heads * config.head_dim * gathered_tokens(rows, longest)
    # The queries, their product with the scale, the products with values and the outputs.
    queries = 4 * config.num_heads * config.head_dim * max(rows, chunk)
    return (kv + queries + scores_at_once(config.num_heads, rows, longest)) * _FLOAT_BYTES


def torch_attention_bytes(
    settings: RunnerSettings, config: ModelConfig, longest: int, *, writes_scores: bool = False
) -> int:
    """An upper bound in bytes of what the torch attention backend takes in a step, besides its inputs and outputs.

    `longest`: most tokens that a request attends to. `writes_scores`: whether torch writes the scores of a chunk. It
    does not on a CPU. On a GPU it may: not each of its kernels has both a mask and shared KV heads.
    """
    chunk = min(settings.chunked_prefill_size, settings.max_prefill_tokens, longest)
    gathered = gather_bytes(
        config,
        settings.dtype,
        tokens=settings.max_prefill_tokens,
        chunk=chunk,
        rows=settings.max_running_requests,
        longest=longest,
    )
    specs = family_of(config).attention(config)
    if any(spec.has_sinks or spec.soft_cap is not None or spec.latent_dim is not None for spec in specs):
        gathered += bytes_in_steps(config, chunk=chunk, rows=settings.max_running_requests, longest=longest)
    return gathered + (chunk * longest * config.num_heads * _SCORE_BYTES if writes_scores else 0)


def saved_split_bytes(config: ModelConfig, *, rows: int, longest: int) -> int:
    """An upper bound in bytes of the results that compiled decode attention saves, one for each split of a request.

    It saves those of prefixes that requests share (csrc/cpu/saved_splits.h). `longest`: most tokens of a request.
    """
    num_splits, width = -(-longest // _SPLIT), -(-config.head_dim // _WIDTH) * _WIDTH
    return rows * num_splits * config.num_heads * (width + 2) * _FLOAT_BYTES


def rotation_bytes(config: ModelConfig, num_positions: int) -> int:
    """The size in bytes of the tables of cosines and sines (layers/cpu_layers.py)."""
    return len(set(config.ropes)) * num_positions * config.rope_dim * _FLOAT_BYTES

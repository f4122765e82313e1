"""The speed limit of a step: the minimum bytes and operations of a model's step, and the minimum time for them.

A decode step reads every weight once, and the keys and values of every request once. It also reads and writes the
states of recurrent layers. A prefill multiplies every token
with every weight. The embedding is a look-up, so it counts only if it is also the output head. Of experts, only those
count that a token chooses. Each token is taken to choose at random, and all experts to be equally probable. If tokens
choose the same experts, a step reads fewer.

Two simplifications: Norms, activations and logits are left out, which makes the limit slightly too fast. The last layer
counts in full, although the model skips most of it for tokens that are not sampled (models/decoder.py). So a model of
two or three layers can be faster than its limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..model_executor.models.family import family_of
from ..model_executor.models.parameters import is_expert
from ..model_executor.row_states import state_bytes
from ..model_executor.runner.kv_pool import attended_bytes_per_token
from ..model_executor.runner.settings import RunnerSettings
from ..model_executor.weights.quantization import parameter_bytes
from ..srt.model_files.model_config import ModelConfig


@dataclass(frozen=True)
class ModelCost:
    """Bytes and floating-point operations of a model, summed over all layers."""

    weight_bytes: int
    """Bytes of weights that every sampling step reads."""
    kv_bytes_per_token: int
    layer_flops_per_token: int
    """Operations of the linear layers for one token, without attention and output head."""
    head_flops_per_token: int
    """Operations of the output head for one sampled token."""
    attention_flops_per_pair: int
    """Operations of attention for one pair of a query position and a key position."""
    expert_bytes: int = 0
    """Bytes of all experts."""
    chosen_share: float = 0.0
    """The share of the experts of a layer that a token chooses."""
    state_bytes: int = 0
    """Bytes of the states of recurrent layers, for one request."""

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype_bytes: int,
        *,
        kv_bytes_per_token: int,
        matrix_bytes: int,
        forms: Mapping[str, str],
    ) -> ModelCost:
        """`dtype_bytes`, `matrix_bytes`, `forms`: as in `parameter_bytes`."""
        shapes = {parameter.name: parameter.shape for parameter in family_of(config).parameters(config)}
        embedding = shapes.pop("embed_tokens.weight")
        head = shapes.pop("lm_head.weight", embedding)
        matrices = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) > 1}
        in_layers = sum(size for name, size in matrices.items() if not is_expert(name))
        num_bytes = parameter_bytes(config, dtype_bytes, matrix_bytes=matrix_bytes, forms=forms)
        expert_bytes = sum(num_bytes.pop(name) for name in shapes if is_expert(name))
        chosen_share = 0.0
        if config.experts is not None:
            chosen_share = config.experts.num_experts_per_token / config.experts.num_experts
            in_experts = sum(size for name, size in matrices.items() if is_expert(name))
            in_layers += in_experts * config.experts.num_experts_per_token // config.experts.num_experts
        if not config.tie_word_embeddings:
            del num_bytes["embed_tokens.weight"]
        delta_net = config.delta_net
        if delta_net is not None:  # products of a state with the query and the key, and what a token adds to it
            in_layers += 3 * len(delta_net.layers) * math.prod(delta_net.state_shape)
        # The products of a query with a key, and of a weight with a value.
        pair_dims = len(config.attention_layers) * (config.head_dim + config.attended_dim)
        if config.gemma4 is not None:  # whose heads differ from layer to layer
            pair_dims = sum(2 * heads.head_dim for heads in config.gemma4.heads)
        return cls(
            weight_bytes=sum(num_bytes.values()),
            kv_bytes_per_token=kv_bytes_per_token,
            layer_flops_per_token=2 * in_layers,
            head_flops_per_token=2 * math.prod(head),
            attention_flops_per_pair=2 * config.num_heads * pair_dims,
            expert_bytes=expert_bytes,
            chosen_share=chosen_share,
            state_bytes=0 if delta_net is None else state_bytes(delta_net, dtype_bytes),
        )

    @classmethod
    def of_runner(cls, config: ModelConfig, settings: RunnerSettings) -> ModelCost:
        return cls.of(
            config,
            settings.dtype.itemsize,
            kv_bytes_per_token=attended_bytes_per_token(settings, config),
            matrix_bytes=settings.weight_dtype.itemsize,
            forms=settings.weight_forms,
        )

    def read_bytes(self, num_tokens: int) -> int:
        """Bytes of weights that a sampling step of so many tokens reads."""
        return self.weight_bytes + round(self.expert_bytes * (1 - (1 - self.chosen_share) ** num_tokens))

    def decode_bytes(self, context_lens: Sequence[int]) -> int:
        """Bytes that one decode step moves. `context_lens`: context length of each request, its new token included."""
        of_states = 2 * self.state_bytes * len(context_lens)  # read and written
        return self.read_bytes(len(context_lens)) + self.kv_bytes_per_token * sum(context_lens) + of_states

    def prefill_flops(self, prompt_lens: Sequence[int]) -> int:
        """Operations of prefilling whole prompts and sampling one token for each."""
        return (
            self.layer_flops_per_token * sum(prompt_lens)
            + self.attention_flops_per_pair * sum(map(causal_pairs, prompt_lens))
            + self.head_flops_per_token * len(prompt_lens)
        )


def causal_pairs(end: int, start: int = 0) -> int:
    """Number of (query, key) pairs with a query position in [start, end) and a key position up to it."""
    return (end * (end + 1) - start * (start + 1)) // 2


@dataclass(frozen=True)
class Ceilings:
    """The device's measured maximum speeds in this run."""

    bytes_per_s: float
    """Bandwidth of a large copy. Bytes read and bytes written both count."""
    flops_per_s: float
    """Highest rate of multiplication of numbers of one type."""
    flops_source: str = "matrix product"
    """What has this rate: a large matrix product on random data, or an instruction of a CPU."""


def decode_step_s(cost: ModelCost, context_lens: Sequence[int], ceilings: Ceilings) -> float:
    """Minimum seconds of one decode step."""
    return cost.decode_bytes(context_lens) / ceilings.bytes_per_s


def prefill_s(cost: ModelCost, prompt_lens: Sequence[int], ceilings: Ceilings) -> float:
    """Minimum seconds of prefilling these prompts."""
    by_flops = cost.prefill_flops(prompt_lens) / ceilings.flops_per_s
    return max(by_flops, cost.read_bytes(sum(prompt_lens)) / ceilings.bytes_per_s)


def workload_s(cost: ModelCost, prompt_lens: Sequence[int], output_lens: Sequence[int], ceilings: Ceilings) -> float:
    """Minimum seconds of whole requests, if all fit into memory and start at once.

    One prefill computes all prompts and gives each request its first token. Every request takes part in each following
    decode step until its last token.
    """
    running = [sum(output > step for output in output_lens) for step in range(1, max(output_lens))]
    kv_reads = sum(
        causal_pairs(prompt + output - 1, prompt) for prompt, output in zip(prompt_lens, output_lens, strict=True)
    )
    decode_bytes = sum(map(cost.read_bytes, running)) + kv_reads * cost.kv_bytes_per_token
    return prefill_s(cost, prompt_lens, ceilings) + decode_bytes / ceilings.bytes_per_s

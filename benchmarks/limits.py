"""What physics allows: the fewest bytes and operations that a step of a model takes, and the time they need at least.

A decode step reads every weight once and the keys and values of every request once; a prefill multiplies every token
with every weight. The embedding is a look-up: it counts only where it is the output head too. Small things (norms,
activations, logits) are left out, so a limit is a little optimistic. On the other side, most of the last layer is not
needed for tokens that nothing is sampled from (models/decoder.py), and counted as if it were: a model of two or three
layers can come out better than its limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..model_executor.models.family import family_of
from ..model_executor.weights.quantization import parameter_bytes
from ..srt.model_files.model_config import ModelConfig


@dataclass(frozen=True)
class ModelCost:
    """Bytes and floating-point operations of a model in one dtype. All numbers are of all layers together."""

    weight_bytes: int
    """read by a step that samples"""
    kv_bytes_per_token: int
    layer_flops_per_token: int
    """linears of the layers; attention and head come on top"""
    head_flops_per_token: int
    """of a token that is sampled"""
    attention_flops_per_pair: int
    """of one query position and one key position that it sees"""

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype_bytes: int,
        kv_dtype_bytes: int | None = None,
        quantization: str | None = None,
    ) -> ModelCost:
        shapes = {parameter.name: parameter.shape for parameter in family_of(config).parameters(config)}
        embedding = shapes.pop("embed_tokens.weight")
        head = shapes.pop("lm_head.weight", embedding)
        in_layers = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
        num_bytes = parameter_bytes(config, dtype_bytes, quantization)
        if not config.tie_word_embeddings:
            del num_bytes["embed_tokens.weight"]
        kv_heads = config.num_layers * config.num_kv_heads * config.head_dim
        return cls(
            weight_bytes=sum(num_bytes.values()),
            kv_bytes_per_token=2 * kv_heads * (kv_dtype_bytes or dtype_bytes),
            layer_flops_per_token=2 * in_layers,
            head_flops_per_token=2 * math.prod(head),
            attention_flops_per_pair=4 * config.num_layers * config.num_heads * config.head_dim,
        )

    def decode_bytes(self, context_lens: Sequence[int]) -> int:
        """Bytes that one decode step moves; `context_lens`: tokens each request attends to, the new one included."""
        return self.weight_bytes + self.kv_bytes_per_token * sum(context_lens)

    def prefill_flops(self, prompt_lens: Sequence[int], cached_lens: Sequence[int] | None = None) -> int:
        """Operations of whole prompts, one sampled token each, of which the first `cached_lens` tokens are cached."""
        cached = [0] * len(prompt_lens) if cached_lens is None else cached_lens
        new = sum(prompt_lens) - sum(cached)
        pairs = sum(causal_pairs(end, start) for start, end in zip(cached, prompt_lens, strict=True))
        return (
            self.layer_flops_per_token * new
            + self.attention_flops_per_pair * pairs
            + self.head_flops_per_token * len(prompt_lens)
        )


def causal_pairs(end: int, start: int = 0) -> int:
    """Pairs of a query position in [start, end) and a key position that it sees."""
    return (end * (end + 1) - start * (start + 1)) // 2


@dataclass(frozen=True)
class Ceilings:
    """What the device reached in this run."""

    bytes_per_s: float
    """of a large copy, counting bytes read and bytes written"""
    flops_per_s: float
    """of a large matrix product on random data"""


def decode_step_s(cost: ModelCost, context_lens: Sequence[int], ceilings: Ceilings) -> float:
    """Least time of one decode step."""
    return cost.decode_bytes(context_lens) / ceilings.bytes_per_s


def prefill_s(cost: ModelCost, prompt_lens: Sequence[int], ceilings: Ceilings) -> float:
    """Least time of prefilling these prompts."""
    by_flops = cost.prefill_flops(prompt_lens) / ceilings.flops_per_s
    return max(by_flops, cost.weight_bytes / ceilings.bytes_per_s)


def workload_s(cost: ModelCost, prompt_lens: Sequence[int], output_lens: Sequence[int], ceilings: Ceilings) -> float:
    """Least time of whole requests when all of them fit and start at once: the prefill, then decode steps in which
    everybody who is not done takes part. The first token of each comes from the prefill."""
    steps = max(output_lens) - 1
    kv_reads = sum(
        causal_pairs(prompt + output - 1, prompt) for prompt, output in zip(prompt_lens, output_lens, strict=True)
    )
    decode_bytes = steps * cost.weight_bytes + kv_reads * cost.kv_bytes_per_token
    return prefill_s(cost, prompt_lens, ceilings) + decode_bytes / ceilings.bytes_per_s

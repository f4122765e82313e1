"""The config of a mixture of experts, read from config.json or from the metadata of a GGUF file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from .settings import Settings


class ClampedGate(NamedTuple):
    """The gated activation of GPT-OSS: gate * sigmoid(alpha * gate) * (up + 1).

    Before it, gate is lowered to `limit`, and up is moved into [-limit, limit].
    """

    alpha: float
    limit: float


class SharedExpert(NamedTuple):
    """A dense feed-forward layer that each token of a sparse layer computes beside the experts of the router's choice.

    Its output is added to theirs.
    """

    intermediate_size: int
    has_gate: bool
    """whether its output is multiplied by the sigmoid of a linear layer with one output"""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The feed-forward layers of which each token computes a few parts: the experts that a router chooses."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    """the feed-forward width of an expert"""
    normalized: bool
    """whether the weights of a token's experts are divided by their sum"""
    has_sigmoids: bool = False
    """Whether the weights are sigmoids of the router's logits. If not, they are the probabilities of a softmax."""
    has_corrections: bool = False
    """whether a number of each expert is added to its weight for the choice; true with sigmoids"""
    least_sum: float = 1e-20
    """with corrections: what the sum of a token's weights is at least, where they are divided by it"""
    scale: float = 1.0
    """what the weights are multiplied by"""
    num_groups: int = 1
    """The experts are so many groups of neighbours, of equal size. 1: there are no groups."""
    groups_per_token: int = 1
    """A token chooses its experts from so many groups, those with the highest scores. The score of a group is the
    largest weight of its experts. With corrections, it is the sum of the two largest corrected weights."""
    float32_router: bool = False
    """Whether the router has float32 in a model of any type. If not, it has the type of the model."""
    gate: ClampedGate | None = None
    """the activation; None: silu(gate) * up"""
    has_biases: bool = False
    """whether the router and the linear layers of each expert have biases"""
    dense_layers: tuple[int, ...] = ()
    """the layers that have a plain feed-forward layer instead, in ascending order"""
    shared: SharedExpert | None = None
    """of each sparse layer; None: there is none"""

    @property
    def widths(self) -> tuple[int, ...]:
        """The feed-forward widths of the experts of a sparse layer."""
        shared = () if self.shared is None else (self.shared.intermediate_size,)
        return (self.intermediate_size, *shared)


class ExpertNames(NamedTuple):
    """The names of the modules of a sparse layer in a checkpoint."""

    router: str
    experts: str
    """what the name of each expert begins with, before its number"""
    gate: str
    up: str
    down: str
    has_rows_of_all: bool = False
    """Whether a tensor has the rows of all experts, one expert after another, so that names have no numbers. If gate
    and up have one name, the rows of gate come before those of up in each expert."""
    shared: str = "mlp.shared_expert."
    """what the names of the shared expert's matrices begin with; they end as those of other experts do"""
    shared_gate: str = "mlp.shared_expert_gate"
    """the linear layer whose sigmoid multiplies the output of the shared expert"""
    corrections: str = "mlp.gate.e_score_correction_bias"
    """what is added to the weights for the choice"""
    corrections_in_row: bool = False
    """whether the corrections are a matrix of one row"""


QWEN_NAMES = ExpertNames("mlp.gate", "mlp.experts.", "gate_proj", "up_proj", "down_proj")
GPT_OSS_NAMES = QWEN_NAMES._replace(router="mlp.router")
MIXTRAL_NAMES = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts.", "w1", "w3", "w2")
GRANITE_NAMES = ExpertNames(
    "block_sparse_moe.router.layer", "block_sparse_moe.", "input_linear", "input_linear", "output_linear", True,
    shared="shared_mlp.",
)  # fmt: skip
GLM_NAMES = QWEN_NAMES._replace(shared="mlp.shared_experts.")
ERNIE_NAMES = GLM_NAMES._replace(corrections="mlp.moe_statics.e_score_correction_bias", corrections_in_row=True)
GGUF_NAMES = QWEN_NAMES._replace(has_rows_of_all=True)
"""The names that gguf_checkpoint.py gives to the tensors of all architectures."""
SHARED_LENGTH_KEY = "expert_shared_feed_forward_length"
"""The key of the width of the shared expert in GGUF files."""

ReadExperts: TypeAlias = Callable[[Settings, int], ExpertsConfig | None]
"""Reads the experts of a model from its config.json and its number of layers. None: all layers are dense."""


def qwen_experts(config: Settings, num_layers: int) -> ExpertsConfig | None:
    """The experts of Qwen 3: small ones in every layer, unless the config names dense layers."""
    return _small_experts(config, num_layers, count=128, per_token=8, width=768)


def qwen2_experts(config: Settings, num_layers: int) -> ExpertsConfig | None:
    """The experts of Qwen 2: the same, and one that all tokens share."""
    shared = SharedExpert(config.integer("shared_expert_intermediate_size", 5632), has_gate=True)
    return _small_experts(config, num_layers, count=60, per_token=4, width=1408, shared=shared)


def _small_experts(
    config: Settings, num_layers: int, *, count: int, per_token: int, width: int, shared: SharedExpert | None = None
) -> ExpertsConfig | None:
    """`count`, `per_token`, `width`: the defaults of the keys."""
    step = config.integer("decoder_sparse_step", 1)
    named = set(config.integers("mlp_only_layers"))
    dense = tuple(index for index in range(num_layers) if index in named or (index + 1) % step)
    experts = ExpertsConfig(
        num_experts=_num_experts(config, count),
        num_experts_per_token=config.integer("num_experts_per_tok", per_token),
        intermediate_size=config.integer("moe_intermediate_size", width),
        normalized=config.flag("norm_topk_prob"),
        dense_layers=dense,
        shared=shared,
    )
    return None if len(dense) == num_layers else experts


def mixtral_experts(config: Settings, num_layers: int) -> ExpertsConfig:
    """The experts of Mixtral and Granite: each is as large as the feed-forward layer of a dense model."""
    return ExpertsConfig(
        num_experts=_num_experts(config, 8),
        num_experts_per_token=config.integer("num_experts_per_tok", 2),
        intermediate_size=config.integer("intermediate_size"),
        normalized=True,
    )


def granite_experts(config: Settings, num_layers: int) -> ExpertsConfig:
    """The experts of Granite, of which one may be shared by all tokens."""
    experts = mixtral_experts(config, num_layers)
    return dataclasses.replace(experts, shared=_shared(config, "shared_intermediate_size", has_gate=False))


def olmoe_experts(config: Settings, num_layers: int) -> ExpertsConfig:
    """The experts of OLMoE: small ones in every layer."""
    return ExpertsConfig(
        num_experts=_num_experts(config, 64),
        num_experts_per_token=config.integer("num_experts_per_tok", 8),
        intermediate_size=config.integer("intermediate_size"),
        normalized=config.flag("norm_topk_prob"),
    )


def gpt_oss_experts(config: Settings, num_layers: int) -> ExpertsConfig:
    """The experts of GPT-OSS. A softmax over the logits of the chosen ones gives their weights."""
    return ExpertsConfig(
        num_experts=_num_experts(config, 128),
        num_experts_per_token=config.integer("num_experts_per_tok", 4),
        intermediate_size=config.integer("intermediate_size"),
        normalized=True,
        gate=ClampedGate(config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)),
        has_biases=True,
    )


def ernie_experts(config: Settings, num_layers: int) -> ExpertsConfig | None:
    """The experts of ERNIE 4.5: small ones in some layers, and one that all tokens share. The router has float32."""
    if config.flag("use_bias"):
        raise config.unsupported_value("use_bias", "false", True)
    first, step = config.integer("moe_layer_start_index", 1, minimum=0), config.integer("moe_layer_interval", 1)
    last = config.integer("moe_layer_end_index", -1, minimum=-1)
    last = num_layers - 1 if last == -1 else last
    width = config.integer("moe_intermediate_size", 1536)
    return _ernie_experts(
        config.integer("moe_num_experts", 64),
        config.integer("moe_k", 6),
        width,
        dense=tuple(layer for layer in range(num_layers) if (layer + 1) % step or not first <= layer <= last),
        num_layers=num_layers,
        least_sum=config.number("moe_norm_min", 1e-12),
        shared=several_shared(config.integer("moe_num_shared_experts", 2, minimum=0), width),
    )


def ernie_gguf_experts(config: Settings, num_layers: int) -> ExpertsConfig | None:
    """The experts of ERNIE 4.5 in a GGUF file."""
    first = config.integer("leading_dense_block_count", minimum=0)
    step = config.integer("interleave_moe_layer_step")
    return _ernie_experts(
        config.integer("expert_count"),
        config.integer("expert_used_count"),
        config.integer("expert_feed_forward_length"),
        dense=tuple(layer for layer in range(num_layers) if (layer + 1) % step or layer < first),
        num_layers=num_layers,
        least_sum=1e-12,
        shared=_shared(config, SHARED_LENGTH_KEY, has_gate=False),
    )


def _ernie_experts(
    count: int,
    per_token: int,
    width: int,
    *,
    dense: tuple[int, ...],
    num_layers: int,
    least_sum: float,
    shared: SharedExpert | None,
) -> ExpertsConfig | None:
    experts = ExpertsConfig(
        num_experts=count,
        num_experts_per_token=per_token,
        intermediate_size=width,
        normalized=True,
        has_corrections=True,
        least_sum=least_sum,
        float32_router=True,
        dense_layers=dense,
        shared=shared,
    )
    return None if len(dense) == num_layers else experts


ERNIE_GGUF_KEYS = (
    "leading_dense_block_count", "interleave_moe_layer_step", "expert_shared_count", SHARED_LENGTH_KEY,
)  # fmt: skip
"""The keys that only `ernie_gguf_experts` reads. The count of shared experts has no effect: they have one width
together."""


def gguf_experts(
    config: Settings,
    tensors: Collection[str],
    gate: ClampedGate | None,
    *,
    normalized: bool,
    shared_gate: bool | None,
) -> ExpertsConfig:
    """The experts of a GGUF file.

    `tensors`: the names of the file's tensors. `gate`: the activation of experts with biases. None: the experts have no
    biases, and the activation is silu(gate) * up. `normalized`: as in ExpertsConfig. `shared_gate`: whether a shared
    expert has a gate. None: there is no shared expert.
    """
    if (name := "blk.0.ffn_gate.0.weight") in tensors:
        raise config.unsupported(
            f"each expert has tensors of its own, such as {name!r}, which only old versions of llama.cpp write: "
            "convert the model again, or use a newer file"
        )
    return ExpertsConfig(
        num_experts=config.integer("expert_count"),
        num_experts_per_token=config.integer("expert_used_count"),
        intermediate_size=config.integer("expert_feed_forward_length", config.integer("feed_forward_length")),
        normalized=normalized,
        gate=gate,
        has_biases=gate is not None,
        shared=None if shared_gate is None else _shared(config, SHARED_LENGTH_KEY, has_gate=shared_gate),
    )


def _shared(config: Settings, key: str, *, has_gate: bool) -> SharedExpert | None:
    """`key`: that of the width. 0 or no such key: there is no shared expert."""
    width = config.integer(key, 0, minimum=0)
    return SharedExpert(width, has_gate) if width else None


def several_shared(count: int, width: int) -> SharedExpert | None:
    """Shared experts of one width, without gates, as a wider one."""
    return SharedExpert(count * width, has_gate=False) if count else None


def _num_experts(config: Settings, default: int) -> int:
    """transformers accepts two names, and writes only the second one since version 5."""
    keys = ("num_experts", "num_local_experts")
    counts = [config.integer(key) for key in keys if config.get(key) is not None]
    if len(set(counts)) > 1:
        raise config.unsupported(f"num_experts is {counts[0]}, but num_local_experts is {counts[1]}")
    return counts[0] if counts else default

"""The mixtures of experts that follow DeepSeek's: those of DeepSeek V2 and V3, GLM-4.5 and dots.llm1.

The first layers are dense. The others have small experts, which may be in groups, and one that all tokens share.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from .experts_config import ExpertsConfig, several_shared
from .settings import Settings


class _Defaults(NamedTuple):
    """The values of keys that config.json may lack. None: the key is required."""

    num_experts: int | None
    num_experts_per_token: int | None
    intermediate_size: int
    num_shared: int | None
    num_dense: int = 0
    num_groups: int | None = 1
    groups_per_token: int | None = 1
    normalized: bool = False
    scale: float = 1.0


class _Groups(NamedTuple):
    """The groups of ExpertsConfig."""

    num_groups: int = 1
    groups_per_token: int = 1


class _Keys(NamedTuple):
    """The keys of these numbers."""

    num_experts: str
    num_experts_per_token: str
    num_groups: str
    groups_per_token: str


_KEYS = _Keys("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group")
_GGUF_KEYS = _Keys("expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count")
_SOFTMAX, SIGMOID = 1, 2
"""The functions of routers in GGUF files."""


def glm_experts(config: Settings, num_layers: int) -> ExpertsConfig | None:
    """The experts of GLM-4.5."""
    return _with_sigmoids(config, num_layers, _Defaults(128, 8, 1408, 1, num_dense=1, normalized=True))


def dots_experts(config: Settings, num_layers: int) -> ExpertsConfig | None:
    """The experts of dots.llm1."""
    return _with_sigmoids(config, num_layers, _Defaults(None, None, 1408, None))


def glm_flash_experts(config: Settings, num_layers: int) -> ExpertsConfig | None:
    """The experts of GLM-4.7-Flash, whose config may name the layers that have them."""
    defaults = _Defaults(64, 4, 1536, 1, num_dense=1, normalized=True, scale=1.8)
    kinds = config.texts("mlp_layer_types")
    if kinds is None:
        return _with_sigmoids(config, num_layers, defaults)
    if len(kinds) != num_layers or not {"dense", "sparse"} >= set(kinds):
        raise config.refusal("mlp_layer_types", f"'dense' or 'sparse' for each of {num_layers} layers", kinds)
    dense = tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    # These kinds take precedence over the number of dense layers.
    experts = _with_sigmoids(config.with_values({"first_k_dense_replace": 0}), num_layers, defaults)
    if experts is None or len(dense) == num_layers:
        return None
    return dataclasses.replace(experts, dense_layers=dense)


def deepseek_v3_experts(config: Settings, num_layers: int) -> ExpertsConfig | None:
    """The experts of DeepSeek V3."""
    defaults = _Defaults(
        256, 8, 2048, 1, num_dense=3, num_groups=8, groups_per_token=4, normalized=True, scale=2.5
    )  # fmt: skip
    return _with_sigmoids(config, num_layers, defaults)


def deepseek_v2_experts(config: Settings, num_layers: int) -> ExpertsConfig | None:
    """The experts of DeepSeek V2: a softmax gives their weights, without corrections."""
    method = _text(config, "topk_method", ("greedy", "group_limited_greedy"))
    _text(config, "scoring_func", ("softmax",))
    if config.flag("norm_topk_prob"):
        raise config.unsupported_value("norm_topk_prob", "false", True)
    defaults = _Defaults(64, None, 1407, 2, num_groups=None, groups_per_token=None)
    return _experts(config, num_layers, defaults, has_sigmoids=False, has_groups=method == "group_limited_greedy")


def _with_sigmoids(config: Settings, num_layers: int, defaults: _Defaults) -> ExpertsConfig | None:
    _text(config, "topk_method", ("noaux_tc",))
    _text(config, "scoring_func", ("sigmoid", "noaux_tc"))
    return _experts(config, num_layers, defaults, has_sigmoids=True, has_groups=True)


def _experts(
    config: Settings, num_layers: int, defaults: _Defaults, *, has_sigmoids: bool, has_groups: bool
) -> ExpertsConfig | None:
    num_dense = config.integer("first_k_dense_replace", defaults.num_dense, minimum=0)
    if num_dense >= num_layers:
        return None
    if config.integer("moe_layer_freq", 1) != 1:
        raise config.unsupported_value("moe_layer_freq", "1", config.get("moe_layer_freq"))
    width = config.integer("moe_intermediate_size", defaults.intermediate_size)
    num_experts = config.integer(_KEYS.num_experts, defaults.num_experts)
    per_token = config.integer(_KEYS.num_experts_per_token, defaults.num_experts_per_token)
    groups = _Groups()
    if has_groups:
        default = defaults.num_groups, defaults.groups_per_token
        groups = _groups(config, _KEYS, num_experts, per_token, default, has_corrections=has_sigmoids)
    return ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        intermediate_size=width,
        normalized=config.flag("norm_topk_prob", defaults.normalized),
        has_sigmoids=has_sigmoids,
        has_corrections=has_sigmoids,
        scale=config.number("routed_scaling_factor", defaults.scale),
        **groups._asdict(),
        dense_layers=tuple(range(num_dense)),
        shared=several_shared(config.integer("n_shared_experts", defaults.num_shared, minimum=0), width),
    )


def glm_gguf_experts(config: Settings, num_layers: int) -> ExpertsConfig | None:
    """The experts of a GGUF file whose router has sigmoids and corrections, as those of GLM-4.5 and dots.llm1."""
    if (function := config.integer("expert_gating_func", SIGMOID)) != SIGMOID:
        raise config.unsupported_value("expert_gating_func", str(SIGMOID), function)
    return _gguf_experts(config, num_layers, has_sigmoids=True)


def deepseek_gguf_experts(config: Settings, num_layers: int) -> ExpertsConfig | None:
    """The experts of DeepSeek V2 and V3 in a GGUF file. Files of V2 may not name the function of the router.

    llama.cpp always takes the sum of two weights as the score of a group. DeepSeek V2 itself takes one, as here.
    """
    function = config.integer("expert_gating_func", _SOFTMAX)
    if function not in (_SOFTMAX, SIGMOID):
        raise config.unsupported_value("expert_gating_func", f"{_SOFTMAX} or {SIGMOID}", function)
    return _gguf_experts(config, num_layers, has_sigmoids=function == SIGMOID)


def _gguf_experts(config: Settings, num_layers: int, *, has_sigmoids: bool) -> ExpertsConfig | None:
    num_dense = config.integer("leading_dense_block_count", 0, minimum=0)
    if num_dense >= num_layers:
        return None
    width = config.integer("expert_feed_forward_length")
    num_experts = config.integer(_GGUF_KEYS.num_experts)
    per_token = config.integer(_GGUF_KEYS.num_experts_per_token)
    groups = _groups(config, _GGUF_KEYS, num_experts, per_token, (1, None), has_corrections=has_sigmoids)
    return ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        intermediate_size=width,
        normalized=config.flag("expert_weights_norm"),
        has_sigmoids=has_sigmoids,
        has_corrections=has_sigmoids,
        scale=config.number("expert_weights_scale", 1.0),
        **groups._asdict(),
        dense_layers=tuple(range(num_dense)),
        shared=several_shared(config.integer("expert_shared_count", minimum=0), width),
    )


DEEPSEEK_GGUF_KEYS = (
    "expert_group_count", "expert_group_used_count", "expert_gating_func", "leading_dense_block_count",
    "expert_weights_norm", "expert_weights_scale", "expert_shared_count",
)  # fmt: skip
"""The keys of these readers that GGUF files of other models may not have."""


def _groups(
    config: Settings, keys: _Keys, num_experts: int, per_token: int, default: tuple[int | None, int | None], *,
    has_corrections: bool,
) -> _Groups:  # fmt: skip
    """The groups of `num_experts` experts, of which a token has `per_token`. If it chooses from all, there are none.

    `default`: the numbers of groups and of those of a token in a file without their keys. None: the key is required.
    """
    num_groups = config.integer(keys.num_groups, default[0])
    kept = config.integer(keys.groups_per_token, 1 if num_groups == 1 else default[1], maximum=num_groups)
    if num_groups == 1:
        return _Groups()
    if num_experts % num_groups:
        raise config.refusal(keys.num_groups, f"a divisor of {keys.num_experts} ({num_experts})", num_groups)
    size = num_experts // num_groups
    if per_token > kept * size:
        allowed = f"at most {kept * size}, the experts of {kept} groups"
        raise config.refusal(keys.num_experts_per_token, allowed, per_token)
    if has_corrections and size == 1:
        allowed = f"at most {num_experts // 2}, so that each group has two experts"
        raise config.refusal(keys.num_groups, allowed, num_groups)
    return _Groups() if kept == num_groups else _Groups(num_groups, kept)


def _text(config: Settings, key: str, supported: tuple[str, ...]) -> str:
    """One of the supported values; the first one if the key is absent."""
    given = config.text(key) or supported[0]
    if given not in supported:
        raise config.unsupported_value(key, " or ".join(map(repr, supported)), given)
    return given

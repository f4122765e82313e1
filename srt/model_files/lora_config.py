"""The config of a LoRA adapter (arXiv 2106.09685): adapter_config.json, as PEFT writes it.

An adapter adds scale * B A to a matrix W: A is [rank, in], and B is [out, rank]. The config says the rank and the scale
of each module. A setting that changes the result in a way that is not implemented is refused by its name.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from .files import read_json_object
from .settings import Settings, quote

T = TypeVar("T")

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 2**20
MAX_RANK = 4096
_REFUSED = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "modules_to_save", "trainable_token_indices",
    "target_parameters", "layer_replication", "alora_invocation_tokens", "arrow_config", "kasa_config",
    "monteclora_config", "velora_config", "megatron_config",
)  # fmt: skip
"""Settings that change what an adapter computes, unless they are null, false or empty."""
_UNUSED_AFTER_TRAINING = (
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "inference_mode",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "task_type",
)  # fmt: skip
"""Settings of training, and of other programs. `init_lora_weights` is checked, because some of its values change W."""
_HARMLESS_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""The values of init_lora_weights that leave W as it is."""
_REPETITIONS = re.compile(r"[*+?{]")
_MODULE_CHARS = 50
"""About the length of the name of a module."""
_MAX_PATTERN_STEPS = 50_000
_MAX_PATTERN_CHARS = 300


@dataclass(frozen=True)
class LoraConfig:
    """The config of an adapter. Modules have the names of the adapted model, as `model.layers.0.self_attn.q_proj`."""

    rank: int
    """the largest one"""
    source: str
    """the file, for errors"""
    target_modules: frozenset[str] | None
    """what the names of modules end with; None: a regular expression or PEFT's rules name them"""
    layers: frozenset[int] | None
    """the numbers of the layers that `target_modules` means; None: all"""
    is_exact: bool
    """whether each module that is named must have matrices in the file"""
    default_rank: int
    default_alpha: float
    root_of_rank: bool
    """whether alpha is divided by the square root of the rank, instead of the rank (rsLoRA, arXiv 2312.03732)"""
    ranks: Mapping[re.Pattern[str], int]
    alphas: Mapping[re.Pattern[str], float]

    def rank_of(self, module: str) -> int:
        return _matching(self.ranks, module, self.default_rank)

    def scale_of(self, module: str) -> float:
        """What B A is multiplied by."""
        rank = self.rank_of(module)
        return _matching(self.alphas, module, self.default_alpha) / (math.sqrt(rank) if self.root_of_rank else rank)

    def targets(self, module: str) -> bool:
        """Whether the config names a module. Without `target_modules` it names all."""
        if self.target_modules is None:
            return True
        parts = module.split(".")
        named = any(".".join(parts[place:]) in self.target_modules for place in range(len(parts)))
        number = re.search(r"\.(\d+)\.", module)
        return named and (self.layers is None or (number is not None and int(number[1]) in self.layers))


def read_lora_config(path: str) -> LoraConfig:
    """Read the config of the adapter in the folder `path`.

    Raises ValueError for a folder without an adapter, and for an adapter that cannot be used.
    """
    source = os.path.join(path, CONFIG_FILE)
    try:
        values = read_json_object(source, max_bytes=MAX_CONFIG_BYTES)
    except OSError as error:
        raise ValueError(
            f"{path!r} is no folder of a LoRA adapter: {CONFIG_FILE} cannot be read ({error.strerror or error})"
        ) from None
    return _checked(Settings(source, values))


def _checked(config: Settings) -> LoraConfig:
    kind = config.text("peft_type")
    if kind != "LORA":
        raise config.unsupported_value("peft_type", '"LORA"', kind)
    for key in _REFUSED:
        if value := config.get(key):
            raise config.unsupported(f"{key}={quote(value)} is not supported")
    if (bias := config.get("bias")) not in (None, "none"):
        raise config.unsupported_value("bias", '"none"', bias)
    start = config.get("init_lora_weights")
    if start is not None and start not in _HARMLESS_STARTS:
        raise config.unsupported(
            f"init_lora_weights={quote(start)} is not supported, because it changes the weights of the base model: "
            "save the adapter with path_initial_model_for_weight_conversion of PEFT"
        )
    for key in _UNUSED_AFTER_TRAINING:
        config.get(key)
    rank, alpha = config.integer("r", 8, maximum=MAX_RANK), config.number("lora_alpha", 8)
    root_of_rank = config.flag("use_rslora")
    ranks = _by_pattern(config, "rank_pattern", _integers(config, "rank_pattern"))
    alphas = _by_pattern(config, "alpha_pattern", _numbers(config, "alpha_pattern"))
    modules, layers = _target_modules(config), _layers(config)
    has_exceptions = bool(config.get("exclude_modules"))
    if layers is not None and config.get("layers_pattern"):
        layers, has_exceptions = None, True  # the numbers may be those of another list of modules
    unknown = {key: value for key, value in config.unused().items() if value not in (False, [], {})}
    if unknown:
        key, value = next(iter(unknown.items()))
        raise config.unsupported(f"{key}={quote(value)} is not known, so the adapter may compute something else")
    return LoraConfig(
        rank=max((rank, *ranks.values())),
        source=config.source,
        target_modules=modules,
        layers=layers,
        is_exact=modules is not None and not has_exceptions,
        default_rank=rank,
        default_alpha=alpha,
        root_of_rank=root_of_rank,
        ranks=ranks,
        alphas=alphas,
    )


def _target_modules(config: Settings) -> frozenset[str] | None:
    modules = config.get("target_modules")
    if modules is None or isinstance(modules, str):
        return None
    return frozenset(config.texts("target_modules") or ())


def _layers(config: Settings) -> frozenset[int] | None:
    layers = config.get("layers_to_transform")
    if isinstance(layers, int):
        return frozenset((config.integer("layers_to_transform", minimum=0),))
    return frozenset(config.integers("layers_to_transform")) or None


def _integers(config: Settings, key: str) -> dict[str, int]:
    nested = config.nested(key)
    return {} if nested is None else {name: nested.integer(name, maximum=MAX_RANK) for name in _keys(config, key)}


def _numbers(config: Settings, key: str) -> dict[str, float]:
    nested = config.nested(key)
    return {} if nested is None else {name: nested.number(name) for name in _keys(config, key)}


def _keys(config: Settings, key: str) -> list[str]:
    return list(config.get(key))


def _by_pattern(config: Settings, key: str, values: Mapping[str, T]) -> dict[re.Pattern[str], T]:
    """The values of rank_pattern or alpha_pattern. Their keys are regular expressions for the end of a module's name,
    as in PEFT. Only expressions that together take little time on any name are accepted."""
    if sum(_most_steps(text) for text in values) > _MAX_PATTERN_STEPS:
        longest = max(values, key=_most_steps)
        raise config.unsupported(f"{key} has the key {quote(longest)}, which is too complex, alone or with the others")
    return {_pattern(config, key, text): value for text, value in values.items()}


def _most_steps(text: str) -> int:
    """About the most steps in which an expression fails to match a name."""
    if len(text) > _MAX_PATTERN_CHARS or re.search(r"\)[*+?{]", text) is not None:  # the latter repeats a group
        return _MAX_PATTERN_STEPS + 1
    count = len(_REPETITIONS.findall(text))
    splits: int = _MODULE_CHARS**count // math.factorial(count)  # of the name among the repetitions
    alternatives: int = (1 + text.count("|")) ** max(text.count("("), 1)
    return splits * alternatives


def _pattern(config: Settings, key: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(.*\.)?({text})$")
    except (re.error, OverflowError) as error:
        raise ValueError(f"{config.source}: {key} has the key {quote(text)}, but that is no pattern: {error}") from None


def _matching(values: Mapping[re.Pattern[str], T], module: str, default: T) -> T:
    """The value of the first pattern that matches, as PEFT chooses."""
    return next((value for pattern, value in values.items() if pattern.match(module)), default)

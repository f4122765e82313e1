"""The quantized matrices of a checkpoint: what its files say about them.

The settings are in config.json, as `quantization_config`. Old programs write them to a file of their own
(older_quantization.py).

8-bit floating point (Fp8Config) is read from `quant_method` "fp8", the format of DeepSeek's and Qwen's own checkpoints,
and from "compressed-tensors" with the format "float-quantized". 4-bit floating point (Mxfp4Config) is read from
"mxfp4", the format of GPT-OSS, whose experts share tensors. 4-bit and 8-bit integers (IntegerConfig) are read from
"gptq", "awq", and "compressed-tensors" with the format "pack-quantized" or "int-quantized".

Only matrices are quantized here. If a checkpoint asks for rounded activations, their scales must be found while
serving, because such rounding needs nothing from the file. Settings for anything else are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from .settings import Settings, quote

_BLOCK = [128, 128]
_METHODS = "fp8", "gptq", "awq", "compressed-tensors"
_METHODS_OF_STACKED_EXPERTS = ("mxfp4",)
# These keys describe how a checkpoint was made or which program is to run it. They change no value.
_OF_NO_EFFECT = ("quant_method", "version", "quantization_status", "global_compression_ratio")
_OF_NO_EFFECT_FOR_INTEGERS = (
    "act_group_aware", "amp", "autoround_version", "backend", "batch_size", "block_name_to_quantize",
    "cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset", "disable_exllama", "do_fuse",
    "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "exllama_config", "fuse_max_seq_len",
    "gptaq", "gptaq_alpha", "gradient_accumulate_steps", "hyb_act", "iters", "low_gpu_mem_usage", "lr",
    "max_input_length", "meta", "method", "minmax_lr", "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "modules_in_block_to_quantize", "modules_to_fuse", "mse", "nsamples",
    "offload_to_disk", "offload_to_disk_path", "pad_token_id", "provider", "quantizer", "scale_dtype", "seqlen",
    "static_groups", "super_bits", "super_group_size", "to_quant_block_names", "tokenizer", "true_sequential",
    "uri", "use_cuda_fp16", "use_exllama",
    # The file itself shows which modules are quantized, and has all zero points.
    "lm_head", "sym",
)  # fmt: skip
_HOW_SCALES_WERE_FOUND = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")

LayoutName: TypeAlias = Literal["gptq", "gptq_v2", "awq", "pack-quantized", "int-quantized"]

_Format: TypeAlias = Literal["float-quantized", "pack-quantized", "int-quantized"]
_FORMATS: tuple[_Format, ...] = ("float-quantized", "pack-quantized", "int-quantized")
_GPTQ_LAYOUTS: tuple[LayoutName, ...] = ("gptq", "gptq_v2")
_Value = TypeVar("_Value")


class Fp8Config(NamedTuple):
    """How a checkpoint stores its matrices of 8-bit floating point (float8_e4m3fn): values times scales."""

    by_block: bool
    """whether each block of 128 x 128 weights has a scale; else a row or the matrix has one"""
    excluded: tuple[str, ...] = ()
    """modules that are not quantized: names, ends of names, or regular expressions after "re:" """
    targets: tuple[str, ...] = ()
    """the only modules that may be quantized: names, or regular expressions after "re:"; (): all linear layers"""

    def excludes(self, module: str) -> bool:
        """Whether the config says that a module, such as "model.layers.0.mlp.up_proj", is not quantized."""
        return _excludes(self.excluded, module) or not _targets(self.targets, module)


class IntegerConfig(NamedTuple):
    """How a checkpoint stores its matrices of integers: (value - zero point) * scale."""

    layout: LayoutName
    """the names, shapes and order of the tensors"""
    bits: int
    """4 or 8"""
    group_size: int | None
    """weights along a row that share a scale; None: all of a row"""
    symmetric: bool
    """compressed-tensors: whether all zero points are 0, and the file has none"""
    act_order: bool
    """whether the file must name the group of each column, because those of a group may be scattered"""
    excluded: tuple[str, ...] = ()
    """as in Fp8Config"""
    targets: tuple[str, ...] = ()
    """as in Fp8Config"""

    def excludes(self, module: str) -> bool:
        """As in Fp8Config."""
        return _excludes(self.excluded, module) or not _targets(self.targets, module)


class Mxfp4Config(NamedTuple):
    """How a checkpoint stores the matrices of its experts: numbers of 4 bits (e2m1) times powers of two.

    32 numbers along a row share a power of two.
    """

    excluded: tuple[str, ...] = ()
    """as in Fp8Config"""

    def excludes(self, module: str) -> bool:
        """As in Fp8Config."""
        return _excludes(self.excluded, module)


QuantizationConfig: TypeAlias = Fp8Config | IntegerConfig | Mxfp4Config


def read_quantization_config(
    config: Settings, older: Callable[[], Settings | None], *, stacked_experts: bool = False
) -> QuantizationConfig | None:
    """The quantized matrices that config.json describes; None if the checkpoint is not quantized.

    `older`: reads the settings in a file beside config.json. They count only if config.json has none.
    `stacked_experts`: whether the checkpoint has tensors with the matrices of all experts, which only have formats of
    their own.

    Raises ModelNotSupported for other formats and for settings that this engine would ignore.
    """
    if config.get("compression_config"):
        raise config.unsupported("compression_config is not supported; newer files name it quantization_config")
    given = config.nested("quantization_config") if config.get("quantization_config") else older()
    if given is None:
        return None
    found: QuantizationConfig
    method = given.text("quant_method")
    methods = _METHODS_OF_STACKED_EXPERTS if stacked_experts else _METHODS
    if method not in methods:
        where = " for this architecture" if stacked_experts else ""
        raise given.unsupported(
            f"quantization_config (method {method!r}) is not supported{where}; supported: {', '.join(methods)}"
        )
    match method:
        case "mxfp4":
            found = _mxfp4(given)
        case "fp8":
            found = _deepseek(given)
        case "gptq":
            found = _gptq(given)
        case "awq":
            found = _awq(given)
        case _:
            found = _compressed_tensors(given)
    for key in _OF_NO_EFFECT:
        given.get(key)
    _refuse_rest(given, "quantization_config.")
    return found


def _deepseek(given: Settings) -> Fp8Config:
    _expect(given, "activation_scheme", "dynamic")
    _expect(given, "fmt", "e4m3")
    _expect(given, "scale_fmt", "ue8m0")  # DeepSeek-V3.1: how inputs may be scaled; the scales of weights are stored
    return Fp8Config(_is_block(given, "weight_block_size"), _names(given, "modules_to_not_convert", "ignored_layers"))


def _mxfp4(given: Settings) -> Mxfp4Config:
    given.flag("dequantize")  # whether transformers widened the weights when it loaded them
    return Mxfp4Config(tuple(map(_without_stars, _names(given, "modules_to_not_convert"))))


def _without_stars(name: str) -> str:
    """A name as `_matches` reads it. GPT-OSS writes * for any text in a name."""
    return f"re:{re.escape(name)}(\\.|$)".replace("\\*", ".*") if "*" in name else name


def _gptq(given: Settings) -> IntegerConfig:
    layout = _one_of(given, "checkpoint_format", _GPTQ_LAYOUTS, _GPTQ_LAYOUTS[0])
    _expect(given, "format", layout)
    _expect(given, "pack_dtype", "int32")
    _expect(given, "data_type", "int")
    _skip_what_has_no_effect(given)
    return IntegerConfig(
        layout,
        _one_of(given, "bits", (4, 8)),
        _group_size(given),
        symmetric=False,
        act_order=given.flag("desc_act"),
        excluded=(*_names(given, "modules_to_not_convert"), *_not_dynamic(given)),
    )


def _awq(given: Settings) -> IntegerConfig:
    # GPTQModel names the version `format` or `checkpoint_format`.
    for key in ("version", "format", "checkpoint_format"):
        if (version := given.text(key)) is not None and version.lower() != "gemm":
            raise given.unsupported(f"quantization_config: {key} must be 'gemm', got {quote(version)}")
    if given.get("backend") == "llm-awq":
        raise given.unsupported("quantization_config: backend 'llm-awq' has another layout, which is not supported")
    given.flag("zero_point", True)  # AutoRound writes false if all are 8, and the file has them in any case
    _expect(given, "desc_act", False)
    _expect(given, "pack_dtype", "int32")
    _skip_what_has_no_effect(given)
    return IntegerConfig(
        "awq",
        _one_of(given, "bits", (4,)),
        _group_size(given),
        symmetric=False,
        act_order=False,
        excluded=(*_names(given, "modules_to_not_convert"), *_not_dynamic(given)),
    )


def _skip_what_has_no_effect(given: Settings) -> None:
    for key in _OF_NO_EFFECT_FOR_INTEGERS:
        given.get(key)
    # AutoRound describes activations that are not rounded, too.
    if (bits := given.integer("act_bits", 16)) < 16:
        raise given.unsupported(f"quantization_config: act_bits={bits} is not supported: activations are not rounded")
    for key in ("act_data_type", "act_dynamic", "act_group_size", "act_sym"):
        given.get(key)


def _not_dynamic(given: Settings) -> list[str]:
    """The modules that GPTQModel's setting `dynamic` excludes. It could also give modules other bits."""
    dynamic = given.nested("dynamic")
    patterns = [] if dynamic is None else list(dynamic.unused())
    if changed := [pattern for pattern in patterns if not pattern.startswith("-:")]:
        raise given.unsupported(f"quantization_config.dynamic: {quote(changed)} is not supported; supported: '-:...'")
    return _checked([f"re:{pattern.removeprefix('-:')}" for pattern in patterns], given, "dynamic")


def _compressed_tensors(given: Settings) -> QuantizationConfig:
    layout = _one_of(given, "format", _FORMATS, _FORMATS[0])
    groups = given.nested("config_groups")
    names = [] if groups is None else list(groups.unused())
    if groups is None or len(names) != 1:
        raise given.unsupported(f"quantization_config.config_groups must have one group, got {quote(names)}")
    group = groups.nested(names[0])
    assert group is not None
    targets = _linear_targets(group)
    _expect(group, "format", layout)
    if (sparsity := given.nested("sparsity_config")) is not None:
        _expect(sparsity, "format", "dense")
    weights, activations = group.nested("weights"), group.nested("input_activations")
    where = f"quantization_config.config_groups.{names[0]}"
    found: QuantizationConfig
    if layout == "float-quantized":
        if weights is None or activations is None:
            raise given.unsupported(f"{where} must have weights and input_activations of 8 bits")
        by_block = _floats(weights, activations, where)
        found = Fp8Config(by_block, _names(given, "ignore"))
    else:
        if weights is None:
            raise given.unsupported(f"{where} must have weights")
        found = _integers(weights, layout, where)._replace(excluded=_names(given, "ignore"))
    found = found._replace(targets=targets)
    for key in _HOW_SCALES_WERE_FOUND:
        weights.get(key)
    parts = [(weights, f"{where}.weights."), (group, where)]
    if activations is not None:
        _check_activations(activations, f"{where}.input_activations")
        parts.append((activations, f"{where}.input_activations."))
    for part, name in parts:
        _refuse_rest(part, name)
    return found


def _linear_targets(group: Settings) -> tuple[str, ...]:
    """The modules that a group is for, as Fp8Config has them. A target may also be the name of a class."""
    targets = _names(group, "targets")
    is_class = [name[:1].isupper() and name != "Linear" for name in targets]
    if any(is_class) or group.get("targets") == []:
        allowed = "'Linear', names of linear layers, or regular expressions after 're:'"
        raise group.unsupported_value("targets", allowed, group.get("targets"))
    return () if "Linear" in targets else targets


def _floats(weights: Settings, activations: Settings, where: str) -> bool:
    """Whether each block of 8-bit floating-point weights has a scale."""
    _expect(weights, "num_bits", 8)
    _expect(weights, "type", "float", default="int")
    _expect(weights, "symmetric", True)
    _expect(weights, "dynamic", False)
    _expect(activations, "type", "float", default="int")
    _expect(activations, "symmetric", True)
    if weights.text("strategy") not in ("channel", "tensor", "block"):
        raise weights.unsupported(
            f"{where}.weights.strategy must be channel, tensor, block, got {quote(weights.get('strategy'))}"
        )
    by_block = weights.text("strategy") == "block"
    if by_block and not _is_block(weights, "block_structure"):
        raise weights.unsupported(f"{where}.weights.block_structure is missing")
    return by_block


def _integers(weights: Settings, layout: Literal["pack-quantized", "int-quantized"], where: str) -> IntegerConfig:
    _expect(weights, "type", "int")
    _expect(weights, "dynamic", False)
    group_size = None if weights.get("group_size") is None else _group_size(weights)
    strategy = weights.text("strategy") or ("channel" if group_size is None else "group")
    if strategy not in ("group", "channel") or (strategy == "group") != (group_size is not None):
        raise weights.unsupported(
            f"{where}.weights.strategy must be group with a group_size, or channel without, got {quote(strategy)} with "
            f"{quote(weights.get('group_size'))}"
        )
    order = weights.get("actorder")
    if order not in (None, False, "weight", "static", "group", "dynamic"):
        raise weights.refusal("actorder", "weight, static, group, dynamic or null", order)
    return IntegerConfig(
        layout,
        _one_of(weights, "num_bits", (4, 8) if layout == "pack-quantized" else (8,), 8),
        group_size,
        symmetric=weights.flag("symmetric", True),
        # The orders "weight" and "static" exist only while weights are rounded.
        act_order=order in ("group", "dynamic"),
    )


def _check_activations(activations: Settings, where: str) -> None:
    """Refuse activations that are not rounded to 8 bits with scales found while serving."""
    _expect(activations, "num_bits", 8)
    _expect(activations, "dynamic", True, default=False)
    if activations.text("strategy") not in ("token", "group", "tensor"):
        raise activations.unsupported(
            f"{where}.strategy must be token, group, tensor, got {quote(activations.get('strategy'))}"
        )
    # The rest describes the rounding, which needs nothing from the file.
    for key in ("type", "symmetric", "group_size", *_HOW_SCALES_WERE_FOUND):
        activations.get(key)


def _group_size(given: Settings) -> int | None:
    """The required setting group_size; None for rows with one scale, for which files have -1."""
    return None if given.get("group_size") == -1 else given.integer("group_size")


def _names(given: Settings, *keys: str) -> tuple[str, ...]:
    return tuple(name for key in keys for name in _checked(given.texts(key) or [], given, key))


def _checked(names: list[str], given: Settings, key: str) -> list[str]:
    for name in names:
        try:
            if name.startswith("re:"):
                re.compile(name.removeprefix("re:"))
        except re.error as error:
            raise given.refusal(key, f"names or regular expressions ({error})", name) from None
    return names


def _names_of(module: str) -> tuple[str, ...]:
    """The names of a module of a language model: alone, and in a model that also takes images.

    The last one is that of transformers 5.
    """
    return module, f"language_model.{module}", f"model.language_model.{module.removeprefix('model.')}"


def _excludes(patterns: tuple[str, ...], module: str) -> bool:
    return any(_matches(pattern, name) for pattern in patterns for name in _names_of(module))


def _targets(targets: tuple[str, ...], module: str) -> bool:
    """Whether a linear layer is among the targets of compressed-tensors. Their names are whole names."""
    return not targets or any(
        re.match(target[3:], name) is not None if target.startswith("re:") else name == target
        for target in targets
        for name in _names_of(module)
    )


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")


def _is_block(given: Settings, key: str) -> bool:
    size = given.get(key)
    if size not in (None, _BLOCK):
        raise given.unsupported_value(key, f"{_BLOCK} or null", size)
    return size is not None


def _one_of(given: Settings, key: str, allowed: tuple[_Value, ...], default: _Value | None = None) -> _Value:
    """One of the allowed values. Without a default the key is required."""
    value = given.get(key)
    value = default if value is None else value
    if value not in allowed or type(value) is not type(allowed[0]):
        raise given.unsupported_value(key, " or ".join(map(repr, allowed)), value)
    return value


def _expect(given: Settings, key: str, wanted: object, default: object = None) -> None:
    """Refuse another value than `wanted`. `default`: what a missing value stands for; None: `wanted`."""
    value = given.get(key)
    value = default if value is None else value
    if value is not None and (value != wanted or type(value) is not type(wanted)):
        raise given.unsupported_value(key, repr(wanted), value)


def _refuse_rest(given: Settings, where: str) -> None:
    rest = {key: value for key, value in given.unused().items() if value not in ({}, [], False)}
    if rest:
        raise given.unsupported(f"{where}: {quote(rest)} is not supported")

"""The 8-bit floating-point weights of a checkpoint: what config.json says about them.

Two formats are read. `quant_method` "fp8" is that of DeepSeek's and Qwen's own checkpoints: scales of blocks or of
whole matrices. "compressed-tensors" is what llm-compressor writes: a scale for each row, block or matrix. In both, a
weight is float8_e4m3fn, and stands for its value times its scale. Activations are rounded while serving, so settings
for anything else are refused by name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .settings import Settings, quote

_BLOCK = [128, 128]
_FP8_KEYS = ("activation_scheme", "fmt", "weight_block_size", "modules_to_not_convert", "ignored_layers")
# These keys describe how a checkpoint was made, and change no value.
_OF_NO_EFFECT = ("quant_method", "version", "quantization_status", "global_compression_ratio")


class Fp8Config(NamedTuple):
    """How a checkpoint stores its 8-bit matrices."""

    by_block: bool
    """whether each block of 128 x 128 weights has a scale; else a row or the matrix has one"""
    excluded: tuple[str, ...] = ()
    """modules that are not 8 bits wide: names, ends of names, or regular expressions after "re:" """

    def excludes(self, module: str) -> bool:
        """Whether the config says that a module, such as "model.layers.0.mlp.up_proj", is not 8 bits wide."""
        return any(_matches(pattern, module) for pattern in self.excluded)


def read_fp8_config(config: Settings) -> Fp8Config | None:
    """The fp8 weights that config.json describes; None if the checkpoint is not quantized.

    Raises ModelNotSupported for other quantized weights and for settings that this engine would ignore.
    """
    if config.get("compression_config"):
        raise config.unsupported("compression_config is not supported; newer files name it quantization_config")
    if not config.get("quantization_config"):
        return None
    given = config.nested("quantization_config")
    assert given is not None
    match given.text("quant_method"):
        case "fp8":
            found = _deepseek(given)
        case "compressed-tensors":
            found = _compressed_tensors(given)
        case method:
            raise config.unsupported(
                f"quantization_config (method {method!r}) is not supported; supported: fp8, compressed-tensors with fp8"
            )
    for key in _OF_NO_EFFECT:
        given.get(key)
    _refuse_rest(given, "quantization_config.")
    return found


def _deepseek(given: Settings) -> Fp8Config:
    _expect(given, "activation_scheme", "dynamic")
    _expect(given, "fmt", "e4m3")
    return Fp8Config(_is_block(given, "weight_block_size"), _names(given, "modules_to_not_convert", "ignored_layers"))


def _compressed_tensors(given: Settings) -> Fp8Config:
    _expect(given, "format", "float-quantized")
    groups = given.nested("config_groups")
    names = [] if groups is None else list(groups.unused())
    if groups is None or len(names) != 1:
        raise given.unsupported(f"quantization_config.config_groups must have one group, got {quote(names)}")
    group = groups.nested(names[0])
    assert group is not None
    _expect(group, "targets", ["Linear"])
    _expect(group, "format", "float-quantized")
    weights, activations = group.nested("weights"), group.nested("input_activations")
    where = f"quantization_config.config_groups.{names[0]}"
    if weights is None or activations is None:
        raise given.unsupported(f"{where} must have weights and input_activations of 8 bits")
    for tensor, what, strategies in (
        (weights, "weights", ("channel", "tensor", "block")),
        (activations, "input_activations", ("token", "group", "tensor")),
    ):
        _expect(tensor, "num_bits", 8)
        _expect(tensor, "type", "float", default="int")
        _expect(tensor, "symmetric", True)
        _expect(tensor, "dynamic", what == "input_activations", default=False)
        if tensor.text("strategy") not in strategies:
            raise given.unsupported(
                f"{where}.{what}.strategy must be {', '.join(strategies)}, got {quote(tensor.get('strategy'))}"
            )
        for key in ("observer", "observer_kwargs", "scale_dtype", "zp_dtype"):  # how the scales were found
            tensor.get(key)
    by_block = weights.get("strategy") == "block"
    if by_block and not _is_block(weights, "block_structure"):
        raise given.unsupported(f"{where}.weights.block_structure is missing")
    activations.get("group_size")  # groups here are of 128 numbers for every checkpoint
    for part, name in ((weights, f"{where}.weights."), (activations, f"{where}.input_activations."), (group, where)):
        _refuse_rest(part, name)
    return Fp8Config(by_block, _names(given, "ignore"))


def _names(given: Settings, *keys: str) -> tuple[str, ...]:
    names = tuple(name for key in keys for name in given.texts(key) or ())
    for name in names:
        try:
            re.compile(name.removeprefix("re:"))
        except re.error as error:
            raise given.refusal(keys[0], f"names or regular expressions ({error})", name) from None
    return names


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}")


def _is_block(given: Settings, key: str) -> bool:
    size = given.get(key)
    if size not in (None, _BLOCK):
        raise given.unsupported(f"quantization_config: {key} must be {_BLOCK} or null, got {quote(size)}")
    return size is not None


def _expect(given: Settings, key: str, wanted: object, default: object = None) -> None:
    """Refuse another value than `wanted`. `default`: what a missing value stands for; None: `wanted`."""
    value = given.get(key)
    value = default if value is None else value
    if value is not None and (value != wanted or type(value) is not type(wanted)):
        raise given.unsupported(f"quantization_config: {key} must be {wanted!r}, got {quote(value)}")


def _refuse_rest(given: Settings, where: str) -> None:
    rest = {key: value for key, value in given.unused().items() if value not in ({}, [], False)}
    if rest:
        raise given.unsupported(f"{where}: {quote(rest)} is not supported")

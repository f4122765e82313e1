"""Which layers of a model have a sliding window, and which have a rotary embedding, as config.json says it.

Each family has its own keys and defaults (families.py).
"""

from __future__ import annotations

from typing import TypeAlias

from .settings import Settings, quote

SlidingWindows: TypeAlias = tuple[int | None, ...]


def no_window(config: Settings, num_layers: int) -> SlidingWindows:
    """No layer has a window."""
    if config.get("sliding_window") is not None:
        raise config.unsupported(
            "sliding_window is not supported with this architecture, because engines interpret it differently"
        )
    return (None,) * num_layers


def window_everywhere(config: Settings, num_layers: int) -> SlidingWindows:
    """All layers have the window: 4096 if there is no key, and none if it is null (Mistral)."""
    if config.get("layer_types") is not None:
        raise config.unsupported("layer_types in a Mistral config is not supported: all its layers share one window")
    return (_window(config),) * num_layers


def window_if_given(config: Settings, num_layers: int) -> SlidingWindows:
    """All layers have the window that the config names, if any."""
    has_none = config.get("sliding_window") is None
    return (None if has_none else config.integer("sliding_window"),) * num_layers


def _window(config: Settings) -> int | None:
    # 4096 is the default of Mistral and Qwen. null means no window.
    has_none = "sliding_window" in config and config.get("sliding_window") is None
    return None if has_none else config.integer("sliding_window", 4096)


def window_of_upper_layers(config: Settings, num_layers: int) -> SlidingWindows:
    """With `use_sliding_window`, the layers that `layer_types` names, or those from `max_window_layers` on (Qwen)."""
    window = _window(config) if config.flag("use_sliding_window") else None
    types = config.texts("layer_types")
    if types is None:
        first = config.integer("max_window_layers", 28, minimum=0)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return _windows_of_types(config, types, num_layers, window)


def _windows_of_types(config: Settings, types: list[str], num_layers: int, window: int | None) -> SlidingWindows:
    known = {"sliding_attention": window, "full_attention": None}
    if len(types) != num_layers or not set(types) <= set(known):
        raise config.unsupported(
            f"layer_types must name {' or '.join(known)} for each of {num_layers} layers, got {quote(types)}"
        )
    return tuple(known[kind] for kind in types)


def window_everywhere_if_used(config: Settings, num_layers: int) -> SlidingWindows:
    """With `use_sliding_window`, all layers have the window (Qwen3-MoE)."""
    if not config.flag("use_sliding_window"):
        return (None,) * num_layers
    if config.get("layer_types") is not None:
        raise config.unsupported("layer_types in a Qwen3Moe config is not supported: all its layers share one window")
    if config.integer("max_window_layers", 0, minimum=0):
        raise config.unsupported(
            "max_window_layers with use_sliding_window in a Qwen3Moe config is not supported, because engines "
            "interpret it differently"
        )
    return (_window(config),) * num_layers


def window_of_named_layers(config: Settings, num_layers: int) -> SlidingWindows:
    """With `use_sliding_window`, the layers that `layer_types` names have the window (Qwen2-MoE)."""
    if not config.flag("use_sliding_window"):
        return (None,) * num_layers
    types = config.texts("layer_types")
    if types is None:
        raise config.unsupported(
            "use_sliding_window without layer_types in a Qwen2Moe config is not supported, because engines interpret "
            "it differently"
        )
    return _windows_of_types(config, types, num_layers, _window(config))


def window_of_chosen_layers(config: Settings, num_layers: int) -> SlidingWindows:
    """With `use_sliding_window`, the layers that `layer_types` names, or those that are not rotated (SmolLM3)."""
    window = None
    if config.flag("use_sliding_window") and config.get("sliding_window") is not None:
        window = config.integer("sliding_window")
    types = config.texts("layer_types")
    if types is None:
        return tuple(None if rotated else window for rotated in _rotated(config, num_layers))
    if "sliding_attention" in types and window is None:
        raise config.unsupported("layer_types with sliding_attention needs use_sliding_window and sliding_window")
    return _windows_of_types(config, types, num_layers, window)


def window_of_local_layers(config: Settings, num_layers: int) -> SlidingWindows:
    """The layers that `layer_types` names, or all but each sixth or each `sliding_window_pattern`-th (Gemma 3)."""
    window, types = config.integer("sliding_window"), config.texts("layer_types")
    if types is None:
        return local_windows(window, config.integer("sliding_window_pattern", 6), num_layers)
    return _windows_of_types(config, types, num_layers, window)


def window_of_three_in_four_layers(config: Settings, num_layers: int) -> SlidingWindows:
    """The layers that `layer_types` names, or all but each fourth (OLMo 3)."""
    window, types = config.integer("sliding_window"), config.texts("layer_types")
    if types is None:
        return local_windows(window, 4, num_layers)
    return _windows_of_types(config, types, num_layers, window)


def window_of_pattern(config: Settings, num_layers: int) -> SlidingWindows:
    """As `window_of_local_layers`, but with a pattern of 4, and a config may have no window (EXAONE 4)."""
    types = config.texts("layer_types")
    window = None if config.get("sliding_window") is None else config.integer("sliding_window")
    if types is not None:
        if "sliding_attention" in types and window is None:
            raise config.unsupported("layer_types with sliding_attention needs sliding_window")
        return _windows_of_types(config, types, num_layers, window)
    if window is None:
        return (None,) * num_layers
    return local_windows(window, config.integer("sliding_window_pattern", 4), num_layers)


def local_windows(window: int, period: int, num_layers: int) -> SlidingWindows:
    """The windows of a model of which every `period`-th layer has none. 0: all layers have the window."""
    return tuple(window if not period or (index + 1) % period else None for index in range(num_layers))


def window_of_every_other_layer(config: Settings, num_layers: int) -> SlidingWindows:
    """The layers that `layer_types` names, or the layers 0, 2, 4, ... (Gemma 2, GPT-OSS)."""
    types = config.texts("layer_types")
    if types is None:
        types = ["full_attention" if index % 2 else "sliding_attention" for index in range(num_layers)]
    return _windows_of_types(config, types, num_layers, config.integer("sliding_window"))


def rotated_with_window(config: Settings, windows: SlidingWindows) -> tuple[bool, ...]:
    """In a model with a window, the layers that have it are rotated, even if none has (EXAONE 4)."""
    # GGUF files have the second key.
    model_window = config.get("sliding_window") or config.get("attention.sliding_window")
    return tuple(not model_window or window is not None for window in windows)


def rotated_layers(config: Settings, windows: SlidingWindows) -> tuple[bool, ...]:
    """The layers that `no_rope_layers` marks, or all but each `no_rope_layer_interval`-th (SmolLM3)."""
    return _rotated(config, len(windows))


def _rotated(config: Settings, num_layers: int) -> tuple[bool, ...]:
    # 1 in `no_rope_layers` stands for a layer with a rotary embedding. A longer list is allowed, as in transformers.
    given = config.get("no_rope_layers")
    if given is None:
        interval = config.integer("no_rope_layer_interval", 4)
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    if not isinstance(given, list) or len(given) < num_layers or not all(item in (0, 1) for item in given):
        raise config.refusal("no_rope_layers", f"0 or 1 for each of {num_layers} layers", given)
    return tuple(bool(item) for item in given[:num_layers])

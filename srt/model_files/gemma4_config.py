"""What the layers of Gemma 4 have that those of other families lack, read from config.json."""

from __future__ import annotations

from typing import NamedTuple

from .layer_windows import SlidingWindows
from .settings import Settings, quote


class Heads(NamedTuple):
    """The heads of K and V in a layer."""

    num_kv_heads: int
    head_dim: int


class Gemma4Config(NamedTuple):
    """How the layers of Gemma 4 differ from one another and from those of other families.

    Each layer also has a norm of values without weights, and a factor of the residual after the layer.
    """

    heads: tuple[Heads, ...]
    """of each layer; one kind in the layers with a window, and one in the others"""
    kv_sources: tuple[int, ...]
    """The layer whose K and V each layer attends to. This is the layer itself, or an earlier one that it shares them
    with."""
    widths: tuple[int, ...]
    """the feed-forward width of each layer"""
    layers_without_values: tuple[int, ...] = ()
    """the layers whose values are their keys before norm and rotation"""
    input_dim: int = 0
    """Components of the input that each layer has for a token beside the residual. 0: layers have no such inputs."""
    input_vocab_size: int = 0
    """the tokens of the table of these inputs"""

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that store K and V."""
        return tuple(layer for layer, source in enumerate(self.kv_sources) if layer == source)

    @property
    def largest(self) -> Heads:
        """The most heads and the most components of a head of any layer."""
        return Heads(max(heads.num_kv_heads for heads in self.heads), max(heads.head_dim for heads in self.heads))

    def head_dims(self, windows: SlidingWindows) -> tuple[int, int]:
        """The components of a head in layers without a window and in layers with one."""
        of_kinds = {window is None: heads.head_dim for heads, window in zip(self.heads, windows, strict=True)}
        return of_kinds[True], of_kinds.get(False, of_kinds[True])


def gemma4_from_hf(config: Settings, windows: SlidingWindows) -> Gemma4Config:
    """Read config.json. Raises ValueError that names a key that is missing or out of range, or that no layer here has.

    `windows`: those of the layers.
    """
    num_layers, num_heads = len(windows), config.integer("num_attention_heads")
    has_window = [window is not None for window in windows]
    heads = _heads(config, has_window)
    for own in heads:
        if num_heads % own.num_kv_heads:
            raise config.unsupported(
                f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({own.num_kv_heads}) in "
                "each layer"
            )
        if own.head_dim % 2:
            raise config.unsupported(f"head_dim must be even for rotary embedding, got {own.head_dim}")
    num_sharing = config.integer("num_kv_shared_layers", 0, minimum=0, maximum=num_layers)
    first = num_layers - num_sharing
    newest: dict[bool, int] = {}
    sources = []
    for layer, kind in enumerate(has_window):
        if layer < first:
            newest[kind] = layer
        if kind not in newest:
            raise config.refusal(
                "num_kv_shared_layers", "so few that each kind of layer_types has a layer with K and V", num_sharing
            )
        sources.append(newest[kind])
    width = config.integer("intermediate_size")
    is_doubled = config.flag("use_double_wide_mlp")
    input_dim = config.integer("hidden_size_per_layer_input", 0, minimum=0)
    vocab_size, input_vocab_size = config.integer("vocab_size"), config.integer("vocab_size_per_layer_input")
    if input_dim and input_vocab_size < vocab_size:
        raise config.refusal("vocab_size_per_layer_input", f"at least vocab_size ({vocab_size})", input_vocab_size)
    without_values = [layer for layer, source in enumerate(sources) if layer == source and not has_window[layer]]
    return Gemma4Config(
        heads=heads,
        kv_sources=tuple(sources),
        widths=tuple(2 * width if is_doubled and layer >= first else width for layer in range(num_layers)),
        layers_without_values=tuple(without_values) if config.flag("attention_k_eq_v") else (),
        input_dim=input_dim,
        input_vocab_size=input_vocab_size,
    )


def _heads(config: Settings, has_window: list[bool]) -> tuple[Heads, ...]:
    """The heads of each layer: those of `per_layer_config`, or of older keys for the layers without a window."""
    usual = Heads(config.integer("num_key_value_heads"), config.integer("head_dim"))
    given = config.nested("per_layer_config")
    if given is None:
        num_kv_heads = usual.num_kv_heads
        if config.flag("attention_k_eq_v"):
            num_kv_heads = config.integer("num_global_key_value_heads", num_kv_heads)
        full = Heads(num_kv_heads, config.integer("global_head_dim", 512))
        return tuple(usual if window else full for window in has_window)
    heads = []
    width = len(str(len(has_window) - 1))
    for layer in range(len(has_window)):
        # transformers writes layers with as many digits as the last one has, and reads others, too.
        own = given.nested(f"{layer:0{width}}") or given.nested(str(layer)) or Settings(config.source, {})
        heads.append(
            Heads(own.integer("num_key_value_heads", usual.num_kv_heads), own.integer("head_dim", usual.head_dim))
        )
        if unknown := own.unused():
            raise config.unsupported(f"per_layer_config has keys that are not supported: {quote(unknown)}")
    if unknown := given.unused():
        raise config.unsupported(
            f"per_layer_config must name layers below {len(has_window)}, got {quote(list(unknown))}"
        )
    for kind in set(has_window):
        if len({own for own, window in zip(heads, has_window, strict=True) if window == kind}) > 1:
            raise config.unsupported("per_layer_config must give all layers of one kind of layer_types the same heads")
    return tuple(heads)

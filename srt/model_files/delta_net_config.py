"""The config of Gated DeltaNet (arXiv 2412.06464), which some layers of Qwen 3.5 have in place of attention."""

from __future__ import annotations

from typing import NamedTuple

from .settings import Settings

_RECURRENT, _ATTENTION = "linear_attention", "full_attention"
MAX_WIDTH = 16
"""Most tokens that the convolution may cover. A kernel has a copy of its loop for each."""
MAX_DIM = 256
"""Most components of a head. A kernel keeps a state's columns in registers."""


class DeltaNetConfig(NamedTuple):
    """The layers whose mixer is a Gated DeltaNet, and the sizes of its heads.

    A linear layer makes queries, keys, values, gates of outputs, and two numbers of each value head. Queries, keys and
    values are convolved over the last tokens. Each value head has a state, a matrix that each token changes.
    """

    layers: tuple[int, ...]
    """in ascending order"""
    num_key_heads: int
    """Queries have as many. Each serves `num_value_heads / num_key_heads` neighbouring value heads."""
    num_value_heads: int
    key_dim: int
    """components of a head's query and key"""
    value_dim: int
    """components of a head's value"""
    width: int
    """how many tokens the convolution covers, the newest included; at least 2"""
    stored_by_head: bool = False
    """Whether a checkpoint has two tensors for the first linear layer, whose rows are sorted by key head (Qwen3-Next).
    If not, each part has a tensor (Qwen 3.5)."""

    @property
    def channels(self) -> int:
        """Components that are convolved: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def key_size(self) -> int:
        """Components of the keys of all heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Components of the values of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def projected_sizes(self) -> tuple[int, int, int, int]:
        """Columns of the first linear layer: what is convolved, gates, strengths and decays."""
        return self.channels, self.value_size, self.num_value_heads, self.num_value_heads

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of a request's state in a layer."""
        return self.num_value_heads, self.key_dim, self.value_dim


def delta_net_from_hf(config: Settings, num_layers: int, *, stored_by_head: bool = False) -> DeltaNetConfig | None:
    """Read config.json. None: all layers have attention. Raises ValueError that names a key that is out of range."""
    kinds = config.texts("layer_types")
    if kinds is None:
        interval = config.integer("full_attention_interval", 4)
        kinds = [_RECURRENT if (layer + 1) % interval else _ATTENTION for layer in range(num_layers)]
    if len(kinds) != num_layers or not {_RECURRENT, _ATTENTION} >= set(kinds):
        raise config.refusal("layer_types", f"{_RECURRENT!r} or {_ATTENTION!r} for each of {num_layers} layers", kinds)
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _RECURRENT)
    if not layers:
        return None
    key_heads, value_heads = config.integer("linear_num_key_heads", 16), config.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise config.refusal("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})", value_heads)
    return DeltaNetConfig(
        layers,
        key_heads,
        value_heads,
        config.integer("linear_key_head_dim", 128, maximum=MAX_DIM),
        config.integer("linear_value_head_dim", 128, maximum=MAX_DIM),
        config.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=MAX_WIDTH),
        stored_by_head,
    )

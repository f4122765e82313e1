"""Reads from a GGUF file which layers have short convolutions (LFM2)."""

from __future__ import annotations

import numpy as np

from .settings import Settings
from .short_convolutions import MAX_WIDTH, ShortConvolutions

KV_HEADS_KEY = "attention.head_count_kv"
WIDTH_KEY = "shortconv.l_cache"
"""The key that files without short convolutions do not have."""


def with_convolutions(config: Settings, num_layers: int) -> tuple[Settings, ShortConvolutions | None]:
    """Read the metadata of a file that may have an array of KV heads. 0: the layer has a convolution.

    Returns the settings with the number of KV heads of the layers with attention, and the convolutions of the others.
    None: all layers have attention. Raises ValueError that names a key that is missing or out of range.
    """
    given = config.get(KV_HEADS_KEY)
    if not isinstance(given, list | np.ndarray):
        return config, None
    heads = list(given) if isinstance(given, list) else given.tolist()
    if len(heads) != num_layers or any(type(count) is not int or count < 0 for count in heads):
        raise config.refusal(KV_HEADS_KEY, f"an integer of at least 0 for each of {num_layers} layers", heads)
    layers = tuple(layer for layer, count in enumerate(heads) if count == 0)
    with_attention = {count for count in heads if count}
    if not with_attention:
        raise config.unsupported(f"at least one layer must have attention, but {KV_HEADS_KEY} is 0 for all")
    if len(with_attention) > 1:
        raise config.unsupported_value(KV_HEADS_KEY, "the same number for all layers that have attention", heads)
    config = config.with_values({KV_HEADS_KEY: with_attention.pop()})
    if not layers:
        return config, None
    return config, ShortConvolutions(
        layers, config.integer("embedding_length"), config.integer(WIDTH_KEY, maximum=MAX_WIDTH)
    )

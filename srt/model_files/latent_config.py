"""The config of latent attention (MLA, arXiv 2405.04434), read from config.json or from the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import NamedTuple

from .gguf_rope import YARN_LOG_MULTIPLIER
from .rope_config import number_from_0, rope_settings, yarn_attention_factor
from .settings import Settings


class LatentConfig(NamedTuple):
    """Attention whose keys and values are linear functions of one short vector of each token, its latent.

    A key has components of the latent, and `rope_dim` rotated ones, which all heads share.
    """

    latent_dim: int
    """components of the latent of keys and values"""
    nope_dim: int
    """components of a head's query and key that are not rotated"""
    rope_dim: int
    """components that are"""
    value_dim: int
    """components of a head's value"""
    query_rank: int | None = None
    """components of the latent of queries; None: queries are linear functions of the layer's input"""
    norm_eps: float = 1e-6
    """of the norms of both latents"""

    @property
    def query_dim(self) -> int:
        """Components of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def key_dim(self) -> int:
        """Components of what is stored for a token: its latent, then the rotated components."""
        return self.latent_dim + self.rope_dim


def latent_from_hf(config: Settings) -> LatentConfig:
    """Read the sizes from config.json. Raises ValueError that names a key that is missing or out of range."""
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    return LatentConfig(
        latent_dim=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=_even(config, "qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim", hidden_size // num_heads),
        query_rank=None if config.get("q_lora_rank") is None else config.integer("q_lora_rank"),
    )


def _even(config: Settings, key: str) -> int:
    if (number := config.integer(key)) % 2:
        raise config.refusal(key, "even for rotary embedding", number)
    return number


def latent_scale(config: Settings, latent: LatentConfig) -> float:
    """The factor of scores. With YaRN, `mscale_all_dim` multiplies the usual one."""
    scale = 1 / math.sqrt(latent.query_dim)
    rope = rope_settings(config)
    if rope is None or (rope.text("rope_type") or rope.text("type") or "default") == "default":
        return scale
    factor, mscale = rope.number("factor", 1.0), number_from_0(rope, "mscale_all_dim")
    return scale * math.pow(yarn_attention_factor(factor, mscale), 2)


GGUF_LATENT_KEYS = (
    "attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length_mla", "attention.value_length_mla",
    YARN_LOG_MULTIPLIER,
)  # fmt: skip
"""The keys of GGUF files with latent attention that others do not have."""


def latent_from_gguf(config: Settings) -> LatentConfig:
    """Read the sizes from the metadata of a GGUF file.

    In older files `key_length` and `value_length` are the sizes of a head. In newer ones they are those of what is
    stored for a token, and the sizes of a head have keys of their own.
    """
    latent_dim, rope_dim = config.integer("attention.kv_lora_rank"), _even(config, "rope.dimension_count")
    ending = "_mla" if "attention.key_length_mla" in config else ""
    if ending:
        for key, expected in (("key_length", latent_dim + rope_dim), ("value_length", latent_dim)):
            if (given := config.integer(f"attention.{key}", expected)) != expected:
                raise config.refusal(f"attention.{key}", f"{expected} beside attention.{key}_mla", given)
    query_dim = config.integer(f"attention.key_length{ending}", minimum=rope_dim + 1)
    return LatentConfig(
        latent_dim=latent_dim,
        nope_dim=query_dim - rope_dim,
        rope_dim=rope_dim,
        value_dim=config.integer(f"attention.value_length{ending}"),
        query_rank=config.integer("attention.q_lora_rank") if "attention.q_lora_rank" in config else None,
    )


def gguf_latent_scale(config: Settings, latent: LatentConfig) -> float:
    """The factor of scores of a GGUF file. Its key has a tenth of `mscale_all_dim`."""
    scale = 1 / math.sqrt(latent.query_dim)
    if config.text("rope.scaling.type") != "yarn":
        return scale
    factor, mscale = config.number("rope.scaling.factor", 1.0), 10 * number_from_0(config, YARN_LOG_MULTIPLIER)
    return scale * math.pow(yarn_attention_factor(factor, mscale), 2)

"""The parameters of latent attention (MLA, arXiv 2405.04434)."""

from __future__ import annotations

from ...srt.model_files.latent_config import LatentConfig
from .parameter import LinearParts, Parameter, Part, Split, half_split_order


def latent_linears(latent: LatentConfig, hidden: int, num_heads: int, *, interleaved: bool) -> dict[str, LinearParts]:
    """The linear layers before attention, by name.

    The first one makes queries, or their latents, then the latents of keys and values, then the rotated components of
    keys. `interleaved`: whether a checkpoint rotates neighbouring components together.
    """
    order = half_split_order(latent.rope_dim, None, interleaved)
    nope = latent.nope_dim
    query_order = (*range(nope), *(nope + component for component in order))
    queries = Part("self_attn.q_proj", (num_heads * latent.query_dim,), head_order=query_order)
    latents = Part("self_attn.kv_a_proj_with_mqa", (latent.latent_dim,), 0, latent.key_dim)
    rotated = latents._replace(shape=(latent.rope_dim,), first_row=latent.latent_dim, head_order=order)
    if latent.query_rank is None:
        return {"qkv_proj": LinearParts((queries, latents, rotated), hidden, False, Split.COLUMNS)}
    of_queries = Part("self_attn.q_a_proj", (latent.query_rank,))
    return {
        "qkv_proj": LinearParts((of_queries, latents, rotated), hidden, False, Split.COLUMNS),
        "q_b_proj": LinearParts(
            (queries._replace(name="self_attn.q_b_proj"),), latent.query_rank, False, Split.COLUMNS
        ),
    }


def latent_norms(latent: LatentConfig) -> dict[str, Part]:
    """The norms of the latents, by name."""
    norms = {"kv_a_norm": Part("self_attn.kv_a_layernorm", (latent.latent_dim,))}
    if latent.query_rank is not None:
        norms["q_a_norm"] = Part("self_attn.q_a_layernorm", (latent.query_rank,))
    return norms


def kv_b_proj(latent: LatentConfig, layer: int, source: str, num_heads: int) -> Parameter:
    """What makes the keys and values of each head from a latent: [num_heads, nope_dim + value_dim, latent_dim].

    `source`: what the names of the layer's tensors begin with. It has three dimensions, because it is no matrix of a
    linear layer: it is not quantized and not packed.
    """
    rows = latent.nope_dim + latent.value_dim
    part = Part(f"{source}self_attn.kv_b_proj.weight", (num_heads * rows, latent.latent_dim))
    return Parameter(kv_b_name(layer), (num_heads, rows, latent.latent_dim), (part,), Split.COLUMNS)


def kv_b_name(layer: int) -> str:
    """The name of what makes keys and values from latents, [num_heads, nope_dim + value_dim, latent_dim]."""
    return f"layers.{layer}.kv_b_proj.weight"

"""The decoder that Llama, Mistral, Qwen 2 and Qwen 3 share. What differs between them is in ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...srt.model_config import ModelConfig
from ..attention.base import AttentionBackend
from ..forward_batch import ForwardBatch
from ..layers.activation import silu_and_mul
from ..layers.embedding import Embedding
from ..layers.layernorm import HeadNorm, RMSNorm
from ..layers.linear import Linear
from ..layers.rotary import CosSin, RotaryEmbedding, rotate

Parameters = Mapping[str, torch.Tensor]


class DecoderLayer:
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, layer_id: int, params: Parameters, attention: AttentionBackend) -> None:
        def linear(name: str) -> Linear:
            return Linear(params[f"{prefix}{name}.weight"], params.get(f"{prefix}{name}.bias"))

        def norm(name: str) -> RMSNorm:
            return RMSNorm(params[f"{prefix}{name}.weight"], config.rms_norm_eps)

        prefix = f"layers.{layer_id}."
        self.layer_id = layer_id
        self.attention = attention
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.input_norm = norm("input_norm")
        self.qkv_proj = linear("qkv_proj")
        self.head_norm = (
            HeadNorm(
                params[f"{prefix}q_norm.weight"],
                params[f"{prefix}k_norm.weight"],
                config.num_heads,
                config.num_kv_heads,
                config.rms_norm_eps,
            )
            if config.qk_norm
            else None
        )
        self.o_proj = linear("o_proj")
        self.post_attention_norm = norm("post_attention_norm")
        self.gate_up_proj = linear("gate_up_proj")
        self.down_proj = linear("down_proj")

    def __call__(self, x: torch.Tensor, cos_sin: CosSin, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, hidden], changed in place"""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(self.input_norm(x)).view(-1, heads + 2 * kv_heads, self.head_dim)
        qk = qkv[:, : heads + kv_heads]
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        qk = rotate(qk, cos_sin)
        attended = self.attention.forward(
            qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :], self.layer_id, batch
        )
        x += self.o_proj(attended)
        x += self.down_proj(silu_and_mul(self.gate_up_proj(self.post_attention_norm(x))))
        return x


class Decoder:
    """Token ids to hidden states. `lm_head` is the embedding matrix itself where the model ties them."""

    def __init__(self, config: ModelConfig, params: Parameters, attention: AttentionBackend) -> None:
        embedding = params["embed_tokens.weight"]
        self.embed_tokens = Embedding(embedding)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, embedding.device)
        self.layers = [DecoderLayer(config, index, params, attention) for index in range(config.num_layers)]
        self.norm = RMSNorm(params["norm.weight"], config.rms_norm_eps)
        self.lm_head = Linear(embedding if config.tie_word_embeddings else params["lm_head.weight"])

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """input_ids, positions: int64 [T] -> normalised hidden states [T, hidden]"""
        x = self.embed_tokens(input_ids)
        cos_sin = self.rotary(positions)
        for layer in self.layers:
            x = layer(x, cos_sin, batch)
        return self.norm(x)

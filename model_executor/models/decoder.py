"""The decoder of all families (srt/model_files/families.py). Their differences are fields of ModelConfig.

Constant factors need few operations, because the residual stream is divided by a constant: a norm of the stream does
not depend on its scale, if its epsilon is divided by the square of the constant.

- Gemma multiplies embeddings. The stream is divided by the same factor, so the embeddings stay as they are. What is
  added to the stream comes from norms, whose weights are divided when they are read (parameters.py).
- Granite multiplies embeddings, and what is added to the residual. The stream is divided by the second factor, so only
  the embeddings are multiplied, by the quotient of both.
- Granite divides logits. The weights of the last norm, in float32, are divided instead. Hidden states that a request
  asks for are multiplied again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, overload

import torch

from ...srt.model_files.families import FAMILIES
from ...srt.model_files.model_config import ModelConfig
from ...srt.model_files.rope_config import RopeConfig
from ..attention.base import AttentionBackend, AttentionSpec
from ..forward_batch import ForwardBatch
from ..layers.attention import QKNorm
from ..layers.delta_net import DeltaNetWeights
from ..layers.experts import Expert, ExpertWeights, RouterWeights
from ..layers.kinds import AttentionLayer, Layer, LayerKinds, is_compiled
from ..layers.latent_attention import LatentLayers
from ..layers.layernorm import RMSNorm
from ..layers.residual import BeforeSum, NormedSum, Pending, Stream, StreamLayer, UnnormedLayer
from ..layers.short_convolution import ConvolutionWeights
from ..row_states import LayerStates
from .convolution_parameters import convolution_bias_name, convolution_name
from .delta_net_parameters import delta_net_names
from .family import ModelFamily, Parameters
from .gemma4 import gemma4_attention, layer_end, layer_inputs
from .latent_parameters import kv_b_name
from .parameters import (
    bias_name,
    corrections_name,
    decoder_parameters,
    expert_names,
    router_name,
    shared_expert_names,
    shared_gate_name,
    sinks_name,
)


class _StoredExperts(Sequence[ExpertWeights]):
    """The weights of a layer's experts. Each access reads them, as an access to parameters does."""

    def __init__(self, params: Parameters, layer_id: int, num_experts: int) -> None:
        self._params = params
        self._layer_id = layer_id
        self._num_experts = num_experts

    def __len__(self) -> int:
        return self._num_experts

    @overload
    def __getitem__(self, index: int) -> ExpertWeights: ...

    @overload
    def __getitem__(self, index: slice) -> list[ExpertWeights]: ...

    def __getitem__(self, index: int | slice) -> ExpertWeights | list[ExpertWeights]:
        if isinstance(index, slice):
            return [self[expert] for expert in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        names = expert_names(self._layer_id, index)
        weights = (self._params[name] for name in names)
        return ExpertWeights(*weights, *(self._params.get(bias_name(name)) for name in names))


class DecoderLayer:
    """One layer: residual += o_proj(mixer(qkv_proj(residual))), then residual += feed_forward(residual).

    The mixer is attention or a short convolution. With `input_norms`, the inputs of both sums are normalised, with
    `output_norms`, what they add is.

    The norm of an output also computes the sum. Without it, the next norm does, in the same pass: that of the next
    layer, or the final norm. Layers for few tokens may compute the sum themselves (layers/residual.py).
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        params: Parameters,
        backend: AttentionBackend,
        layers: LayerKinds,
        states: Sequence[LayerStates],
        input_norm: RMSNorm | None,
        next_norm: RMSNorm | None,
    ) -> None:
        """`states`: of all recurrent layers. `input_norm`: that before this layer's mixer. `next_norm`: that of the
        next layer, or the last of the model. None: there is none.
        """

        def weights(name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
            return params[f"{prefix}{name}.weight"], params.get(f"{prefix}{name}.bias")

        def of_stream(norm: RMSNorm | None, layer: Layer) -> StreamLayer:
            return UnnormedLayer(layer) if norm is None else layers.after_norm(norm, layer)

        def before_sum(layer: Layer, output_norm: str, next_norm: RMSNorm | None) -> BeforeSum:
            if config.output_norms:
                norm = layers.norm(params[f"{prefix}{output_norm}.weight"], config.rms_norm_eps)
                return NormedSum(layer, norm)
            assert next_norm is not None
            return layers.before_sum(layer, next_norm)

        prefix = f"layers.{layer_id}."
        self.input_norm = input_norm
        self.end = layer_end(config, layer_id, params, layers)
        self.qkv_proj = layers.linear(*weights("qkv_proj"))
        self.rope_index = _distinct_ropes(config).index(config.ropes[layer_id])
        self.mixer = _mixer(config, layer_id, params, backend, states, layers)
        self.o_proj = layers.linear(*weights("o_proj"))
        self.post_attention_norm = _input_norm(config, params, f"{prefix}post_attention_norm.weight", layers)
        self._normed_qkv = of_stream(self.input_norm, self.qkv_proj)
        self._summed_o = before_sum(self.o_proj, "attention_output_norm", self.post_attention_norm)
        self._normed_experts: StreamLayer | None = None
        if config.is_sparse(layer_id):
            assert config.experts is not None
            stored = _StoredExperts(params, layer_id, config.experts.num_experts)
            name = router_name(layer_id)
            router = RouterWeights(params[name], params.get(bias_name(name)), params.get(corrections_name(layer_id)))
            self.experts = layers.experts(router, stored, config.experts)
            if config.experts.shared is not None:
                gate_up, down = (params[name] for name in shared_expert_names(layer_id))
                shared = Expert(layers.gated_linear(gate_up, None, "silu"), layers.linear(down, None))
                self.experts = layers.with_shared_expert(self.experts, shared, params.get(shared_gate_name(layer_id)))
            self._normed_experts = of_stream(self.post_attention_norm, self.experts)
            return
        if config.hidden_act == "squared_relu":
            self.inner_proj = layers.squared_relu(layers.linear(*weights("up_proj")))
        else:
            self.inner_proj = layers.gated_linear(*weights("gate_up_proj"), config.hidden_act)
        self.down_proj = layers.linear(*weights("down_proj"))
        self._normed_inner = of_stream(self.post_attention_norm, self.inner_proj)
        self._summed_down = before_sum(self.down_proj, "feed_forward_output_norm", next_norm)

    def mix(
        self, x: Pending, residual: torch.Tensor | None, rotations: Sequence[Any], batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x to the residual in place, and compute `qkv_proj` and the mixer: the mixer's output [T, n], residual.

        x, residual: [T, hidden] each. The first layer has no residual: x becomes it. An x that is None or ScaledRows is
        in the residual already.
        """
        qkv, residual = self._normed_qkv(x, residual, batch)
        return self.mixer(qkv, rotations[self.rope_index], batch), residual

    def feed_forward(self, mixed: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> Pending:
        """Compute `o_proj`, add its output to the residual in place, and compute the feed-forward output, [T, hidden].

        `mixed`: from `mix`.

        The caller adds the result to the residual, unless it is None or ScaledRows.
        """
        pending = self._summed_o(mixed, residual, batch)
        if self._normed_experts is not None:
            return self._normed_experts(pending, residual, batch)[0]
        inner, residual = self._normed_inner(pending, residual, batch)
        return self._summed_down(inner, residual, batch)


class Decoder:
    """The decoder as a Model. `lm_head` and `embed_tokens` share their weight if the config ties them."""

    def __init__(
        self,
        config: ModelConfig,
        params: Parameters,
        backend: AttentionBackend,
        layers: LayerKinds,
        context_len: int,
        states: Sequence[LayerStates] = (),
    ) -> None:
        """`states`: of all recurrent layers."""
        self.compiled = is_compiled(layers, config)
        self._select_rows = layers.select_rows
        self.norm = layers.norm(params["norm.weight"], config.residual_norm_eps)
        ropes = [rope.for_context(context_len) for rope in _distinct_ropes(config)]
        self.rotary = layers.rotary(ropes, config.rope_dim, context_len, self.norm.weight.device)
        names = [f"layers.{index}.input_norm.weight" for index in range(config.num_layers)]
        norms = [*(_input_norm(config, params, name, layers) for name in names), self.norm]
        self.layers = [
            DecoderLayer(config, index, params, backend, layers, states, *pair)
            for index, pair in enumerate(pairwise(norms))
        ]
        self._layer_inputs = layer_inputs(config, params, layers)
        embedding = params["embed_tokens.weight"]
        if config.tie_word_embeddings:
            self.lm_head = layers.head(embedding)
            self.embed_tokens = layers.tied_embedding(embedding, self.lm_head)
        else:
            self.lm_head = layers.head(params["lm_head.weight"])
            self.embed_tokens = layers.embedding(embedding)
        if config.embedding_factor != 1:
            self.embed_tokens = layers.scaled_embedding(self.embed_tokens, config.embedding_factor)
        self.head = layers.output_head(self.norm, self.lm_head, config.logits_soft_cap)
        self.start_decode = layers.start_decode(self.embed_tokens, self.rotary)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> Stream:
        return self.transform(self.embed_tokens(input_ids, batch), self.rotary(positions), batch)

    def transform(self, x: torch.Tensor, rotations: Sequence[Any], batch: ForwardBatch) -> Stream:
        residual: torch.Tensor | None = None
        pending: Pending = x
        inputs = None if self._layer_inputs is None else self._layer_inputs(batch.input_ids, x, batch)
        for index, layer in enumerate(self.layers):
            mixed, residual = layer.mix(pending, residual, rotations, batch)
            if layer is self.layers[-1] and batch.logits_indices is not None:
                # The pool has what later steps need of all tokens. The rest is needed only for the sampled tokens.
                mixed = self._select_rows(mixed, batch.logits_indices)
                residual = self._select_rows(residual, batch.logits_indices)
                inputs = None if inputs is None else inputs.index_select(0, batch.logits_indices)
                if not len(residual):
                    return Stream(None, residual)
                batch = batch.of_sampled()
            pending = layer.feed_forward(mixed, residual, batch)
            if layer.end is not None:  # the norm of the output has added it to the residual
                layer.end(residual, None if inputs is None else inputs[:, index], batch)
        return Stream(pending, residual)


def _input_norm(config: ModelConfig, params: Parameters, name: str, layers: LayerKinds) -> RMSNorm | None:
    """The norm of the residual before a layer, if the model has such norms."""
    return layers.norm(params[name], config.residual_norm_eps) if config.input_norms else None


def _mixer(
    config: ModelConfig,
    layer_id: int,
    params: Parameters,
    backend: AttentionBackend,
    states: Sequence[LayerStates],
    layers: LayerKinds,
) -> AttentionLayer:
    """Attention, or what the layer has in its place. The pool, the states and the attention backend number the layers
    of each kind separately, from 0."""
    prefix = f"layers.{layer_id}."
    if not config.has_attention(layer_id) and config.delta_net is not None:
        own = states[config.delta_net.layers.index(layer_id)]
        weights = DeltaNetWeights(*(params[name] for name in delta_net_names(layer_id)))
        return layers.delta_net(config.delta_net, own, weights, config.rms_norm_eps)
    if not config.has_attention(layer_id):
        assert config.convolutions is not None
        stored = backend.kv_pool.conv_buffer[config.convolutions.layers.index(layer_id)]
        names = convolution_name(layer_id), convolution_bias_name(layer_id)
        return layers.convolution(stored, ConvolutionWeights(params[names[0]], params.get(names[1])))
    if config.gemma4 is not None:
        return gemma4_attention(config, layer_id, params, backend, layers)
    index = config.attention_layers.index(layer_id)
    if config.latent is not None:
        parts = _latent_layers(config, layer_id, params, layers)
        return layers.latent_attention(index, backend, config.latent, parts)
    qk_norm = None
    if config.qk_norm:
        q_norm, k_norm = params[f"{prefix}q_norm.weight"], params[f"{prefix}k_norm.weight"]
        qk_norm = QKNorm(q_norm, k_norm, config.rms_norm_eps, norm_after=config.qk_norm == "rotated_heads")
    attention = layers.attention(index, backend, qk_norm, params.get(sinks_name(layer_id)))
    return layers.gated_heads(attention, config.num_attention_gates) if config.attention_gates else attention


def _latent_layers(config: ModelConfig, layer_id: int, params: Parameters, layers: LayerKinds) -> LatentLayers:
    """The layers of latent attention between the first linear layer and the last one."""
    latent, prefix = config.latent, f"layers.{layer_id}."
    assert latent is not None
    query_norm = query_proj = None
    if latent.query_rank is not None:
        query_norm = layers.norm(params[f"{prefix}q_a_norm.weight"], latent.norm_eps)
        query_proj = layers.linear(params[f"{prefix}q_b_proj.weight"], None)
    kv_norm = layers.norm(params[f"{prefix}kv_a_norm.weight"], latent.norm_eps)
    return LatentLayers(kv_norm, query_norm, query_proj, params[kv_b_name(layer_id)])


def _distinct_ropes(config: ModelConfig) -> list[RopeConfig]:
    """The rotary embeddings of the layers, each once."""
    return list(dict.fromkeys(config.ropes))


def _attention(config: ModelConfig) -> list[AttentionSpec]:
    return [
        AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.heads(layer).num_kv_heads,
            head_dim=config.heads(layer).head_dim,
            scale=config.attention_scale,
            rope=config.ropes[layer],
            window=config.sliding_windows[layer],
            soft_cap=config.scores_soft_cap,
            has_sinks=FAMILIES[config.architecture].attention_sinks,
            latent_dim=config.latent_dim,
        )
        for layer in config.kv_layers
    ]


FAMILY = ModelFamily(parameters=decoder_parameters, attention=_attention, build=Decoder)

"""The interface of model families: one object holds all that the execution layer needs to know about a family.

srt/model_files/families.py says how a family's config.json is read. Its `Family.implementation` names the module of
this folder whose `FAMILY` is the object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch

from ...srt.model_files.families import FAMILIES
from ...srt.model_files.model_config import ModelConfig
from ..attention.base import AttentionBackend, AttentionSpec
from ..forward_batch import ForwardBatch
from ..layers.decode_start import StartDecode
from ..layers.kinds import Layer, LayerKinds, Rotary
from ..layers.output_head import OutputHead
from ..layers.residual import Stream
from ..row_states import LayerStates
from .parameter import Parameter

Parameters = Mapping[str, Any]
"""Tensors, or QuantizedWeights and Fp8Weights for quantized layers, by the names of `ModelFamily.parameters`."""


class Model(Protocol):
    """A model. `head(forward(...))` computes logits from token ids."""

    compiled: bool
    """Whether all operations between embedding and logits are compiled CPU operations."""
    embed_tokens: Layer
    rotary: Rotary
    start_decode: StartDecode
    """starts a decode step, which continues with `transform`"""
    head: OutputHead

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> Stream:
        """Compute the residual stream after the last layer. input_ids, positions: int64 [T].

        The result has the tokens of `batch.logits_indices`.
        """

    def transform(self, x: torch.Tensor, rotations: Sequence[Any], batch: ForwardBatch) -> Stream:
        """`forward` of embedded tokens, x [T, hidden], which are overwritten. `rotations`: made by `rotary`."""


@dataclass(frozen=True)
class ModelFamily:
    """A model family: how its parameters, its attention and its model are made from a config."""

    parameters: Callable[[ModelConfig], list[Parameter]]
    """the tensors of a model, and the checkpoint tensors that each is made from"""
    attention: Callable[[ModelConfig], list[AttentionSpec]]
    """the attention of each layer"""
    build: Callable[[ModelConfig, Parameters, AttentionBackend, LayerKinds, int, Sequence[LayerStates]], Model]
    """makes the model from config, parameters, attention backend, layers, context length and states"""


def family_of(config: ModelConfig) -> ModelFamily:
    """The family of the config's architecture."""
    module = import_module(f".{FAMILIES[config.architecture].implementation}", __package__)
    family = module.FAMILY
    assert isinstance(family, ModelFamily)
    return family

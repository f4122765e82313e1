"""The interface of model families: one object holds all that the execution layer needs to know about a family.

srt/model_files/model_config.py reads a family's config.json. Its `Family.implementation` names the module of this
folder whose `FAMILY` is the object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch

from ...srt.model_files.model_config import FAMILIES, ModelConfig
from ..attention.base import AttentionBackend, AttentionSpec
from ..forward_batch import ForwardBatch
from ..layers.decode_start import StartDecode
from ..layers.kinds import Layer, LayerKinds, Rotary
from .parameters import Parameter

Parameters = Mapping[str, Any]
"""Tensors, or QuantizedWeights and Fp8Weights for quantized layers, by the names of `ModelFamily.parameters`."""


class Model(Protocol):
    """A model: from token ids to logits."""

    compiled: bool
    """Whether all operations between embedding and logits are compiled CPU operations."""
    embed_tokens: Layer
    rotary: Rotary
    start_decode: StartDecode
    """starts a decode step, which continues with `transform`"""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Compute normalised hidden states: input_ids, positions int64 [T] -> [num_sampled, hidden].

        The result has the tokens of `batch.logits_indices`.
        """

    def transform(self, x: torch.Tensor, rotation: Any, batch: ForwardBatch) -> torch.Tensor:
        """`forward` of embedded tokens, x [T, hidden], which are overwritten. `rotation`: made by `rotary`."""

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits: hidden [num_sampled, hidden] -> float32 [num_sampled, vocab], written to `out` if given."""


@dataclass(frozen=True)
class ModelFamily:
    """A model family: how its parameters, its attention and its model are made from a config."""

    parameters: Callable[[ModelConfig], list[Parameter]]
    """the tensors of a model, and the checkpoint tensors that each is made from"""
    attention: Callable[[ModelConfig], list[AttentionSpec]]
    """the attention of each layer"""
    build: Callable[[ModelConfig, Parameters, AttentionBackend, LayerKinds, int], Model]
    """makes the model from config, parameters, attention backend, layers and context length"""


def family_of(config: ModelConfig) -> ModelFamily:
    """The family of the config's architecture."""
    module = import_module(f".{FAMILIES[config.architecture].implementation}", __package__)
    family = module.FAMILY
    assert isinstance(family, ModelFamily)
    return family

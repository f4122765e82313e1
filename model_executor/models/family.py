"""A model family as one object: everything that differs between kinds of models, on this side of their files.

srt/model_files/model_config.py says how a family's config.json is read; `Family.implementation` there names the module
of this folder whose `FAMILY` is the object.
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
from ..layers.kinds import Layer, LayerKinds, Rotary
from .parameters import Parameter

Parameters = Mapping[str, Any]
"""Tensors by the names of `ModelFamily.parameters`; QuantizedWeights where layers of such are made."""


class Model(Protocol):
    """Token ids to logits."""

    compiled: bool
    """Between embedding and logits there is nothing but a CPU's compiled operations."""
    embed_tokens: Layer
    rotary: Rotary

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """input_ids, positions: int64 [T] -> normalised hidden states [num_sampled, hidden], those of the tokens whose
        next token is wanted"""

    def transform(self, x: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`forward` from embedded tokens on: x [T, hidden], which is overwritten."""

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [num_sampled, hidden_size] -> float32 [num_sampled, vocab], in `out` where that is given"""


@dataclass(frozen=True)
class ModelFamily:
    """`build(config, parameters, attention backend, layers, context_len)` makes a Model."""

    parameters: Callable[[ModelConfig], list[Parameter]]
    """every tensor of a model, and which tensors of its checkpoint it is made of"""
    attention: Callable[[ModelConfig], list[AttentionSpec]]
    """attention of every layer"""
    build: Callable[[ModelConfig, Parameters, AttentionBackend, LayerKinds, int], Model]


def family_of(config: ModelConfig) -> ModelFamily:
    """The family that computes the models of this architecture."""
    module = import_module(f".{FAMILIES[config.architecture].implementation}", __package__)
    family = module.FAMILY
    assert isinstance(family, ModelFamily)
    return family

"""A model's default sampling parameters, from generation_config.json or from `general.sampling.*` of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequest
from ..sampling_params import SamplingParams
from .settings import Settings


@dataclass(frozen=True)
class GenerationDefaults:
    """The sampling parameters that the model's authors recommend. None: no recommendation."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """-1: all tokens"""
    min_p: float | None = None
    repetition_penalty: float | None = None


HF_KEYS = {key: key for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""The file's key for each field of GenerationDefaults."""


def read_generation_defaults(source: Settings, keys: Mapping[str, str]) -> GenerationDefaults:
    """Read the defaults. Raises ValueError for values that a request could not have."""
    values = {name: source.optional_number(key, above=-math.inf) for name, key in keys.items()}
    top_k = values.pop("top_k")
    if top_k is not None and not top_k.is_integer():
        raise source.refusal(keys["top_k"], "an integer", top_k)
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    if top_k is not None:
        # Both formats write "all tokens" as 0.
        given["top_k"] = int(top_k) if top_k > 0 else -1
    try:
        SamplingParams(**given)  # checks the values
    except InvalidRequest as error:
        raise ValueError(f"{source.source}: {error}") from None
    return GenerationDefaults(**given)

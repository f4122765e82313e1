"""From a decoded body to RequestOptions: every option that the body has a field for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..request_options import RequestOptions
from ..sampling_params import SamplingParams

OPTION_FIELDS = tuple(name for name in RequestOptions.__struct_fields__ if name != "sampling")
"""Options that a body asks for by a field of the same name. Sampling parameters have rules of their own."""


def options_of(body: object, sampling: SamplingParams) -> RequestOptions:
    """Raises InvalidRequest for a value out of range."""
    return make_options(sampling, {name: getattr(body, name, None) for name in OPTION_FIELDS})


def make_options(sampling: SamplingParams, given: Mapping[str, Any]) -> RequestOptions:
    """`given`: values by name; None keeps the default."""
    return RequestOptions(sampling=sampling, **{name: value for name, value in given.items() if value is not None})

"""Makes the RequestOptions of a decoded body. Each option is read from the body's field of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..logprobs import LogprobOptions
from ..request_options import RequestOptions
from ..sampling_params import SamplingParams

OPTION_FIELDS = tuple(name for name in RequestOptions.__struct_fields__ if name not in ("sampling", "logprobs"))
"""The options that are read from a field of the same name: all but the objects that each API makes itself."""


def options_of(body: object, sampling: SamplingParams, logprobs: LogprobOptions | None = None) -> RequestOptions:
    """The options of one request. Raises InvalidRequest for a value out of range."""
    return make_options(sampling, {name: getattr(body, name, None) for name in OPTION_FIELDS}, logprobs)


def make_options(
    sampling: SamplingParams, given: Mapping[str, Any], logprobs: LogprobOptions | None = None
) -> RequestOptions:
    """Options with these values by name. None keeps an option's default. Raises InvalidRequest."""
    values = {name: value for name, value in given.items() if value is not None}
    return RequestOptions(sampling=sampling, logprobs=logprobs, **values)

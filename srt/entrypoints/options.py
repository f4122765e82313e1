"""Makes the RequestOptions of a decoded body. Each option is read from a field of the body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..logprobs import LogprobOptions
from ..request_options import RequestOptions
from ..sampling_params import SamplingParams
from ..tenant_names import tenant_name

OPTION_FIELDS = {
    name: "user" if name == "tenant" else name
    for name in RequestOptions.__struct_fields__
    if name not in ("sampling", "logprobs", "adapter", "prediction", "reasoning", "shown_tokens")
}
"""The options that are read from a field of a body, and the name of the field. Each API makes the other ones itself.
The tenant of /generate is its field `tenant` (native.py)."""


def options_of(
    body: object, sampling: SamplingParams, logprobs: LogprobOptions | None = None, **own: Any
) -> RequestOptions:
    """The options of one request. `own`: options that the API makes itself. Raises InvalidRequest for a value out of
    range."""
    given = {name: getattr(body, field, None) for name, field in OPTION_FIELDS.items()}
    return make_options(sampling, {**given, **own}, logprobs)


def make_options(sampling: SamplingParams, given: Mapping[str, Any], logprobs: LogprobOptions | None) -> RequestOptions:
    """Options with these values by name. None keeps an option's default. Raises InvalidRequest."""
    values = {name: value for name, value in given.items() if value is not None}
    if "tenant" in values:
        values["tenant"] = tenant_name(values["tenant"])
    return RequestOptions(sampling=sampling, logprobs=logprobs, **values)

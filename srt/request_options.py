"""The options of a request: one struct with all its settings except the prompt.

It is passed unchanged from the decoded body to the scheduler:

    body --options_of--> Prompt.options --> GenerateReq.options --> Req.options

A body declares an option as a field of the same name (srt/entrypoints/options.py). So a new option is a field here, a
field of the bodies that offer it, and the code that reads it.
"""

from __future__ import annotations

import msgspec

from .errors import InvalidRequest
from .sampling_params import SamplingParams

MAX_SALT_CHARS = 256


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The options of one request. Raises InvalidRequest for a value out of range."""

    sampling: SamplingParams
    """In the scheduler `n` is 1, and `max_new_tokens` and `sampling_seed` are always set."""
    cache_salt: str = ""
    """Namespace of the prefix cache: only requests with the same salt share prefixes."""
    stream: bool = False
    """False: the client reads only the complete output, so the scheduler sends no output between the first token and
    the last."""

    def __post_init__(self) -> None:
        if len(self.cache_salt) > MAX_SALT_CHARS:
            raise InvalidRequest(f"cache_salt must have at most {MAX_SALT_CHARS} characters", param="cache_salt")

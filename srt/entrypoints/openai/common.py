"""Code that completions and chat share: sampling parameters, finish reasons, usage, and the common response fields."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from ....managers.tokenizer_manager import TokenizerManager
from ...errors import InvalidRequest
from ...io_struct import AbortFinish, LengthFinish, StopFinish
from ...sampling_params import GRAMMAR_FIELDS, SamplingParams
from ..job import Sample
from ..request_names import RequestNames
from ..wire import shown
from .protocol import CachedTokensDetails, Extension, FinishName, OpenAIBody, PromptTokensDetails, Usage
from .structured import grammar_field, grammar_of

# Names in SamplingParams of the fields that have another name in the OpenAI API.
_OUR_NAME = {"min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "stop",
    "stop_regex",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "no_stop_trim",
    "skip_special_tokens",
)


def sampling_of(
    manager: TokenizerManager, body: OpenAIBody, max_tokens: int | None, max_tokens_field: str
) -> SamplingParams:
    """The sampling parameters of a body. Error messages use the field names of the OpenAI API."""
    values: dict[str, Any] = {_OUR_NAME.get(field, field): getattr(body, field) for field in _SAMPLING_FIELDS}
    values |= {"max_new_tokens": max_tokens, **grammar_of(body)}
    try:
        return manager.inputs.make_sampling(values)
    except InvalidRequest as error:
        their_name = {ours: theirs for theirs, ours in _OUR_NAME.items()} | {"max_new_tokens": max_tokens_field}
        if error.param in GRAMMAR_FIELDS:
            field = grammar_field(body)
            assert field is not None
            raise InvalidRequest(error.message.replace(error.param, field, 1), param=field) from None
        if error.param not in their_name:
            raise
        message = error.message
        for ours, theirs in their_name.items():
            message = message.replace(ours, theirs)
        raise InvalidRequest(message, param=their_name[error.param]) from None


def check_stream_options(body: OpenAIBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is allowed only with stream: true", param="stream_options")


def finish_name(sample: Sample) -> FinishName | None:
    if isinstance(sample.finish, StopFinish):
        return "stop"
    if isinstance(sample.finish, LengthFinish):
        return "length"
    return "abort" if isinstance(sample.finish, AbortFinish) else None


def matched_stop(sample: Sample) -> int | str | None:
    return sample.finish.matched if isinstance(sample.finish, StopFinish) else None


def usage_of(samples: Iterable[Sample], num_unsaid: int = 0) -> Usage:
    """The token counts so far, without `num_unsaid` tokens whose text is in a later chunk.

    Each prompt counts once. `cached_tokens` is taken from its first sample, since the others may hit what that one has
    just cached.
    """
    prompt_tokens = cached_tokens = 0
    completion_tokens = -num_unsaid
    for sample in samples:
        completion_tokens += sample.counts.completion_tokens
        if sample.generation.index == 0:
            prompt_tokens += sample.prompt_tokens
            cached_tokens += sample.counts.cached_tokens
    return Usage(
        prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(cached_tokens)
    )


class Frame:
    """The parts that all chunks of a response share: id, creation time, model, and when `usage` is included."""

    def __init__(self, body: OpenAIBody, prefix: str, model: str, names: RequestNames) -> None:
        self.id = body.rid if body.rid is not None else f"{prefix}-{names.hex()}"
        self.created = names.created
        self.model = model
        self.return_token_ids = bool(body.return_token_ids)
        self._return_cached_tokens_details = bool(body.return_cached_tokens_details)
        options = body.stream_options
        self.ends_with_usage = options is not None and bool(options.include_usage)
        self._continuous = options is not None and bool(options.continuous_usage_stats)

    def chunk_usage(self, samples: Sequence[Sample], num_unsaid: int = 0) -> Usage | UnsetType | None:
        """The `usage` field of a chunk with choices. See `usage_of` for `num_unsaid`."""
        if self._continuous:
            return usage_of(samples, num_unsaid)
        return None if self.ends_with_usage else UNSET

    def ids(self, ids: list[int]) -> list[int] | UnsetType:
        return ids if self.return_token_ids else UNSET

    def extension(self, samples: Iterable[Sample]) -> Extension | UnsetType:
        """The `sglext` field of the answer, or of the last chunk but one of a stream."""
        if not self._return_cached_tokens_details:
            return UNSET
        return Extension(CachedTokensDetails.of(one.counts for one in samples if one.generation.index == 0))


def limit_of(request: Request, *, default: int, maximum: int) -> int:
    """The query parameter `limit` of a list: most entries of the answer. Raises InvalidRequest."""
    given = request.query_params.get("limit", str(default))
    if not (given.isascii() and given.isdecimal() and len(given) < 10 and 1 <= int(given) <= maximum):
        raise InvalidRequest(f"limit must be a number in [1, {maximum}], got {shown(given)}", param="limit")
    return int(given)

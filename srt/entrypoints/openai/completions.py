"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from msgspec import UNSET
from starlette.requests import Request
from starlette.types import ASGIApp

from ....managers.request_registry import Prompt
from ...errors import InvalidRequest
from ...io_struct import TextOut
from ..job import Sample
from ..native import check_not_empty, check_num_prompts, split_ids
from ..options import options_of
from ..routing import Server, in_thread_if_large
from ..sse import ResponseFormat, answer, event
from ..wire import BodyCodec
from .common import Frame, check_stream_options, finish_name, matched_stop, sampling_of, usage_of
from .protocol import Completion, CompletionBody, CompletionChoice

DEFAULT_MAX_TOKENS = 16

COMPLETION_CODEC = BodyCodec(CompletionBody)


async def completions(server: Server, request: Request, body: CompletionBody) -> ASGIApp:
    """Handler of /v1/completions."""
    frame = Frame(body, "cmpl", server.check_model(body.model))
    check_stream_options(body)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = await in_thread_if_large(request, sampling_of, server.manager, body, max_tokens, "max_tokens")
    contents, is_list = await in_thread_if_large(request, _contents, body.prompt)
    check_num_prompts(len(contents), "prompt")
    options = options_of(body, sampling)
    prompts = [
        Prompt(
            content=content,
            options=options,
            rid=frame.id if len(contents) == 1 else f"{frame.id}_{i}",
            add_special_tokens=body.add_special_tokens is not False,
            param=f"prompt[{i}]" if is_list else "prompt",
        )
        for i, content in enumerate(contents)
    ]
    response_format = _CompletionFormat(frame)
    return await answer(server, request, prompts, response_format=response_format, name=frame.id)


def _contents(prompt: str | list[str | int | list[int]]) -> tuple[Sequence[str | list[int]], bool]:
    """The prompts, and whether the client sent a list of prompts."""
    if isinstance(prompt, str):
        return [prompt], False
    check_not_empty(prompt, "prompt")
    types = set(map(type, prompt))
    if str not in types:
        return split_ids(cast(list[int | list[int]], prompt), "prompt")
    if len(types) > 1:
        raise InvalidRequest("prompt must contain only texts or only token ids, not a mix of both", param="prompt")
    return cast(list[str], prompt), True


class _CompletionFormat(ResponseFormat):
    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._samples: Sequence[Sample] = ()
        self._begun: set[int] = set()

    def begin(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def events(self, sample: Sample, out: TextOut) -> bytes:
        frame = self._frame
        if not out.text and out.finish is None and not (frame.return_token_ids and out.token_ids):
            return b""  # the text of these tokens is not certain yet
        choice = self._choice(sample, out.text, out.token_ids, sample.index not in self._begun)
        self._begun.add(sample.index)
        usage = frame.chunk_usage(self._samples)
        return event(Completion(frame.id, "text_completion", frame.created, frame.model, [choice], usage))

    def last_events(self) -> bytes:
        frame = self._frame
        if not frame.ends_with_usage:
            return b""
        usage = usage_of(self._samples)
        return event(Completion(frame.id, "text_completion", frame.created, frame.model, [], usage))

    def full_response(self) -> Any:
        frame = self._frame
        choices = [self._choice(sample, sample.text, sample.output_ids, True) for sample in self._samples]
        usage = usage_of(self._samples)
        return Completion(frame.id, "text_completion", frame.created, frame.model, choices, usage)

    def _choice(self, sample: Sample, text: str, token_ids: list[int], first: bool) -> CompletionChoice:
        name = finish_name(sample)
        ids = self._frame.ids(token_ids)
        prompt_ids = self._frame.ids(sample.prompt_ids) if first and self._frame.return_token_ids else UNSET
        matched = UNSET if name is None else matched_stop(sample)
        return CompletionChoice(sample.index, text, None, name, matched, ids, prompt_ids)

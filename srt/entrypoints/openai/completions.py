"""POST /v1/completions."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from msgspec import UNSET
from starlette.requests import Request
from starlette.types import ASGIApp

from ....managers.fim_prompts import FimPrompts
from ....managers.request_registry import Prompt
from ...errors import InvalidRequest
from ...io_struct import TextOut
from ...logprobs import LogprobOptions
from ..job import Sample
from ..lora import target_of
from ..native import check_not_empty, check_num_prompts, split_ids
from ..options import options_of
from ..request_names import names_of
from ..routing import Server, in_thread_if_large
from ..sse import ResponseFormat, answer, event
from ..wire import BodyCodec
from .common import Frame, check_stream_options, finish_name, matched_stop, sampling_of, usage_of
from .completion_protocol import Completion, CompletionBody, CompletionChoice
from .logprobs import CompletionLogprobWriter, check_tokenizer, check_top
from .structured import grammar_field

DEFAULT_MAX_TOKENS = 16

COMPLETION_CODEC = BodyCodec(CompletionBody)


async def completions(server: Server, request: Request, body: CompletionBody) -> ASGIApp:
    """Handler of /v1/completions."""
    target = target_of(server.manager, body.model, body.lora_path)
    frame = Frame(body, "cmpl", target.model, names_of(request.scope))
    check_stream_options(body)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = await in_thread_if_large(request, sampling_of, server.manager, body, max_tokens, "max_tokens")
    contents, is_list = await in_thread_if_large(request, contents_of, body.prompt, "prompt")
    check_num_prompts(len(contents), "prompt")
    echo = bool(body.echo)
    if echo:
        check_tokenizer(server.manager, "echo")
    fim = _fim_prompts(server, body, contents)
    if fim is not None:
        sampling = fim.sampling(sampling)
    options = options_of(body, sampling, _logprobs(server, body), adapter=target.adapter)
    grammar_param = grammar_field(body)
    add_special_tokens = body.add_special_tokens is not False
    prompts = [
        Prompt(
            content=_content(content, fim, add_special_tokens),
            options=options,
            rid=frame.id if len(contents) == 1 else f"{frame.id}_{i}",
            add_special_tokens=add_special_tokens,
            param=f"prompt[{i}]" if is_list else "prompt",
            grammar_param=grammar_param,
        )
        for i, content in enumerate(contents)
    ]
    response_format = _CompletionFormat(server, frame, echo=echo)
    return await answer(server, request, prompts, response_format=response_format, name=frame.id)


def _fim_prompts(server: Server, body: CompletionBody, contents: Sequence[str | list[int]]) -> FimPrompts | None:
    """The maker of prompts for fill in the middle; None without a suffix."""
    if not body.suffix:
        return None
    if body.echo:
        raise InvalidRequest("echo is not allowed with suffix, got true", param="echo")
    if not all(isinstance(content, str) for content in contents):
        raise InvalidRequest("suffix is allowed only with texts as prompt, got token ids", param="suffix")
    return FimPrompts(server.manager.inputs, body.suffix)


def _content(
    content: str | list[int], fim: FimPrompts | None, add_special_tokens: bool
) -> str | list[int] | Callable[[], Awaitable[list[int]]]:
    if fim is None or not isinstance(content, str):
        return content
    return functools.partial(fim.ids, content, add_special_tokens=add_special_tokens)


def _logprobs(server: Server, body: CompletionBody) -> LogprobOptions | None:
    if body.logprobs is None or body.logprobs is False:
        return None
    if body.logprobs is True:
        raise InvalidRequest("logprobs must be a number of tokens in /v1/completions, got true", param="logprobs")
    check_tokenizer(server.manager, "logprobs")
    top = check_top(body.logprobs, "logprobs")
    return LogprobOptions(top_logprobs_num=top, logprob_start_len=0 if body.echo else -1)


def contents_of(prompt: str | list[str | int | list[int]], param: str) -> tuple[Sequence[str | list[int]], bool]:
    """The prompts, and whether the client sent a list of prompts."""
    if isinstance(prompt, str):
        return [prompt], False
    check_not_empty(prompt, param)
    types = set(map(type, prompt))
    if str not in types:
        return split_ids(cast(list[int | list[int]], prompt), param)
    if len(types) > 1:
        raise InvalidRequest(f"{param} must contain only texts or only token ids, not a mix of both", param=param)
    return cast(list[str], prompt), True


class _CompletionFormat(ResponseFormat):
    def __init__(self, server: Server, frame: Frame, *, echo: bool) -> None:
        self._server = server
        self._frame = frame
        self._echo = echo
        self._samples: Sequence[Sample] = ()
        self._begun: set[int] = set()
        self._writers: dict[int, CompletionLogprobWriter] = {}

    def begin(self, samples: Sequence[Sample]) -> None:
        self._samples = samples
        tokenizer = self._server.manager.inputs.tokenizer
        for sample in samples:
            options = sample.prompt.options
            if options.logprobs is not None and tokenizer is not None:
                skip = options.sampling.skip_special_tokens
                self._writers[sample.index] = CompletionLogprobWriter(
                    tokenizer,
                    options.logprobs,
                    skip_special_tokens=skip,
                    prompt_is_text=isinstance(sample.prompt.content, str),
                )

    def events(self, sample: Sample, out: TextOut) -> bytes:
        frame = self._frame
        shows_tokens = frame.return_token_ids or sample.index in self._writers
        if not out.text and out.finish is None and not (shows_tokens and out.token_ids):
            return b""  # the text of these tokens is not certain yet
        choice = self._choice(sample, out, is_first=sample.index not in self._begun)
        self._begun.add(sample.index)
        usage = frame.chunk_usage(self._samples)
        return event(Completion(frame.id, "text_completion", frame.created, frame.model, [choice], usage))

    def last_events(self) -> bytes:
        frame = self._frame
        data = b""
        extension = frame.extension(self._samples)
        if extension is not UNSET:
            usage = frame.chunk_usage(self._samples)
            data = event(Completion(frame.id, "text_completion", frame.created, frame.model, [], usage, extension))
        if frame.ends_with_usage:
            usage = usage_of(self._samples)
            data += event(Completion(frame.id, "text_completion", frame.created, frame.model, [], usage))
        return data

    def full_response(self) -> Any:
        frame = self._frame
        choices = [self._choice(sample, sample.collected, is_first=True) for sample in self._samples]
        usage = usage_of(self._samples)
        extension = frame.extension(self._samples)
        return Completion(frame.id, "text_completion", frame.created, frame.model, choices, usage, extension)

    def _choice(self, sample: Sample, out: TextOut, *, is_first: bool) -> CompletionChoice:
        name = finish_name(sample)
        ids = self._frame.ids(out.token_ids)
        prompt_ids = self._frame.ids(sample.prompt_ids) if is_first and self._frame.return_token_ids else UNSET
        matched = UNSET if name is None else matched_stop(sample)
        echoes = is_first and self._echo
        echoed, echoed_ids = (self._prompt_text(sample), sample.prompt_ids) if echoes else ("", [])
        writer = self._writers.get(sample.index)
        logprobs = None if writer is None else writer.write(out, echoed_ids, echoed)
        return CompletionChoice(sample.index, echoed + out.text, logprobs, name, matched, ids, prompt_ids)

    def _prompt_text(self, sample: Sample) -> str:
        """The prompt as the client sent it, or the text of its token ids."""
        content, tokenizer = sample.prompt.content, self._server.manager.inputs.tokenizer
        if isinstance(content, str):
            return content
        assert tokenizer is not None
        skip = sample.prompt.options.sampling.skip_special_tokens
        return tokenizer.decode(sample.prompt_ids, skip_special_tokens=skip)

"""What each kind of server is asked and how its answer is read: one class for SGLang's dialect, one for OpenAI's."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from .http_client import HttpClient, HttpError, Response
from .workloads import Request

_EMPTY = msgspec.Raw(b'""')
_DONE = b"[DONE]"
_MOST_ERROR_CHARS = 500


@dataclass(slots=True)
class Output:
    """What became of one request. Times are `time.perf_counter()` seconds."""

    start_s: float = 0.0
    """Just before the request is written (and its connection made, where there is none to take)."""
    end_s: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """Of every chunk that brought tokens; empty when the answer was not streamed."""
    counts: list[int] = field(default_factory=list)
    """Tokens each chunk brought, where the server tells; else empty."""
    texts: list[str] = field(default_factory=list)
    """Text by chunk, or the whole in one."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    """Why it failed; None: it did not."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def latency_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Wish:
    """What all requests of a run ask for."""

    model: str = "default"
    stream: bool = True
    ignore_eos: bool = True
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the body; `sampling_params` is merged, everything else replaces."""
    incremental: bool = False
    """The native server streams what is new instead of all there is so far."""


class RequestFailed(Exception):
    """The server said so, or its answer makes no sense; the message is for a person."""


class Usage(msgspec.Struct):
    class Details(msgspec.Struct):
        cached_tokens: int | None = None

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None


C = TypeVar("C", bound=msgspec.Struct)


class Dialect(ABC, Generic[C]):
    """How one kind of request is written and its answer read."""

    path: str
    ids_allowed = True
    """Whether prompts may be token ids."""

    def __init__(self, wish: Wish, chunk: type[C]) -> None:
        self.wish = wish
        self._decoder = msgspec.json.Decoder(chunk)

    @abstractmethod
    def body(self, request: Request) -> dict[str, Any]:
        """Of a request, without the user's extra fields."""

    @abstractmethod
    def take(self, chunk: C, output: Output, now: float | None) -> bool:
        """Takes one event, or with `now` None a whole answer; True: it was the last. Raises RequestFailed."""

    def encode(self, request: Request) -> bytes:
        body = self.body(request)
        for name, value in self.wish.extra.items():
            both_objects = isinstance(value, dict) and isinstance(body.get(name), dict)
            body[name] = {**body[name], **value} if both_objects else value
        return msgspec.json.encode(body)

    async def send(self, client: HttpClient, body: bytes) -> Output:
        """Runs one request. Failures are in the result, not raised."""
        output = Output(start_s=time.perf_counter())
        try:
            if self.wish.stream:
                await self._stream(client, body, output)
            else:
                _check_status(answer := await client.request("POST", self.path, body))
                output.end_s = time.perf_counter()
                self._take_json(answer.body, output, None)
            if not output.completion_tokens and not output.text:
                raise RequestFailed("the answer has no token")
        except (HttpError, RequestFailed) as error:
            output.error = str(error)
        if output.end_s == 0.0:
            output.end_s = time.perf_counter()
        return output

    async def _stream(self, client: HttpClient, body: bytes, output: Output) -> None:
        events = EventSplitter()
        ended = False  # by the dialect's last event or [DONE], whichever comes first

        def on_data(data: bytes, now: float) -> None:
            nonlocal ended
            for event in events.feed(data):
                if event == _DONE:
                    ended = True
                else:
                    ended |= self._take_json(event, output, now)
                    output.end_s = now

        _check_status(await client.stream(self.path, body, on_data))
        if not ended:
            raise RequestFailed("the stream ended before the answer was complete")

    def _take_json(self, data: bytes, output: Output, now: float | None) -> bool:
        try:
            chunk = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestFailed(f"cannot read {_shorten(data.decode(errors='replace'))}: {error}") from error
        return self.take(chunk, output, now)


class _NativeMeta(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: dict[str, Any] | str | None = None


class NativeChunk(msgspec.Struct):
    text: msgspec.Raw = _EMPTY
    meta_info: _NativeMeta | None = None
    error: Any = None


class Native(Dialect[NativeChunk]):
    """SGLang's /generate, of Tercet and SGLang."""

    path = "/generate"

    def __init__(self, wish: Wish) -> None:
        super().__init__(wish, NativeChunk)

    def body(self, request: Request) -> dict[str, Any]:
        sampling = {
            "temperature": self.wish.temperature,
            "max_new_tokens": request.output_len,
            "ignore_eos": self.wish.ignore_eos,
        }
        field_name = "text" if isinstance(request.prompt, str) else "input_ids"
        return {field_name: request.prompt, "sampling_params": sampling, "stream": self.wish.stream}

    def take(self, chunk: NativeChunk, output: Output, now: float | None) -> bool:
        if chunk.error is not None or chunk.meta_info is None:
            raise RequestFailed(message_of(chunk.error) or "an event without meta_info")
        meta = chunk.meta_info
        finish = meta.finish_reason
        if isinstance(finish, dict) and finish.get("type") == "abort":
            raise RequestFailed(f"aborted: {finish.get('message')}")
        new = (meta.completion_tokens or 0) - (output.completion_tokens or 0)
        if now is not None and new > 0:
            output.arrivals.append(now)
            output.counts.append(new)
        output.prompt_tokens = meta.prompt_tokens
        output.completion_tokens = meta.completion_tokens
        output.cached_tokens = meta.cached_tokens
        if self.wish.incremental or finish is not None:  # where text is all there is so far, only the last is read
            output.texts.append(msgspec.json.decode(chunk.text, type=str))
        return finish is not None


class OpenAIText(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class OpenAIChoice(msgspec.Struct):
    text: str | None = None
    delta: OpenAIText | None = None
    message: OpenAIText | None = None
    finish_reason: str | None = None


class OpenAIChunk(msgspec.Struct):
    choices: list[OpenAIChoice] = []
    usage: Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None


class Completions(Dialect[OpenAIChunk]):
    """OpenAI's /v1/completions, with the extras that SGLang and vLLM take."""

    path = "/v1/completions"

    def __init__(self, wish: Wish) -> None:
        super().__init__(wish, OpenAIChunk)

    def body(self, request: Request) -> dict[str, Any]:
        return {"prompt": request.prompt, "max_tokens": request.output_len, **self._common()}

    def _common(self) -> dict[str, Any]:
        common = {
            "model": self.wish.model,
            "temperature": self.wish.temperature,
            "stream": self.wish.stream,
            "ignore_eos": self.wish.ignore_eos,
        }
        if self.wish.stream:
            common["stream_options"] = {"include_usage": True}
        return common

    def take(self, chunk: OpenAIChunk, output: Output, now: float | None) -> bool:
        if chunk.error is not None or chunk.object == "error":
            raise RequestFailed(message_of(chunk.error) or chunk.message or "the server failed")
        if chunk.usage is not None:  # in a chunk of its own, in the last with text, or in each: the last counts
            usage = chunk.usage
            output.prompt_tokens = usage.prompt_tokens
            output.completion_tokens = usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                output.cached_tokens = usage.prompt_tokens_details.cached_tokens
        finished = False
        for choice in chunk.choices:
            if choice.finish_reason in ("abort", "error"):
                raise RequestFailed(f"the server ended the answer with finish_reason {choice.finish_reason!r}")
            finished |= choice.finish_reason is not None
            text = self._text(choice)
            if now is not None and self._brings_token(choice, text, output):
                output.arrivals.append(now)
                output.texts.append(text)
            elif text:
                output.texts.append(text)
        return finished

    def _text(self, choice: OpenAIChoice) -> str:
        return choice.text or ""

    def _brings_token(self, choice: OpenAIChoice, text: str, output: Output) -> bool:
        """A token may have no text of its own; a finish alone is no token, unless there was none before."""
        return bool(text) or choice.finish_reason is None or not output.arrivals


class Chat(Completions):
    """OpenAI's /v1/chat/completions: every prompt is one user's message."""

    path = "/v1/chat/completions"
    ids_allowed = False

    def body(self, request: Request) -> dict[str, Any]:
        messages = [{"role": "user", "content": request.prompt}]
        return {"messages": messages, "max_completion_tokens": request.output_len, **self._common()}

    def _text(self, choice: OpenAIChoice) -> str:
        said = choice.delta or choice.message
        return "" if said is None else (said.reasoning_content or said.reasoning or "") + (said.content or "")

    def _brings_token(self, choice: OpenAIChoice, text: str, output: Output) -> bool:
        """The first chunk only names the role, before there is a token."""
        return bool(text) or (choice.finish_reason is not None and not output.arrivals)


@dataclass(frozen=True)
class Backend:
    """A kind of server."""

    dialect: type[Native] | type[Completions]
    default_port: int
    flush_path: str
    """POSTed to, it forgets cached prefixes."""


_SGLANG_FLUSH = "/flush_cache?timeout=30"
_VLLM_FLUSH = "/reset_prefix_cache"
BACKENDS = {
    "tercet": Backend(Native, 30000, _SGLANG_FLUSH),
    "sglang": Backend(Native, 30000, _SGLANG_FLUSH),
    "sglang-oai": Backend(Completions, 30000, _SGLANG_FLUSH),
    "sglang-oai-chat": Backend(Chat, 30000, _SGLANG_FLUSH),
    "vllm": Backend(Completions, 8000, _VLLM_FLUSH),
    "vllm-chat": Backend(Chat, 8000, _VLLM_FLUSH),
}


class EventSplitter:
    """Server-sent events out of pieces of a body; only their data."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that this piece completes."""
        lines = (self._rest + piece).split(b"\n") if self._rest else piece.split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif self._data and line in (b"", b"\r"):
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
        return events


def _check_status(response: Response) -> None:
    """Raises RequestFailed for anything but 200."""
    if response.status != 200:
        raise RequestFailed(f"{response.status} {response.reason}: {error_text(response.body)}")


def error_text(body: bytes) -> str:
    """What a failed answer says, as far as it can be read."""
    try:
        return message_of(json.loads(body)) or _shorten(body.decode())
    except ValueError:
        return _shorten(body.decode(errors="replace"))


def message_of(error: Any) -> str | None:
    """The message in an error of any dialect: a text, or an object with `message`, `detail` or `error`."""
    while isinstance(error, dict):
        error = error.get("message") or error.get("error") or error.get("detail")
    return None if error is None else _shorten(error if isinstance(error, str) else json.dumps(error))


def _shorten(text: str) -> str:
    return text if len(text) <= _MOST_ERROR_CHARS else text[:_MOST_ERROR_CHARS] + "..."

"""Writes requests to a server and reads its responses, in SGLang's native API or in OpenAI's."""

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
_MAX_ERROR_CHARS = 500


@dataclass(slots=True)
class Output:
    """The outcome of one request. Times are in seconds, as `time.perf_counter()` gives them."""

    start_s: float = 0.0
    """Time just before the request is written, and before a new connection is made for it, if one is needed."""
    end_s: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """Arrival time of each chunk that has tokens; empty for a response that is not streamed."""
    counts: list[int] = field(default_factory=list)
    """Number of tokens in each chunk; empty if the server does not send it."""
    texts: list[str] = field(default_factory=list)
    """Text of each chunk, or the complete text as one item."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    """Error message; None for a request that succeeded."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def latency_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class RequestSettings:
    """The settings that all requests of a run share."""

    model: str = "default"
    stream: bool = True
    ignore_eos: bool = True
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the body. An object is merged into an existing object; other values replace existing ones."""
    incremental: bool = False
    """Whether a stream of the native API has only the new text, not all text so far."""


class RequestFailed(Exception):
    """The server reported an error or sent an invalid response. The message is shown to the user."""


class Usage(msgspec.Struct):
    class Details(msgspec.Struct):
        cached_tokens: int | None = None

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None


C = TypeVar("C", bound=msgspec.Struct)


class Dialect(ABC, Generic[C]):
    """Writes the requests of one API and reads its responses."""

    path: str
    ids_allowed = True
    """Whether prompts may be token ids."""

    def __init__(self, settings: RequestSettings, chunk: type[C]) -> None:
        self.settings = settings
        self._decoder = msgspec.json.Decoder(chunk)

    @abstractmethod
    def body(self, request: Request) -> dict[str, Any]:
        """The body of a request, without the user's extra fields."""

    @abstractmethod
    def read_event(self, chunk: C, output: Output, now: float | None) -> bool:
        """Reads one event of a stream, or a complete response if `now` is None, into `output`.

        Returns whether it was the last event. Raises RequestFailed.
        """

    def encode(self, request: Request) -> bytes:
        body = self.body(request)
        for name, value in self.settings.extra.items():
            are_objects = isinstance(value, dict) and isinstance(body.get(name), dict)
            body[name] = {**body[name], **value} if are_objects else value
        return msgspec.json.encode(body)

    async def send(self, client: HttpClient, body: bytes) -> Output:
        """Runs one request. A failure is noted in the result, not raised."""
        output = Output(start_s=time.perf_counter())
        try:
            if self.settings.stream:
                await self._stream(client, body, output)
            else:
                _check_status(answer := await client.request("POST", self.path, body))
                output.end_s = time.perf_counter()
                self._read_json(answer.body, output, None)
            if not output.completion_tokens and not output.text:
                raise RequestFailed("the answer has no token")
        except (HttpError, RequestFailed) as error:
            output.error = str(error)
        if output.end_s == 0.0:
            output.end_s = time.perf_counter()
        return output

    async def _stream(self, client: HttpClient, body: bytes, output: Output) -> None:
        events = EventSplitter()
        ended = False  # set at the API's last event or at [DONE], whichever comes first

        def on_data(data: bytes, now: float) -> None:
            nonlocal ended
            for event in events.feed(data):
                if event == _DONE:
                    ended = True
                else:
                    ended |= self._read_json(event, output, now)
                    output.end_s = now

        _check_status(await client.stream(self.path, body, on_data))
        if not ended:
            raise RequestFailed("the stream ended before the answer was complete")

    def _read_json(self, data: bytes, output: Output, now: float | None) -> bool:
        try:
            return self.read_event(self._decoder.decode(data), output, now)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestFailed(f"cannot read {_shorten(data.decode(errors='replace'))}: {error}") from error


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
    """SGLang's native API, /generate, which Tercet serves, too."""

    path = "/generate"

    def __init__(self, settings: RequestSettings) -> None:
        super().__init__(settings, NativeChunk)

    def body(self, request: Request) -> dict[str, Any]:
        sampling = {
            "temperature": self.settings.temperature,
            "max_new_tokens": request.output_len,
            "ignore_eos": self.settings.ignore_eos,
        }
        field_name = "text" if isinstance(request.prompt, str) else "input_ids"
        return {field_name: request.prompt, "sampling_params": sampling, "stream": self.settings.stream}

    def read_event(self, chunk: NativeChunk, output: Output, now: float | None) -> bool:
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
        # Cumulative text is decoded only once, from the last event.
        if self.settings.incremental or finish is not None:
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
    """OpenAI's /v1/completions, with the extra fields of SGLang and vLLM."""

    path = "/v1/completions"

    def __init__(self, settings: RequestSettings) -> None:
        super().__init__(settings, OpenAIChunk)

    def body(self, request: Request) -> dict[str, Any]:
        return {"prompt": request.prompt, "max_tokens": request.output_len, **self._common()}

    def _common(self) -> dict[str, Any]:
        common = {
            "model": self.settings.model,
            "temperature": self.settings.temperature,
            "stream": self.settings.stream,
            "ignore_eos": self.settings.ignore_eos,
        }
        if self.settings.stream:
            common["stream_options"] = {"include_usage": True}
        return common

    def read_event(self, chunk: OpenAIChunk, output: Output, now: float | None) -> bool:
        if chunk.error is not None or chunk.object == "error":
            raise RequestFailed(message_of(chunk.error) or chunk.message or "the server failed")
        # Servers send usage in a separate chunk, in the last chunk with text, or in every chunk. The last one counts.
        if chunk.usage is not None:
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
        """Whether a chunk has a token.

        A chunk without text has one, because a token may have no text. A chunk with only a finish reason has none,
        unless no token came before it.
        """
        return bool(text) or choice.finish_reason is None or not output.arrivals


class Chat(Completions):
    """OpenAI's /v1/chat/completions. Each prompt is sent as one message of the user."""

    path = "/v1/chat/completions"
    ids_allowed = False

    def body(self, request: Request) -> dict[str, Any]:
        messages = [{"role": "user", "content": request.prompt}]
        return {"messages": messages, "max_completion_tokens": request.output_len, **self._common()}

    def _text(self, choice: OpenAIChoice) -> str:
        said = choice.delta or choice.message
        return "" if said is None else (said.reasoning_content or said.reasoning or "") + (said.content or "")

    def _brings_token(self, choice: OpenAIChoice, text: str, output: Output) -> bool:
        """Whether a chunk has a token. The first chunk names only the role and has none."""
        return bool(text) or (choice.finish_reason is not None and not output.arrivals)


@dataclass(frozen=True)
class Backend:
    """One kind of server: its API, its default port, and how to empty its prefix cache."""

    dialect: type[Native] | type[Completions]
    default_port: int
    flush_path: str
    """A POST to this path empties the prefix cache."""


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
    """Splits the pieces of a streamed body into the data of server-sent events."""

    def __init__(self) -> None:
        self._partial_line = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Adds a piece of the body. Returns the data of each event that it completes."""
        lines = (self._partial_line + piece).split(b"\n") if self._partial_line else piece.split(b"\n")
        self._partial_line = lines.pop()
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
    """The error message in a failed response, or the start of its text."""
    try:
        return message_of(json.loads(body)) or _shorten(body.decode())
    except (ValueError, RecursionError):
        return _shorten(body.decode(errors="replace"))


def message_of(error: Any) -> str | None:
    """The message in an error of any API: a string, or an object with `message`, `detail` or `error`."""
    while isinstance(error, dict):
        error = error.get("message") or error.get("error") or error.get("detail")
    return None if error is None else _shorten(error if isinstance(error, str) else json.dumps(error))


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + "..."

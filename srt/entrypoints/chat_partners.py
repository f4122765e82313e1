"""The two chat partners of `tercet chat`: a server over HTTP, and an Engine in this process."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias
from urllib.parse import SplitResult, urlsplit

from ..settings.checks import check_api_key
from .engine import Engine
from .wire import shown

ChatMessage: TypeAlias = dict[str, str]
"""`role` and `content`"""

_CONNECT_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 600.0
_PROBE_TIMEOUT_S = 1.0
_DONE = b"[DONE]"


class ChatError(Exception):
    """The partner gave no answer. The message says why, and is shown to the user."""


@dataclass(frozen=True)
class ChatOptions:
    """Sampling options of a chat. None keeps the default of the model or the server."""

    temperature: float | None = None
    max_tokens: int | None = None


class ChatPartner(Protocol):
    name: str
    """The name that the screen shows."""

    def answer(self, messages: Sequence[ChatMessage], options: ChatOptions) -> Generator[str, None, None]:
        """Yields the answer in pieces, as they come. Closing the generator aborts the answer.

        Raises ChatError or a TercetError.
        """
        ...

    def close(self) -> None: ...


class EngineChat:
    """Chats with a model in an Engine of this process."""

    def __init__(self, model_path: str, name: str) -> None:
        self.name = name
        self._engine = Engine(model_path)
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None, "an Engine has a tokenizer unless it is told not to"
        self._tokenizer = tokenizer

    def answer(self, messages: Sequence[ChatMessage], options: ChatOptions) -> Generator[str, None, None]:
        prompt = self._tokenizer.apply_chat_template(messages)
        sampling: dict[str, Any] = {"max_new_tokens": options.max_tokens}
        if options.temperature is not None:
            sampling["temperature"] = options.temperature
        ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        with closing(self._engine.generate(None, sampling, input_ids=ids, stream=True)) as answers:
            num_shown = 0
            for answer in answers:
                text: str = answer["text"]
                yield text[num_shown:]
                num_shown = len(text)

    def close(self) -> None:
        self._engine.shutdown()


class ServerChat:
    """Chats with any server of OpenAI's chat completions API, Tercet or another."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        model: str | None = None,
        *,
        connect_timeout_s: float = _CONNECT_TIMEOUT_S,
    ) -> None:
        """Asks the server for its models. `model`: the name of one, or of a LoRA adapter; None: the first one.

        Raises ValueError for an invalid URL or key, ChatError when no server answers or it has no such model.
        """
        self._url = url = _parsed(base_url)
        self._path = url.path.rstrip("/").removesuffix("/v1")
        self._base_url = base_url
        self._headers: dict[str, str | bytes] = {}
        if api_key is not None:
            check_api_key(api_key)
            self._headers["Authorization"] = f"Bearer {api_key}".encode()  # http.client would write Latin-1
        self._connect_timeout_s = connect_timeout_s
        with closing(self._request("GET", "/v1/models")) as response:
            models = _json(_read(response))
        try:
            names = [str(one["id"]) for one in models["data"]]
            first = names[0]
        except (KeyError, IndexError, TypeError):
            raise ChatError(f"{base_url} lists no model") from None
        self._model = model or first
        if self._model not in names:
            raise ChatError(f"{base_url} has no model {self._model!r}, only {', '.join(names)}")
        self.name = f"{self._model} at {base_url}"

    def answer(self, messages: Sequence[ChatMessage], options: ChatOptions) -> Generator[str, None, None]:
        body: dict[str, Any] = {"model": self._model, "messages": list(messages), "stream": True}
        if options.temperature is not None:
            body["temperature"] = options.temperature
        if options.max_tokens is not None:
            body["max_tokens"] = options.max_tokens
        with closing(self._request("POST", "/v1/chat/completions", body)) as response:
            for line in _lines(response):
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == _DONE:
                    return
                yield _text_of(data)
        raise ChatError("the stream ended before the answer was complete")

    def close(self) -> None:
        pass  # there is no open connection: each answer has its own

    def _request(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """A response of status 200, which owns its connection. Raises ChatError for any other status."""
        assert self._url.hostname is not None
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.hostname, self._url.port, timeout=self._connect_timeout_s)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.connect()
            connection.sock.settimeout(_ANSWER_TIMEOUT_S if body is not None else self._connect_timeout_s)
            # Without keep-alive, closing the response closes the socket, so the server sees the disconnect.
            headers = {**self._headers, "Content-Type": "application/json", "Connection": "close"}
            connection.request(method, self._path + path, data, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            reason = getattr(error, "strerror", None) or error
            raise ChatError(f"{self._base_url} does not answer: {reason}") from error
        if response.status != 200:
            with closing(response):
                raise ChatError(_message_of(_json(_read(response)), f"{self._base_url} answered {response.status}"))
        return response


def find_server(base_url: str, api_key: str | None) -> ServerChat | None:
    """The server at this address, or None when nobody listens there. Raises ChatError for a server that fails."""
    try:
        return ServerChat(base_url, api_key, connect_timeout_s=_PROBE_TIMEOUT_S)
    except ChatError as error:
        if isinstance(error.__cause__, ConnectionRefusedError):
            return None
        raise


def _parsed(base_url: str) -> SplitResult:
    with suppress(ValueError, http.client.InvalidURL):
        url = urlsplit(base_url)
        is_path = url.path.isascii() and url.path.isprintable() and " " not in url.path
        unused = url.username or url.password or url.query or url.fragment  # no request would have them
        if url.scheme in ("http", "https") and url.hostname and is_path and not unused:
            url.hostname.encode("idna")  # as the look-up of the name does
            http.client.HTTPConnection(url.hostname, url.port)  # checks both, and does not connect yet
            return url
    raise ValueError(f"--base-url must be like http://127.0.0.1:30000, got {base_url!r}")


def _read(response: http.client.HTTPResponse) -> bytes:
    """The body, as far as it came."""
    try:
        return response.read()
    except http.client.IncompleteRead as error:
        return error.partial


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The lines of the body. A body that is cut ends after its last whole line."""
    while True:
        try:
            line = response.readline()
        except http.client.IncompleteRead:
            return
        if not line:
            return
        yield line


def _json(data: bytes) -> Any:
    """The JSON value, or None if the data is no JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _text_of(data: bytes) -> str:
    """The new text in an event of a stream. Raises ChatError for an error, and for data of another kind."""
    event = _json(data)
    try:
        if event.get("error") is not None:
            raise ChatError(_message_of(event, "the server failed"))
        deltas = [choice.get("delta") or {} for choice in event.get("choices") or ()]
        return "".join(delta.get("content") or "" for delta in deltas)
    except (AttributeError, TypeError):
        raise ChatError(f"the server sent an event that is no part of a chat: {shown(data)}") from None


def _message_of(body: Any, otherwise: str) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else otherwise

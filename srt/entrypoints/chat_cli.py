"""`tercet chat`: a conversation in the terminal, or one question in each line of a pipe."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from .. import env, log
from ..errors import TercetError
from ..model_files.default_model import DEFAULT_MODEL_NAME, require_default_model
from .chat_partners import ChatError, ChatMessage, ChatOptions, ChatPartner, EngineChat, ServerChat, find_server

_DEFAULT_BASE_URL = "http://127.0.0.1:30000"
_HELP = "/reset starts a new conversation, /exit or Ctrl-D ends the program, Ctrl-C stops an answer"
# A server's text must not control the terminal, so all control characters except tab and line feed are removed.
_CONTROL_CHARACTERS = {code: None for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


def chat(
    *,
    model: str | None,
    base_url: str | None,
    api_key: str | None,
    system: str | None,
    temperature: float | None,
    max_tokens: int | None,
) -> int:
    """Runs a chat until the user leaves or the input ends, and returns the exit code.

    The code is 1 when neither a server nor a model is found, or when a question from a pipe got no answer.
    """
    log.configure("chat", "warning")
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # bytes and characters outside its encoding must not end the chat
            stream.reconfigure(errors="replace")
    try:
        if temperature is not None and not 0 <= temperature < math.inf:
            raise ValueError(f"--temperature must be a finite number of at least 0, got {temperature}")
        if max_tokens is not None and max_tokens < 1:  # the API allows 0: then all answers are empty
            raise ValueError(f"--max-tokens must be at least 1, got {max_tokens}")
        partner = choose_partner(model, base_url, (api_key or env.api_key() or "").strip() or None)
    except (ChatError, TercetError, ValueError, OSError) as error:
        sys.stderr.write(f"tercet chat: {_plain(str(error))}\n")
        return 1
    conversation = Conversation(partner, system, ChatOptions(temperature, max_tokens), sys.stdout)
    try:
        if sys.stdin.isatty():
            return _interactive(conversation)
        return _piped(conversation, sys.stdin)
    except BrokenPipeError:  # the reader of our stdout is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        partner.close()


def choose_partner(model: str | None, base_url: str | None, api_key: str | None) -> ChatPartner:
    """The chat partner: the given model, the given server, a server at the default port, or the default model.

    The first that exists, in this order. With `base_url`, `model` is the name of one of the server's models. Raises
    ValueError, OSError, ChatError or a TercetError.
    """
    if model is not None and base_url is None:
        return EngineChat(model, os.path.basename(model.rstrip("/")))
    named = env.base_url() if base_url is None else base_url
    if named is not None:
        return ServerChat(named, api_key, model)
    server = find_server(_DEFAULT_BASE_URL, api_key)
    return server or EngineChat(str(require_default_model()), DEFAULT_MODEL_NAME)


class Conversation:
    """The messages of a chat, and its next question."""

    def __init__(self, partner: ChatPartner, system: str | None, options: ChatOptions, out: TextIO) -> None:
        self.partner = partner
        self._system = system
        self._options = options
        self._out = out
        self.messages: list[ChatMessage] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def ask(self, question: str) -> None:
        """Asks a question and writes the answer as it comes.

        Ctrl-C stops the answer; the shown part stays in the conversation. A question that fails is removed from the
        conversation, and raises ChatError or a TercetError.
        """
        self.messages.append({"role": "user", "content": question})
        shown = ""
        try:
            with contextlib.closing(self.partner.answer(self.messages, self._options)) as pieces:
                for piece in pieces:
                    shown += piece
                    self._write(_plain(piece))
        except KeyboardInterrupt:
            self._write(" [stopped]")
        except BaseException:
            self.messages.pop()
            raise
        finally:
            self._write("\n")
        if shown:
            self.messages.append({"role": "assistant", "content": shown})
        else:
            self.messages.pop()

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _interactive(conversation: Conversation) -> int:
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # where available, it gives input() line editing and a history
    sys.stdout.write(f"{_plain(conversation.partner.name)}\n{_HELP}\n")
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return 0
        except KeyboardInterrupt:
            sys.stdout.write(f"\n{_HELP}\n")
            continue
        if question == "/exit":
            return 0
        if question == "/reset":
            conversation.reset()
        elif question.startswith("/") and " " not in question:
            sys.stdout.write(f"{_HELP}\n")
        elif question:
            _try(conversation, question)


def _piped(conversation: Conversation, questions: Iterator[str]) -> int:
    all_answered = True
    for line in questions:
        question = line.strip()
        if question == "/exit":
            break
        if question == "/reset":
            conversation.reset()
        elif question:
            all_answered &= _try(conversation, question)
    return 0 if all_answered else 1


def _try(conversation: Conversation, question: str) -> bool:
    try:
        conversation.ask(question)
    except (ChatError, TercetError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        sys.stderr.write(f"tercet chat: {_plain(str(error))}\n")
        return False
    return True


def _plain(text: str) -> str:
    """The text without control characters."""
    return text.translate(_CONTROL_CHARACTERS)

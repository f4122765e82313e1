"""The server from its start to its end: signals, deaths, ports. Real processes, made-up tokens."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from patience import PATIENCE_S
from toy_engine import (
    FAKE_SERVER,
    ServerProcess,
    Stream,
    environment,
    is_gone,
    text_of,
    toy_flags,
    write_toy_config,
)

pytestmark = pytest.mark.timeout(300)

TOKENS = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 400}}


@pytest.fixture
def run_dirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r")


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    return [*toy_flags(tmp_path), "--port", "0"]


def _assert_nothing_left(run_dirs: Path, pids: list[int]) -> None:
    assert all(is_gone(pid) for pid in pids)
    assert os.listdir(run_dirs) == []


def _is_ready(url: str) -> bool:
    """Waits for a server whose log is not read."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready").is_success:
                return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_without_restarts_a_killed_child_ends_streams_with_errors_and_then_the_server(
    run_dirs: Path, flags: list[str], role: str
) -> None:
    with ServerProcess(run_dirs, [*flags, "--engine-restarts", "0"]) as server:
        server.ready()
        children = server.children
        streams = [Stream(server, "/generate", TOKENS) for _ in range(16)]
        assert all(stream.begun.wait(PATIENCE_S) for stream in streams)
        os.kill(children[role], signal.SIGKILL)
        for stream in streams:
            assert stream.wait().status == 200 and stream.error is None
            assert stream.data[-1] == "[DONE]"
            assert "signal 9" in json.loads(stream.data[-2])["error"]["message"]
        with server.client() as client:
            assert client.get("/health").status_code == 503
            refused = client.post("/generate", json=TOKENS)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_dead"
        assert server.exit_code() == 1
        _assert_nothing_left(run_dirs, [*children.values()])
        assert f"the {role} process died (signal 9)" in server.log
        assert "Traceback" not in server.log


def test_a_folder_that_cannot_have_profiles_ends_the_start(run_dirs: Path, flags: list[str], tmp_path: Path) -> None:
    file, new = tmp_path / "file", tmp_path / "new" / "folder"
    file.touch()
    for folder, reason in ((file, "File exists"), (file / "below", "Not a directory"), (Path("/proc"), "No such file")):
        with ServerProcess(run_dirs, [*flags, "--profile-dir", str(folder)]) as server:
            assert server.exit_code() == 1
            assert f"Cannot start: --profile-dir {folder} is no folder for new files: {reason}" in server.log
    with ServerProcess(run_dirs, [*flags, "--profile-dir", str(new)]) as server:
        server.ready()
        assert os.listdir(new) == []


@pytest.mark.parametrize("flag", ["--update-weights-dir", "--lora-dir"])
def test_a_folder_for_loads_must_exist_at_the_start(
    run_dirs: Path, flags: list[str], tmp_path: Path, flag: str
) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, tmp_path / "absent"):
        with ServerProcess(run_dirs, [*flags, "--enable-lora", flag, str(folder)]) as server:
            assert server.exit_code() == 1
            assert f"Cannot start: {flag} must be a folder that exists, got {folder}" in server.log


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones(
    run_dirs: Path, flags: list[str], signum: signal.Signals
) -> None:
    """So does SIGHUP, which the server gets when its terminal is closed."""
    with ServerProcess(run_dirs, flags) as server, server.ready().client() as client:
        children = server.children
        stream = Stream(server, "/generate", {**TOKENS, "sampling_params": {"max_new_tokens": 100}})
        assert client.get("/health").status_code == 200
        assert stream.begun.wait(PATIENCE_S)
        server.signal(signum)
        assert server.logged("Shutting down; waiting for 1 requests")
        assert client.get("/health").status_code == 503
        refused = client.post("/generate", json=TOKENS)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        stream.wait()
        last = json.loads(stream.data[-2])
        assert last["text"] == text_of(100)
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 100}
        assert server.exit_code() == 0
        _assert_nothing_left(run_dirs, [*children.values()])


def test_sigterm_to_every_process_at_once_drains_too(run_dirs: Path, flags: list[str]) -> None:
    """As systemd sends it to a service, unless it is told otherwise. It may add a SIGHUP, which is no second signal."""
    with ServerProcess(run_dirs, flags) as server:
        children = server.ready().children
        stream = Stream(server, "/generate", {**TOKENS, "sampling_params": {"max_new_tokens": 100}})
        assert stream.begun.wait(PATIENCE_S)
        for signum in (signal.SIGTERM, signal.SIGHUP):
            for pid in (*children.values(), server.pid):
                os.kill(pid, signum)
        stream.wait()
        assert json.loads(stream.data[-2])["text"] == text_of(100)
        assert server.exit_code() == 0
        _assert_nothing_left(run_dirs, [*children.values()])


def test_nohup_keeps_a_server_running(run_dirs: Path, flags: list[str]) -> None:
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the server inherits it
    try:
        server = ServerProcess(run_dirs, flags)
    finally:
        signal.signal(signal.SIGHUP, handler)
    with server, server.ready().client() as client:
        server.signal(signal.SIGHUP)
        assert client.post("/generate", json={**TOKENS, "sampling_params": {"max_new_tokens": 30}}).is_success
        assert client.get("/ready").is_success
        server.signal(signal.SIGINT)
        assert server.exit_code() == 0


def test_a_second_signal_ends_running_requests_at_once(run_dirs: Path, flags: list[str]) -> None:
    with ServerProcess(run_dirs, flags) as server:
        stream = Stream(server.ready(), "/generate", TOKENS)
        assert stream.begun.wait(PATIENCE_S)
        server.signal(signal.SIGINT)
        assert server.logged("Shutting down")
        server.signal(signal.SIGINT)
        stream.wait()
        assert "error" in json.loads(stream.data[-2])
        assert server.exit_code() == 0
        _assert_nothing_left(run_dirs, [])


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_while_it_starts_it_answers_503_and_a_signal_ends_it_at_once(
    run_dirs: Path, flags: list[str], signum: signal.Signals
) -> None:
    port = _free_port()
    with ServerProcess(run_dirs, [*flags, "--port", str(port)], FAKE_CHILD="slow start") as server:
        answer = _first_answer(f"http://127.0.0.1:{port}/health")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "starting"
        while len(psutil.Process(server.pid).children()) < 2:
            time.sleep(0.01)
        pids = [child.pid for child in psutil.Process(server.pid).children()]
        server.signal(signum)
        assert server.exit_code() == 128 + signum
        _assert_nothing_left(run_dirs, pids)


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [("user error", "the weights are of the wrong kind"), ("exit", "died while it started (exit code 7)")],
)
def test_a_failed_start_is_one_clear_line(run_dirs: Path, flags: list[str], behaviour: str, message: str) -> None:
    with ServerProcess(run_dirs, flags, FAKE_CHILD=behaviour) as server:
        assert server.exit_code() == 1
    assert len(server.lines) == 1 and message in server.log
    _assert_nothing_left(run_dirs, [])


def test_a_model_that_is_not_there_or_not_supported_is_one_clear_line(run_dirs: Path, tmp_path: Path) -> None:
    other = write_toy_config(tmp_path, architectures=["MambaForCausalLM"], model_type="mamba")
    for model, message in ((str(tmp_path / "nothing"), "does not exist"), (str(other), "'MambaForCausalLM' is not")):
        flags = ["--model-path", model, "--load-format", "dummy", "--port", "0"]
        with ServerProcess(run_dirs, flags) as server:
            assert server.exit_code() == 1
        assert len(server.lines) == 1 and message in server.log
    _assert_nothing_left(run_dirs, [])


def test_a_recording_that_cannot_be_written_is_one_clear_line(run_dirs: Path) -> None:
    for path in (run_dirs, run_dirs / "none" / "x.schedule"):
        flags = ["--model-path", "/nowhere", "--port", "0", "--record-schedule", str(path)]
        with ServerProcess(run_dirs, flags) as server:
            assert server.exit_code() == 1
        message = f"--record-schedule must name a file in a folder that exists and can be written, got '{path}'"
        assert message in server.log
    _assert_nothing_left(run_dirs, [])


def test_a_port_in_use_is_one_clear_line_before_any_model(run_dirs: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ServerProcess(run_dirs, ["--model-path", "/nowhere", "--port", str(port)]) as server:
            assert server.exit_code() == 1
    assert len(server.lines) == 1
    assert f"Cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port" in server.log


@pytest.mark.parametrize("host", ["127.0.0..1", "a" * 64])
def test_a_host_that_cannot_be_a_name_is_one_clear_line(run_dirs: Path, host: str) -> None:
    with ServerProcess(run_dirs, ["--model-path", "/nowhere", "--host", host]) as server:
        assert server.exit_code() == 1
    assert len(server.lines) == 1
    assert f"Cannot listen on {host}:30000: this is neither an address nor a host name" in server.log


def test_two_servers_on_one_host_never_meet(run_dirs: Path, flags: list[str]) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(ServerProcess(run_dirs, flags)) for _ in range(2)]
        clients = [stack.enter_context(server.ready().client()) for server in servers]
        assert servers[0].url != servers[1].url
        assert len(os.listdir(run_dirs)) == 2
        stream = Stream(servers[0], "/generate", {**TOKENS, "rid": "same"})
        assert stream.begun.wait(PATIENCE_S)
        assert not clients[1].post("/abort_request", json={"rid": "same"}).json()["aborted"]
        servers[1].signal(signal.SIGTERM)
        assert servers[1].exit_code() == 0
        assert clients[0].get("/health").status_code == 200
        assert clients[0].post("/abort_request", json={"rid": "same"}).json()["aborted"]
        assert json.loads(stream.wait().data[-2])["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_killed_server_leaves_nothing_and_the_port_is_free_at_once(run_dirs: Path, flags: list[str]) -> None:
    port = _free_port()
    with ServerProcess(run_dirs, [*flags, "--port", str(port)]) as server:
        stream = Stream(server.ready(), "/generate", TOKENS)
        assert stream.begun.wait(PATIENCE_S)
        children = server.children
        server.signal(signal.SIGKILL)
        assert isinstance(stream.wait().error, httpx.HTTPError)
        _assert_nothing_left(run_dirs, [*children.values()])
        with ServerProcess(run_dirs, [*flags, "--port", str(port)]) as again, again.ready().client() as client:
            assert client.get("/health").status_code == 200


def test_a_server_without_standard_files_serves_and_ends(run_dirs: Path, flags: list[str]) -> None:
    """A socket that got the number of one of them would end the process when it is closed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", *FAKE_SERVER, *flags]
    with subprocess.Popen([*command, "--port", str(port)], env=environment(run_dirs)) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            assert _is_ready(url)
            body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
            assert httpx.post(f"{url}/generate", json=body).json()["text"] == text_of(2)
            server.terminate()
            assert server.wait(PATIENCE_S) == 0
        finally:
            server.kill()


def test_endless_headers_are_refused(run_dirs: Path, flags: list[str]) -> None:
    with ServerProcess(run_dirs, flags) as server:
        address = server.ready().url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1])), timeout=PATIENCE_S) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")
            received = b""
            try:
                for _ in range(1000):
                    connection.sendall(b"a" * 10_000)
                while piece := connection.recv(1000):
                    received += piece
            except (ConnectionResetError, BrokenPipeError):
                pass  # the rest of what was sent was not read
        assert received == b"" or received.startswith(b"HTTP/1.1 431 ")
        with server.client() as client:
            assert client.get("/health", headers={"X": "a" * 30_000}).status_code == 200


def test_every_process_may_open_as_many_files_as_its_user_may(run_dirs: Path, flags: list[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        server = ServerProcess(run_dirs, flags)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with server:
        for pid in (server.ready().pid, *server.children.values()):
            assert psutil.Process(pid).rlimit(resource.RLIMIT_NOFILE)[0] == wanted


def test_a_server_that_may_open_few_files_does_not_start() -> None:
    serve = [sys.executable, "-m", "tercet", "serve", "--model-path", "/nowhere", "--port", "0"]
    limited = ["sh", "-c", 'ulimit -n 255 && exec "$@"', "sh", *serve]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert (
        "Cannot start: the limit of open files (ulimit -Hn) must be at least 256, got 255" in done.stdout + done.stderr
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _first_answer(url: str) -> httpx.Response:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return httpx.get(url, timeout=PATIENCE_S)
        except httpx.ConnectError:
            assert time.monotonic() < deadline
            time.sleep(0.05)

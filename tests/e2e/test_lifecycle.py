"""The real thing: `tercet serve`, `tercet chat` and `tercet.Engine` on the default model, from start to end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import PATIENCE_S
from toy_engine import REAL_SERVER, ServerProcess, Stream, environment, is_gone, toy_flags

from tercet.srt.model_files.default_model import require_default_model
from tercet.srt.text.tokenizer import load_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FLAGS = ["--port", "0", "--max-total-tokens", "8192"]
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
# Sixteen of them fit the KV pool, and last longer than a test.
LONG = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 450, "ignore_eos": True}}


@pytest.fixture(scope="module")
def run_dirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r")


@pytest.fixture(scope="module")
def server(run_dirs: Path) -> Iterator[ServerProcess]:
    with ServerProcess(run_dirs, FLAGS, module=REAL_SERVER) as server:
        yield server.ready()


def test_the_first_question_of_the_readme(server: ServerProcess) -> None:
    body = {"messages": QUESTION, "max_tokens": 24, "temperature": 0}
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json=body).json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert client.get("/v1/models").json()["data"][0]["id"] == "SmolLM2-135M-Instruct"
        stream = Stream(server, "/v1/chat/completions", body).wait(60)
    assert stream.data.pop() == "[DONE]"
    deltas = [choice["delta"].get("content") or "" for data in stream.data for choice in json.loads(data)["choices"]]
    assert "".join(deltas) == answer["choices"][0]["message"]["content"]


def test_chat_over_a_pipe(server: ServerProcess, run_dirs: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tercet", "chat", "--base-url", server.url, "--temperature", "0", "--max-tokens", "24"],
        input="What is the capital of France?\nAnd of Italy?\n",
        env=environment(run_dirs),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Paris" in ran.stdout and "Rome" in ran.stdout


def test_a_client_that_leaves_frees_what_it_held(server: ServerProcess) -> None:
    with server.client() as client:
        # 16 samples take a while. On a busy machine they may end before the client asks for the state.
        body = {**LONG, "sampling_params": {**LONG["sampling_params"], "n": 16}, "stream": True}
        was_running = False
        deadline = time.monotonic() + PATIENCE_S
        while not was_running and time.monotonic() < deadline:
            with client.stream("POST", "/generate", json=body) as response:
                next(response.iter_lines())
                was_running = _state(client)["num_running"] > 0
        assert was_running
        deadline = time.monotonic() + PATIENCE_S
        while (state := _state(client))["num_running"] or state["num_waiting"] or state["num_private_tokens"]:
            assert time.monotonic() < deadline, state
            time.sleep(0.05)
        assert client.post("/flush_cache").status_code == 200


def test_an_abort_answers_with_the_text_so_far(server: ServerProcess) -> None:
    with server.client() as client, ThreadPoolExecutor() as pool:
        answer = pool.submit(client.post, "/generate", json={**LONG, "rid": "mine"})
        while _state(client)["num_private_tokens"] < 64:
            time.sleep(0.01)
        assert client.post("/abort_request", json={"rid": "mine"}).json() == {"aborted": True}
        sample = answer.result(20).json()
    assert sample["meta_info"]["finish_reason"]["type"] == "abort"
    assert sample["meta_info"]["completion_tokens"] == len(sample["output_ids"]) > 1
    assert sample["text"]


def test_a_prompt_that_is_being_tokenised_is_aborted(server: ServerProcess) -> None:
    """Its text is long enough to be tokenised in a thread, and too long to be served."""
    with server.client() as client, ThreadPoolExecutor() as pool:
        answer = pool.submit(client.post, "/generate", json={"text": "Once upon a time " * 100_000, "rid": "mine"})
        while not client.post("/abort_request", json={"rid": "mine"}).json()["aborted"]:
            assert not answer.done()
        sample = answer.result(20).json()
    assert sample["meta_info"]["finish_reason"]["type"] == "abort"
    assert sample["meta_info"]["prompt_tokens"] == 0


def test_sigterm_to_all_processes_drains(server: ServerProcess, run_dirs: Path) -> None:
    children = server.children
    body = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 32, "ignore_eos": True}}
    stream = Stream(server, "/generate", body)
    assert stream.begun.wait(PATIENCE_S)
    for pid in (*children.values(), server.pid):
        os.kill(pid, signal.SIGTERM)
    assert json.loads(stream.wait().data[-2])["meta_info"]["completion_tokens"] == 32
    assert server.exit_code() == 0
    assert all(is_gone(pid, 0) for pid in children.values())
    assert os.listdir(run_dirs) == []
    assert "Traceback" not in server.log


def test_a_token_that_the_model_has_no_row_for(run_dirs: Path, tmp_path: Path) -> None:
    backend = load_tokenizer(str(require_default_model())).backend
    backend.add_special_tokens(["[PAD]"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    flags = [*FLAGS, "--tokenizer-path", str(tmp_path)]
    with ServerProcess(run_dirs, flags, module=REAL_SERVER) as server, server.ready().client() as client:
        assert "1 tokens that are not in the model's vocabulary ('[PAD]')" in server.log
        neighbour = Stream(server, "/generate", {"text": "Once", "sampling_params": {"max_new_tokens": 64}})
        assert neighbour.begun.wait(PATIENCE_S)
        refused = client.post("/generate", json={"text": "a [PAD] b"})
        assert refused.status_code == 400 and "'[PAD]'" in refused.json()["error"]["message"]
        assert neighbour.wait().data.pop() == "[DONE]"
        assert client.get("/health").status_code == 200


def test_an_engine_that_cannot_record_its_schedule_is_restarted_without(run_dirs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    folder.mkdir()
    flags = [*toy_flags(tmp_path), "--port", "0", "--max-total-tokens", "1024", "--engine-restarts", "1"]
    flags += ["--record-schedule", str(folder / "record")]
    with ServerProcess(run_dirs, flags, module=REAL_SERVER) as server, server.ready().client() as client:
        shutil.rmtree(folder)
        os.kill(server.children["scheduler"], signal.SIGKILL)
        answer = client.post("/generate", json={"input_ids": [1], "sampling_params": {"max_new_tokens": 3}})
        assert len(answer.json()["output_ids"]) == 3
        assert server.logged("The recording of the schedule stops")


def test_without_restarts_a_killed_scheduler_ends_sixteen_streams_with_errors(run_dirs: Path) -> None:
    with ServerProcess(run_dirs, [*FLAGS, "--engine-restarts", "0"], module=REAL_SERVER) as server:
        children = server.ready().children
        streams = [Stream(server, "/generate", LONG) for _ in range(16)]
        assert all(stream.begun.wait(PATIENCE_S) for stream in streams)
        os.kill(children["scheduler"], signal.SIGKILL)
        for stream in streams:
            assert stream.wait().error is None
            assert stream.data[-1] == "[DONE]"
            assert "signal 9" in json.loads(stream.data[-2])["error"]["message"]
        with server.client() as client:
            assert client.get("/health").status_code == 503
        assert server.exit_code() == 1
        assert all(is_gone(pid, 0) for pid in children.values())
        assert os.listdir(run_dirs) == []


# No __main__ guard, as in a notebook.
SCRIPT = """
import os, signal, sys
import tercet
engine = tercet.Engine(sys.argv[1], max_total_tokens=4096, page_size=1)
sampling = {"max_new_tokens": 8, "temperature": 0}
answer = engine.generate("The capital of France is", sampling)
*_, last = engine.generate("The capital of France is", sampling, stream=True)
assert last["text"] == answer["text"] and last["meta_info"]["cached_tokens"] > 0
pids = " ".join(map(str, engine._thread.core.child_pids.values()))
sys.stdout.write(pids + "\\n" + answer["text"])
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_script_that_is_killed_takes_its_engine_along(run_dirs: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(require_default_model())],
        env=environment(run_dirs),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    pids, _, text = ran.stdout.partition("\n")
    assert "Paris" in text
    assert all(is_gone(int(pid)) for pid in pids.split())
    assert os.listdir(run_dirs) == []


def _state(client: object) -> dict[str, int]:
    return client.get("/server_info").json()["internal_states"][0]  # type: ignore[attr-defined, no-any-return]

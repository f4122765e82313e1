"""The real server, whose engine is killed in the middle of streams: every answer is the undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from faulty_child import NUM_TOKENS, POISON
from patience import PATIENCE_S
from toy_engine import ServerProcess, Stream

from tercet.benchmarks.peers.models import make_toy

pytestmark = pytest.mark.e2e

NUM_STREAMS = 64
NUM_ATTEMPTS = 5
"""All streams may have ended before the kill, if this process has waited for a core."""


class Answer(NamedTuple):
    texts: list[str]
    ids: list[list[int]]
    finish: list[Any]
    logprobs: dict[str, list[Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("r")
    flags = ["--port", "0", "--max-total-tokens", "16384", "--engine-restarts", "100", "--incremental-streaming-output"]
    flags += ["--model-path", str(make_toy(folder.parent / "toy.gguf"))]  # 64 streams of the default model take minutes
    cache = str(tmp_path_factory.mktemp("c"))
    with ServerProcess(folder, flags, module=("faulty_server",), XDG_CACHE_HOME=cache) as server:
        yield server.ready()


def bodies() -> list[dict[str, Any]]:
    """Greedy, seeded, penalised and stop-string requests, some with odd bytes; one has two samples."""
    requests = []
    for index in range(NUM_STREAMS):
        sampling: dict[str, Any] = {"max_new_tokens": 40 + index % 16, "ignore_eos": True, "temperature": 0}
        kind = index % 4
        if kind == 1:
            sampling |= {"temperature": 3.0, "sampling_seed": index}
        elif kind == 2:
            sampling |= {"temperature": 1.0, "sampling_seed": index, "frequency_penalty": 0.7, "min_new_tokens": 20}
            sampling |= {"presence_penalty": 0.5, "repetition_penalty": 1.2}
        elif kind == 3:
            sampling |= {"temperature": 1.0, "sampling_seed": index, "no_stop_trim": index > 8}
            sampling |= {"stop": ["impossible text", "xx", "the the"] if index % 8 == 3 else [" the", "qu", "!"]}
        if index % 16 == 12:
            sampling["max_new_tokens"] = 1600  # they have not ended when the engine is killed
        if index == 5:
            sampling["n"] = 2
        body = {"text": f"Once upon a time there were {index} kings", "sampling_params": sampling}
        if index in (4, 6, 7):
            body |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
        requests.append(body)
    return requests


@pytest.fixture(scope="module")
def undisturbed(server: ServerProcess) -> list[Answer]:
    return [answer_of(stream.wait()) for stream in start(server)]


def start(server: ServerProcess) -> list[Stream]:
    return [Stream(server, "/generate", body) for body in bodies()]


def events_of(stream: Stream) -> list[dict[str, Any]]:
    assert stream.error is None and stream.data[-1] == "[DONE]"
    return [json.loads(data) for data in stream.data[:-1]]


def answer_of(stream: Stream) -> Answer:
    answer = Answer(["", ""], [[], []], [None, None], {})
    for event in events_of(stream):
        index = event.get("index", 0)
        answer.texts[index] += event["text"]
        answer.ids[index] += event["output_ids"]
        meta = event["meta_info"]
        assert meta["completion_tokens"] == len(answer.ids[index])
        answer.finish[index] = meta["finish_reason"]
        for name in (key for key in meta if key.endswith("logprobs")):
            answer.logprobs.setdefault(name, []).extend(meta[name])
    return answer


def recoveries(streams: Sequence[Stream]) -> int:
    return sum(events_of(stream)[-1]["meta_info"]["num_recoveries"] for stream in streams)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("roles", [["scheduler"], ["detokenizer"], ["scheduler", "scheduler"]], ids=str)
def test_streams_go_on_after_a_kill(server: ServerProcess, undisturbed: list[Answer], roles: list[str]) -> None:
    for _ in range(NUM_ATTEMPTS):
        streams = start(server)
        whole = Stream(server, "/generate", {**bodies()[0]}, streamed=False)
        assert all(stream.begun.wait(PATIENCE_S) for stream in streams)
        for role in roles:
            num_restarts = server.log.count("The engine runs again")
            os.kill(server.children[role], signal.SIGKILL)
            while server.log.count("The engine runs again") == num_restarts:
                time.sleep(0.01)
        assert [answer_of(stream.wait()) for stream in streams] == undisturbed
        whole.wait()
        answer = json.loads(whole.data[0])
        assert (answer["text"], answer["output_ids"]) == (undisturbed[0].texts[0], undisturbed[0].ids[0])
        if recoveries(streams):
            break
    assert recoveries(streams) > 0
    with server.client() as client:
        info = client.get("/server_info").json()
    assert info["num_engine_restarts"] >= len(roles) and info["num_fatal_samples"] == 0
    assert info["num_resumed_samples"] >= recoveries(streams)
    state = info["internal_states"][0]
    assert state["num_running"] == state["num_waiting"] == state["num_kv_repairs"] == 0


@pytest.mark.timeout(300)
def test_a_request_that_kills_the_engine_fails_alone(server: ServerProcess, undisturbed: list[Answer]) -> None:
    with server.client() as client:
        before = client.get("/server_info").json()
    poison = {"input_ids": [POISON] * 8, "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}
    streams = start(server)
    culprit = Stream(server, "/generate", poison)
    assert [answer_of(stream.wait()) for stream in streams] == undisturbed
    *events, error = events_of(culprit.wait())
    # The last tokens may still be in the socket of the process that dies.
    assert 0 < sum(len(event["output_ids"]) for event in events) <= NUM_TOKENS
    assert error["error"]["code"] == "fatal_request" and "died twice" in error["error"]["message"]
    with server.client() as client:
        after = client.get("/server_info").json()
    assert after["num_engine_restarts"] - before["num_engine_restarts"] == 2
    assert after["num_fatal_samples"] == 1
    path = Path(server.log.rpartition("Wrote a report about this to ")[2].splitlines()[0])
    report = json.loads(path.read_text())
    assert "exit code 70" in report["death"] and report["fatal_step_is_known"] and report["last_steps"]
    assert any(one["in_fatal_step"] and one["prompt_tokens"] == 8 for one in report["requests"])
    assert "Once upon" not in path.read_text() and "great man" not in path.read_text()

"""A real server that is paused in the middle of streams: their tokens are those of an undisturbed run."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from toy_engine import REAL_SERVER, ServerProcess, Stream

pytestmark = pytest.mark.e2e

FLAGS = ["--port", "0", "--max-total-tokens", "8192", "--incremental-streaming-output"]


def bodies() -> list[dict[str, Any]]:
    """Greedy and seeded requests, long enough to be still running when the pause comes."""
    requests = []
    for index in range(3):
        sampling: dict[str, Any] = {"max_new_tokens": 48 + index, "ignore_eos": True, "temperature": 0}
        if index % 2:
            sampling |= {"temperature": 1.0, "sampling_seed": index, "frequency_penalty": 0.5}
        requests.append({"text": f"There were {index} kings", "sampling_params": sampling})
    return requests


def start(server: ServerProcess) -> list[Stream]:
    streams = [Stream(server, "/generate", body) for body in bodies()]
    assert all(stream.begun.wait(60) for stream in streams)
    return streams


def ids_of(stream: Stream) -> list[int]:
    assert stream.error is None and stream.data[-1] == "[DONE]"
    return [token for data in stream.data[:-1] for token in json.loads(data)["output_ids"]]


@pytest.mark.timeout(300)
def test_streams_go_on_after_a_pause(tmp_path: Any) -> None:
    """A request may have ended before the pause comes, so counts are compared with those of the pause."""
    with ServerProcess(tmp_path, FLAGS, module=REAL_SERVER) as server, server.ready().client() as client:

        def load() -> dict[str, Any]:
            return client.get("/v1/loads").json()["loads"][0]

        undisturbed = [ids_of(stream.wait(120)) for stream in start(server)]
        for mode in ("in_place", "retract"):
            streams = start(server)
            assert client.post("/pause_generation", json={"mode": mode}).json()["status"] == "ok"
            paused = load()
            assert paused["is_paused"] and (mode == "in_place" or paused["num_running_reqs"] == 0)
            assert client.post("/flush_cache").status_code == (400 if paused["num_running_reqs"] else 200)
            new = Stream(server, "/generate", bodies()[0], streamed=False)
            while load()["num_total_reqs"] <= paused["num_total_reqs"]:
                time.sleep(0.01)
            while not all(": paused" in stream.comments or stream.ended for stream in streams):
                time.sleep(0.01)
            client.post("/continue_generation", json={}).raise_for_status()
            assert [ids_of(stream.wait(120)) for stream in streams] == undisturbed
            assert json.loads(new.wait(120).data[0])["output_ids"] == undisturbed[0]
        streams = start(server)
        client.post("/pause_generation").raise_for_status()
        for stream, expected in zip(streams, undisturbed, strict=True):
            found = ids_of(stream.wait(60))
            assert found == expected[: len(found)]
        assert client.get("/health").json() == {"status": "paused"}

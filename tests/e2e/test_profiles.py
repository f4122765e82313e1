"""Profiles of a real engine: its traces have the steps and the operations, also after a restart."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from toy_engine import REAL_SERVER, ServerProcess

pytestmark = pytest.mark.e2e

FLAGS = ["--port", "0", "--max-total-tokens", "2048"]
BODY = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 6, "temperature": 0}}


def names_in(path: Path) -> list[str]:
    with gzip.open(path) as file:
        return [event["name"] for event in json.load(file)["traceEvents"]]


def test_a_trace_of_a_real_engine(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    server = ServerProcess(tmp_path, [*FLAGS, "--profile-dir", str(folder)], module=REAL_SERVER)
    with server, server.ready().client() as client:

        def post(path: str, body: Any = None) -> Any:
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        expected = post("/generate", BODY)["output_ids"]
        trace = folder / post("/start_profile", {"num_steps": 3})["trace"]
        assert post("/generate", BODY)["output_ids"] == expected
        names = names_in(trace)  # the trace of 3 steps is complete before the 4th begins
        assert [name for name in names if name.startswith("launch")][1:] == [
            "launch step 2: decode of 1 requests",
            "launch step 3: decode of 1 requests",
        ]
        assert any(name.startswith(("tercet_cpu::", "aten::")) for name in names)
        post("/start_profile")
        os.kill(server.children["scheduler"], signal.SIGKILL)
        assert post("/generate", BODY)["output_ids"] == expected
        assert client.post("/stop_profile").status_code == 400
        again = folder / post("/start_profile", {"output_dir": "again"})["trace"]
        assert post("/generate", BODY)["output_ids"] == expected
        assert folder / post("/stop_profile")["trace"] == again
        assert any(name.startswith("launch step 6: decode") for name in names_in(again))
    assert sorted(path.name for path in folder.iterdir()) == sorted([trace.name, "again"])

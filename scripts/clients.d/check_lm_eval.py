# requires: lm_eval[api,hf]==0.4.13 torch==2.13.0 pytest==9.2.0
"""lm-eval's `local-completions` on a small task of this folder: log likelihoods and generation.

Its log likelihoods are also compared with those of lm-eval's `hf` backend, which computes with transformers.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

ITEMS, TOLERANCE = 100, 1e-4
START_TIMEOUT_S = 300
PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"

MODEL_ARGS = {
    "model": os.environ["TERCET_MODEL"],
    "base_url": os.environ["TERCET_URL"] + "/v1/completions",
    "tokenizer_backend": "remote",
    "tokenized_requests": False,
    "num_concurrent": 2,
    "max_retries": 1,
}
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima"}


def task(folder: Path, **given: Any) -> dict[str, Any]:
    rows = [{"country": country, "capital": capital} for country, capital in CAPITALS.items()]
    data = folder / "capitals.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "task": "capitals",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "The capital of {{country}} is",
        **given,
    }


def evaluate(given: dict[str, Any]) -> dict[str, Any]:
    done = lm_eval.simple_evaluate(
        model="local-completions", model_args=MODEL_ARGS, tasks=[given], task_manager=TaskManager(), bootstrap_iters=0
    )
    return done["results"]["capitals"]


def test_multiple_choice_by_log_likelihood(tmp_path: Path) -> None:
    choices = list(CAPITALS.values())
    metric = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    result = evaluate(
        task(
            tmp_path,
            output_type="multiple_choice",
            doc_to_choice=choices,
            doc_to_target=f"{{{{{choices}.index(capital)}}}}",
            metric_list=metric,
        )
    )
    assert result["acc,none"] > 0.8, result


def test_generation(tmp_path: Path) -> None:
    result = evaluate(
        task(
            tmp_path,
            output_type="generate_until",
            doc_to_target="{{capital}}",
            generation_kwargs={"until": ["\n", "."], "max_gen_toks": 8, "temperature": 0},
            metric_list=[{"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True}],
        )
    )
    assert result["exact_match,none"] >= 0, result


@contextlib.contextmanager
def server(folder: str) -> Iterator[str]:
    """A server that computes the same weights in float32 as the `hf` backend. Yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [os.environ["TERCET_PYTHON"], "-m", "tercet", "serve", folder, "--port", str(port)]
    command += ["--dtype", "float32", "--served-model-name", "float32"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(command, env=environ) as process:
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not is_ready(f"http://127.0.0.1:{port}/ready"):
                assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def items() -> list[Instance]:
    """Lines of a page, each cut in two: how likely is the second half after the first?"""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if 40 <= len(line) <= 125]
    halves = [line.partition(" ") if i % 2 else line.rpartition(" ") for i, line in enumerate(lines[:ITEMS])]
    assert len(halves) == ITEMS
    return [
        Instance("loglikelihood", {}, (first, space + second), i) for i, (first, space, second) in enumerate(halves)
    ]


def test_log_likelihoods_are_those_of_transformers() -> None:
    folder = os.environ["TERCET_TOKENIZER"]
    expected = get_model("hf")(pretrained=folder, dtype="float32", device="cpu", batch_size=4).loglikelihood(items())
    with server(folder) as url:
        ours = get_model("local-completions")(
            model="float32", base_url=f"{url}/v1/completions", tokenizer=folder, num_concurrent=4, max_retries=1
        ).loglikelihood(items())
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in expected], rel=0, abs=TOLERANCE)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in expected]

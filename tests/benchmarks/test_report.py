"""The table and the JSON line: labels that other tools look for, nothing made up."""

from __future__ import annotations

import io
import json
import math
import sys
from typing import Any

import pytest
from bench_tokenizers import bytes_only

from tercet.benchmarks.backends import Output
from tercet.benchmarks.metrics import measure
from tercet.benchmarks.report import json_line, show, table
from tercet.benchmarks.workloads import Request

LABELS = [
    "Backend:",
    "Traffic request rate:",
    "Max request concurrency:",
    "Successful requests:",
    "Benchmark duration (s):",
    "Total input tokens:",
    "Total input text tokens:",
    "Total generated tokens:",
    "Total generated tokens (retokenized):",
    "Request throughput (req/s):",
    "Input token throughput (tok/s):",
    "Output token throughput (tok/s):",
    "Peak output token throughput (tok/s):",
    "Peak concurrent requests:",
    "Total token throughput (tok/s):",
    "Concurrency:",
    *(f"{kind} {name} (ms):" for name in ("E2E Latency", "TTFT", "TPOT", "ITL") for kind in ("Mean", "Median", "P99")),
    *(f"{kind} {name} (ms):" for name in ("E2E Latency", "TTFT", "TPOT", "ITL") for kind in ("P90", "P95")),
    "Max ITL (ms):",
]
"""As SGLang's client prints them."""


def result(*outputs: Output, stream: bool = True, **more: Any) -> dict[str, Any]:
    figures = measure([Request("abc", 3, 2)] * len(outputs), outputs, 2.0, bytes_only(), more.pop("slos", None)).figures
    settings = {
        "backend": "vllm",
        "request_rate": math.inf,
        "max_concurrency": None,
        "stream": stream,
        "ignore_eos": True,
        "interrupted": False,
    }
    return {**settings, **figures, **more}


def good(counts: list[int] | None = None, **told: int) -> Output:
    return Output(0.0, 2.0, [0.5, 2.0], counts or [1, 1], ["a", "b"], **{"completion_tokens": 2, **told})


def rows(text: str) -> dict[str, str]:
    pairs = (line.rsplit(None, 1) for line in text.splitlines() if ":" in line)
    return {label.strip(): value for label, value in pairs}


def test_every_label_is_there() -> None:
    shown = table(result(good()))
    found = rows(shown)
    assert set(LABELS) - found.keys() == {"Max request concurrency:"}
    assert "Max request concurrency:                 not set" in shown
    assert found["Traffic request rate:"] == "inf" and found["Successful requests:"] == "1"
    assert found["Mean TTFT (ms):"] == "500.00" and found["Median TPOT (ms):"] == "1500.00"
    assert "Failed" not in shown and "Chunk Gap" not in shown and "Goodput" not in shown
    assert all(len(line) <= 60 for line in shown.splitlines())


def test_what_differs_is_told() -> None:
    failed = Output(0.0, 1.0, error="503: full")
    shown = table(result(good(prompt_tokens=9, completion_tokens=1, cached_tokens=2), failed, failed))
    found = rows(shown)
    assert found["Failed requests:"] == "2" and "2 failed: 503: full" in shown
    assert found["Total input tokens:"] == "9" and found["Total input tokens (by this client):"] == "3"
    assert found["Total cached tokens:"] == "2"
    assert found["Answers of unexpected length:"] == "1"


def test_bundled_tokens_show_the_time_between_chunks() -> None:
    found = rows(table(result(good([2, 4], completion_tokens=6))))
    assert found["Tokens per chunk:"] == "3.00"
    assert found["Mean ITL (ms):"] == "375.00" and found["Max Chunk Gap (ms):"] == "1500.00"


def test_what_was_not_measured_is_not_shown() -> None:
    shown = table(result(Output(0.0, 2.0, texts=["ab"]), stream=False))
    assert "TTFT" not in shown and "ITL" not in shown and "Peak output" not in shown
    assert "Mean E2E Latency (ms):" in shown
    assert "The server reported no token counts" in shown and "Without streaming" in shown


def test_nothing_but_failures_is_a_report_too() -> None:
    shown = table(result(Output(0.0, 1.0, error="reset")))
    assert rows(shown)["Successful requests:"] == "0" and "1 failed: reset" in shown and "Latency" not in shown


def test_goodput() -> None:
    found = rows(table(result(good(), slos={"ttft": 600.0, "tpot": 10.5})))
    assert found["Request goodput (req/s):"] == "0.00" and found["SLO attainment (%):"] == "0.00"
    assert found["TTFT SLO attainment (%):"] == "100.00" and found["TPOT SLO attainment (%):"] == "0.00"
    assert found["SLOs (ms):                               ttft:600"] == "tpot:10.5"


def test_characters_that_stdout_does_not_have_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert show("a \u00e9\n") and written.getvalue() == b"a ?\n"


def test_a_line_of_json() -> None:
    line = json_line({"rate": math.inf, "nested": {"a": [1.5, math.nan]}, "text": "é\n", "none": None})
    assert line.endswith("}\n") and line.count("\n") == 1
    assert json.loads(line) == {"rate": "inf", "nested": {"a": [1.5, "nan"]}, "text": "é\n", "none": None}

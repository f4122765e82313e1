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

TABLE = """
============ Serving Benchmark Result ============
Backend:                                 vllm
Traffic request rate:                    inf
Max request concurrency:                 not set
Successful requests:                     1
Benchmark duration (s):                  2.00
Total input tokens:                      3
Total input text tokens:                 3
Total generated tokens:                  2
Total generated tokens (retokenized):    2
Request throughput (req/s):              0.50
Input token throughput (tok/s):          1.50
Output token throughput (tok/s):         1.00
Peak output token throughput (tok/s):    1.00
Peak concurrent requests:                1
Total token throughput (tok/s):          2.50
Concurrency:                             1.00
Tokens per chunk:                        1.00
----------------End-to-End Latency----------------
Mean E2E Latency (ms):                   2000.00
Median E2E Latency (ms):                 2000.00
P90 E2E Latency (ms):                    2000.00
P95 E2E Latency (ms):                    2000.00
P99 E2E Latency (ms):                    2000.00
---------------Time to First Token----------------
Mean TTFT (ms):                          500.00
Median TTFT (ms):                        500.00
P90 TTFT (ms):                           500.00
P95 TTFT (ms):                           500.00
P99 TTFT (ms):                           500.00
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          1500.00
Median TPOT (ms):                        1500.00
P90 TPOT (ms):                           1500.00
P95 TPOT (ms):                           1500.00
P99 TPOT (ms):                           1500.00
---------------Inter-Token Latency----------------
Mean ITL (ms):                           1500.00
Median ITL (ms):                         1500.00
P90 ITL (ms):                            1500.00
P95 ITL (ms):                            1500.00
P99 ITL (ms):                            1500.00
Max ITL (ms):                            1500.00
==================================================
"""
"""With the labels that SGLang's client prints."""


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


def test_the_table_has_the_labels_of_sglang_and_nothing_that_goes_without_saying() -> None:
    assert table(result(good())) == TABLE


def test_what_differs_is_told() -> None:
    failed = Output(0.0, 1.0, error="503: full")
    shown = table(result(good(prompt_tokens=9, completion_tokens=1, cached_tokens=2), failed, failed))
    found = rows(shown)
    assert found["Failed requests:"] == "2" and "2 failed: 503: full" in shown
    assert found["Total input tokens:"] == "9" and found["Total input tokens (by this client):"] == "3"
    assert found["Total cached tokens:"] == "2"
    assert found["Answers of unexpected length:"] == "1"
    may_end_early = table(result(good(completion_tokens=1), ignore_eos=False, max_concurrency=8))
    assert "unexpected length" not in may_end_early and rows(may_end_early)["Max request concurrency:"] == "8"


def test_bundled_tokens_show_the_time_between_chunks() -> None:
    found = rows(table(result(good([1, 2], completion_tokens=3))))
    assert found["Tokens per chunk:"] == "1.50"
    assert found["Mean ITL (ms):"] == "750.00" and found["Max Chunk Gap (ms):"] == "1500.00"


def test_what_was_not_measured_is_not_shown() -> None:
    shown = table(result(Output(0.0, 2.0, texts=["ab"]), stream=False))
    assert "TTFT" not in shown and "ITL" not in shown and "Peak output" not in shown
    assert "Mean E2E Latency (ms):" in shown
    assert "The server reported no token counts" in shown and "Without streaming" in shown


def test_nothing_but_failures_is_a_report_too() -> None:
    shown = table(result(Output(0.0, 1.0, error="reset")))
    assert rows(shown)["Successful requests:"] == "0" and "1 failed: reset" in shown
    assert "Latency" not in shown and "token counts" not in shown and "Tokens per chunk" not in shown


def test_goodput() -> None:
    slow = Output(0.0, 2.0, [1.0, 2.0], [1, 1], ["a", "b"], completion_tokens=2)
    shown = table(result(good(), slow, slos={"ttft": 600.0, "tpot": 1500.5}))
    assert (
        """
---------------------Goodput----------------------
SLOs (ms):                               ttft:600 tpot:1500.5
Request goodput (req/s):                 0.50
SLO attainment (%):                      50.00
TTFT SLO attainment (%):                 50.00
TPOT SLO attainment (%):                 100.00
-"""
        in shown
    )


def test_characters_that_stdout_does_not_have_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert show("a \u00e9\n") and written.getvalue() == b"a ?\n"


def test_a_line_of_json() -> None:
    line = json_line({"rate": math.inf, "nested": {"a": [1.5, math.nan]}, "text": "é\n", "none": None})
    assert line.endswith("}\n") and line.count("\n") == 1 and "é" in line
    assert json.loads(line) == {"rate": "inf", "nested": {"a": [1.5, "nan"]}, "text": "é\n", "none": None}

"""The report of a serving run: a table and one line of JSON.

The table has the labels of SGLang's benchmark, because tools parse them.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from .metrics import PERCENTILES

_WIDTH = 50
_LABEL_WIDTH = 40
_SECTIONS = {
    "End-to-End Latency": ("E2E Latency", "e2e_latency"),
    "Time to First Token": ("TTFT", "ttft"),
    "Time per Output Token (excl. 1st token)": ("TPOT", "tpot"),
    "Inter-Token Latency": ("ITL", "itl"),
    "Time between Chunks": ("Chunk Gap", "chunk_gap"),
}


def table(result: Mapping[str, Any]) -> str:
    """The table of a run. `result`: the values of the JSON line. Missing values are left out."""
    return "\n".join(_lines(result)) + "\n"


def json_line(result: Mapping[str, Any]) -> str:
    """The result as one line of valid JSON. Infinite numbers are written as strings."""
    return json.dumps(_finite(result), ensure_ascii=False, allow_nan=False) + "\n"


def show(text: str) -> bool:
    """Writes a part of a result to stdout. Returns whether that was possible.

    If it was not, as on a full disk or without a reader, stderr says so, and later text goes nowhere. So the files of a
    result are written all the same. Characters outside of the encoding of stdout are replaced.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        sys.stderr.write(f"the result cannot be shown: {error.strerror}\n")
        # Python would write what is left in the buffer at its end, and fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return False
    return True


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield _rule(" Serving Benchmark Result ", "=")
    yield _row("Backend:", result["backend"])
    yield _row("Traffic request rate:", result["request_rate"])
    yield _row("Max request concurrency:", _or_not_set(result["max_concurrency"]))
    yield _row("Successful requests:", result["completed"])
    if result["failed"]:
        yield _row("Failed requests:", result["failed"])
    yield _row("Benchmark duration (s):", result["duration"])
    yield _row("Total input tokens:", result["total_input_tokens"])
    yield _row("Total input text tokens:", result["total_input_text_tokens"])
    if result["total_input_tokens"] != result["total_input_tokens_by_client"]:
        yield _row("Total input tokens (by this client):", result["total_input_tokens_by_client"])
    if result["total_cached_tokens"] is not None:
        yield _row("Total cached tokens:", result["total_cached_tokens"])
    yield _row("Total generated tokens:", result["total_output_tokens"])
    yield _row("Total generated tokens (retokenized):", result["total_output_tokens_retokenized"])
    if result["ignore_eos"] and result["completed_with_other_length"]:
        yield _row("Answers of unexpected length:", result["completed_with_other_length"])
    yield _row("Request throughput (req/s):", result["request_throughput"])
    yield _row("Input token throughput (tok/s):", result["input_throughput"])
    yield _row("Output token throughput (tok/s):", result["output_throughput"])
    if result["max_output_tokens_per_s"] is not None:
        yield _row("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    yield _row("Peak concurrent requests:", result["max_concurrent_requests"])
    yield _row("Total token throughput (tok/s):", result["total_throughput"])
    yield _row("Concurrency:", result["concurrency"])
    if result["tokens_per_chunk"] is not None:
        yield _row("Tokens per chunk:", result["tokens_per_chunk"])
    if "request_goodput" in result:
        yield from _goodput(result)
    for title, (label, name) in _SECTIONS.items():
        if result[f"mean_{name}_ms"] is None:
            continue
        if name == "chunk_gap" and result["tokens_per_chunk"] <= 1:
            continue  # the same as the inter-token latency
        yield _rule(title, "-")
        keys = ["Mean", "Median", *(f"P{percentile}" for percentile in PERCENTILES)]
        for key in [*keys, "Max"] if name in ("itl", "chunk_gap") else keys:
            yield _row(f"{key} {label} (ms):", result[f"{key.lower()}_{name}_ms"])
    yield "=" * _WIDTH
    if result["completed"] and not result["output_tokens_told_by_server"]:
        yield "The server reported no token counts; generated tokens are counted in the retokenized text."
    if result["interrupted"]:
        ended = result["completed"] + result["failed"]
        yield f"Interrupted: the figures cover the {ended} of {result['num_prompts']} requests that had ended."
    if not result["stream"]:
        yield "Without streaming, only end-to-end latency is measured."
    for message, count in result["errors_by_message"].items():
        yield f"{count} failed: {message}"


def _goodput(result: Mapping[str, Any]) -> Iterator[str]:
    yield _rule("Goodput", "-")
    yield _row("SLOs (ms):", " ".join(f"{name}:{limit:g}" for name, limit in result["goodput_slos_ms"].items()))
    yield _row("Request goodput (req/s):", result["request_goodput"])
    yield _row("SLO attainment (%):", result["slo_attainment"] * 100)
    for name, share in result["slo_attainment_by_metric"].items():
        yield _row(f"{name.upper()} SLO attainment (%):", share * 100)


def _rule(title: str, char: str) -> str:
    return title.center(_WIDTH, char)


def _row(label: str, value: Any) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<{_LABEL_WIDTH}} {shown:<10}".rstrip()


def _or_not_set(value: Any) -> Any:
    return "not set" if value is None else value


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

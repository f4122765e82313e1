"""Computes the figures of a serving run from its outputs.

Latencies cover only the requests that succeeded. Failures are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..srt.text.tokenizer import Tokenizer
from .backends import Output
from .workloads import Request

PERCENTILES = (90, 95, 99)
SLO_NAMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Timeline:
    """Arrival times of tokens, and start and end times of requests, in seconds after the first request was sent."""

    token_s: np.ndarray
    """Arrival time of each chunk, float64 [chunks], ascending."""
    tokens: np.ndarray
    """Number of tokens in each chunk, int64 [chunks]."""
    starts_s: np.ndarray
    """Start time of each request, float64 [requests], ascending."""
    ends_s: np.ndarray
    """End time of each request, float64 [requests], ascending."""


@dataclass(frozen=True)
class Latencies:
    """Latencies in seconds, with one array for each metric. Metrics that need a stream are empty without one."""

    e2el: np.ndarray
    ttft: np.ndarray
    tpot: np.ndarray
    """(end-to-end latency - TTFT) / (tokens - 1), for requests with at least 2 tokens."""
    itl: np.ndarray
    """Inter-token latency of each token, except those of a request's first chunk; see `token_gaps`."""
    gaps: np.ndarray
    """Time between two consecutive chunks of a request."""


@dataclass(frozen=True)
class Measured:
    """The figures of a run. `figures` has the names and units of the JSON line."""

    figures: dict[str, Any]
    latencies: Latencies
    timeline: Timeline
    output_lens: list[int]
    """Output tokens of each request; 0 for a failed request."""
    itls: list[list[float]]
    """Inter-token latencies of each request in seconds (see `token_gaps`); empty for a failed request."""


def measure(
    requests: Sequence[Request],
    outputs: Sequence[Output],
    duration_s: float,
    tokenizer: Tokenizer,
    slos_ms: Mapping[str, float] | None = None,
) -> Measured:
    """Computes all figures. `duration_s`: seconds from the first request's start to the last response's end."""
    retokenized = [
        len(ids) for ids in tokenizer.encode_batch([output.text for output in outputs], add_special_tokens=False)
    ]
    good = [i for i, output in enumerate(outputs) if output.error is None]
    output_lens = [0] * len(outputs)
    for i in good:
        told = outputs[i].completion_tokens
        output_lens[i] = retokenized[i] if told is None else told
    counts = {i: chunk_counts(outputs[i], output_lens[i], tokenizer) for i in good}
    itls = {i: token_gaps(np.array(outputs[i].arrivals), counts[i]) for i in good}
    latencies = _latencies([(outputs[i], output_lens[i]) for i in good], list(itls.values()))
    timeline = _timeline(outputs, counts)

    inputs = [requests[i].prompt_len if (told := outputs[i].prompt_tokens) is None else told for i in good]
    total_in, total_out = sum(inputs), sum(output_lens)
    cached = [count for i in good if (count := outputs[i].cached_tokens) is not None]
    output_throughput = total_out / duration_s
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outputs) - len(good),
        "errors_by_message": dict(
            Counter(output.error for output in outputs if output.error is not None).most_common()
        ),
        "total_input_tokens": total_in,
        "total_input_text_tokens": total_in,
        "total_input_tokens_by_client": sum(requests[i].prompt_len for i in good),
        "total_output_tokens": total_out,
        "total_output_tokens_retokenized": sum(retokenized[i] for i in good),
        "output_tokens_told_by_server": sum(outputs[i].completion_tokens is not None for i in good),
        "completed_with_other_length": sum(output_lens[i] != requests[i].output_len for i in good),
        "total_cached_tokens": sum(cached) if cached else None,
        "request_throughput": len(good) / duration_s,
        "input_throughput": total_in / duration_s,
        "output_throughput": output_throughput,
        "total_throughput": (total_in + total_out) / duration_s,
        "max_output_tokens_per_s": _peak_throughput(timeline, output_throughput),
        "max_concurrent_requests": _peak_concurrency(timeline),
        "concurrency": float(np.sum(timeline.ends_s) - np.sum(timeline.starts_s)) / duration_s,
        "tokens_per_chunk": float(timeline.tokens.mean()) if timeline.tokens.size else None,
    }
    named = {"e2e_latency": latencies.e2el, "ttft": latencies.ttft, "tpot": latencies.tpot, "itl": latencies.itl}
    for name, values in {**named, "chunk_gap": latencies.gaps}.items():
        figures.update(statistics_ms(name, values))
    if slos_ms:
        figures.update(_goodput([(outputs[i], output_lens[i]) for i in good], len(outputs), slos_ms, duration_s))
    by_request = [itls[i].tolist() if i in itls else [] for i in range(len(outputs))]
    return Measured(figures, latencies, timeline, output_lens, by_request)


def statistics_ms(name: str, values: np.ndarray) -> dict[str, float | None]:
    """`mean_NAME_ms`, `median_NAME_ms` and so on. None if there are no values."""
    keys = ["mean", "median", "std", *(f"p{percentile}" for percentile in PERCENTILES), "max"]
    if not values.size:
        return {f"{key}_{name}_ms": None for key in keys}
    results = [values.mean(), np.median(values), values.std(), *np.percentile(values, PERCENTILES), values.max()]
    return {f"{key}_{name}_ms": float(value) * 1000 for key, value in zip(keys, results, strict=True)}


def chunk_counts(output: Output, output_len: int, tokenizer: Tokenizer) -> np.ndarray:
    """Number of tokens in each chunk of a stream, int64 [chunks]. The sum is `output_len`.

    The server's own counts are used if it sends them. If it sends only the total, each chunk has one token where that
    gives the total. Otherwise the total is split in proportion to the encoded lengths of the chunks' texts.
    """
    chunks = len(output.arrivals)
    if not chunks:
        return np.zeros(0, dtype=np.int64)
    if output.counts:
        return np.array(output.counts, dtype=np.int64)
    if chunks == output_len:
        return np.ones(chunks, dtype=np.int64)
    encoded = tokenizer.encode_batch(output.texts, add_special_tokens=False)
    weights = np.array([max(1, len(ids)) for ids in encoded])
    upto = np.rint(np.cumsum(weights) * (output_len / weights.sum())).astype(np.int64)
    return np.diff(upto, prepend=0)


def token_gaps(arrivals: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Inter-token latencies in seconds, float64 [sum(counts) - counts[0]].

    The tokens of a chunk share the time since the chunk before equally. So the mean does not depend on the number of
    tokens in a chunk. The first chunk's tokens have no latency. Chunks without tokens are ignored.
    """
    held = counts > 0
    gaps = np.diff(arrivals[held])
    shares = counts[held][1:]
    return np.repeat(gaps / shares, shares)


def _latencies(good: Sequence[tuple[Output, int]], itls: Sequence[np.ndarray]) -> Latencies:
    ttft, tpot, gaps = [], [], [np.zeros(0)]
    for output, output_len in good:
        if not output.arrivals:
            continue
        first = output.arrivals[0] - output.start_s
        ttft.append(first)
        if output_len > 1:
            tpot.append((output.latency_s - first) / (output_len - 1))
        gaps.append(np.diff(np.array(output.arrivals)))
    return Latencies(
        e2el=np.array([output.latency_s for output, _ in good]),
        ttft=np.array(ttft),
        tpot=np.array(tpot),
        itl=np.concatenate([np.zeros(0), *itls]),
        gaps=np.concatenate(gaps),
    )


def _timeline(outputs: Sequence[Output], counts: Mapping[int, np.ndarray]) -> Timeline:
    zero = min((output.start_s for output in outputs), default=0.0)
    times = np.array([now - zero for i in counts for now in outputs[i].arrivals])
    tokens = np.concatenate([np.zeros(0, dtype=np.int64), *counts.values()])
    order = np.argsort(times, kind="stable")
    good = [outputs[i] for i in counts]
    return Timeline(
        token_s=times[order],
        tokens=tokens[order],
        starts_s=np.sort(np.array([output.start_s - zero for output in good])),
        ends_s=np.sort(np.array([output.end_s - zero for output in good])),
    )


def _peak_throughput(timeline: Timeline, mean: float) -> float | None:
    """Maximum number of tokens in any second. At least the mean, which is higher in a run of less than a second."""
    if not timeline.token_s.size:
        return None
    before = np.concatenate([[0], np.cumsum(timeline.tokens)])
    upto = np.searchsorted(timeline.token_s, timeline.token_s + 1.0, side="left")
    in_window = before[upto] - before[: timeline.token_s.size]
    return max(float(in_window.max()), mean)


def _peak_concurrency(timeline: Timeline) -> int:
    """Maximum number of concurrent requests. A request that ends when another starts does not overlap with it."""
    if not timeline.starts_s.size:
        return 0
    begun = np.arange(1, timeline.starts_s.size + 1)
    ended = np.searchsorted(timeline.ends_s, timeline.starts_s, side="right")
    return int((begun - ended).max())


def _goodput(
    good: Sequence[tuple[Output, int]], num_sent: int, slos_ms: Mapping[str, float], duration_s: float
) -> dict[str, Any]:
    """Counts the requests that succeeded and met every objective.

    A request without arrivals does not meet objectives for TTFT and TPOT. The TPOT of a single token is 0.
    """
    met = dict.fromkeys(slos_ms, 0)
    all_met = 0
    for output, output_len in good:
        seen = {"e2el": output.latency_s * 1000}
        if output.arrivals:
            first = output.arrivals[0] - output.start_s
            seen["ttft"] = first * 1000
            seen["tpot"] = (output.latency_s - first) / (output_len - 1) * 1000 if output_len > 1 else 0.0
        kept = [name for name, limit in slos_ms.items() if name in seen and seen[name] <= limit]
        for name in kept:
            met[name] += 1
        all_met += len(kept) == len(slos_ms)
    return {
        "goodput_slos_ms": dict(slos_ms),
        "request_goodput": all_met / duration_s,
        "slo_attainment": all_met / num_sent,
        "slo_attainment_by_metric": {name: count / num_sent for name, count in met.items()},
    }

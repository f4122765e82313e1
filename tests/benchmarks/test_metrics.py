"""Figures against sums done by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from bench_tokenizers import bytes_only, merging
from hypothesis import given
from hypothesis import strategies as st

from tercet.benchmarks.backends import Output
from tercet.benchmarks.metrics import Measured, chunk_counts, measure, statistics_ms, token_gaps
from tercet.benchmarks.workloads import Request


def output(
    start: float,
    end: float,
    arrivals: Sequence[float],
    counts: Sequence[int] = (),
    texts: Sequence[str] = (),
    **told: int,
) -> Output:
    return Output(start, end, list(arrivals), list(counts), list(texts), **told)


def run(outputs: Sequence[Output], duration: float, slos: dict[str, float] | None = None, asked: int = 4) -> Measured:
    return measure([Request("x" * 10, 10, asked)] * len(outputs), outputs, duration, bytes_only(), slos)


def two() -> list[Output]:
    """Times of 100 s and on: a clock's zero means nothing."""
    return [
        output(100.0, 104.0, [101.0, 102.0, 104.0], [1, 1, 2], ["abcd"], prompt_tokens=12, completion_tokens=4),
        output(101.0, 103.0, [103.0], [1], ["e"], prompt_tokens=8, completion_tokens=1, cached_tokens=5),
    ]


def test_totals_and_rates() -> None:
    figures = run(two(), 4.0).figures
    expected = {
        "completed": 2,
        "failed": 0,
        "total_input_tokens": 20,
        "total_input_tokens_by_client": 20,
        "total_output_tokens": 5,
        "total_output_tokens_retokenized": 5,
        "output_tokens_told_by_server": 2,
        "completed_with_other_length": 1,
        "total_cached_tokens": 5,
        "request_throughput": 0.5,
        "input_throughput": 5.0,
        "output_throughput": 1.25,
        "total_throughput": 6.25,
        "concurrency": 1.5,
        "max_concurrent_requests": 2,
        "tokens_per_chunk": 1.25,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_latencies() -> None:
    measured = run(two(), 4.0)
    latencies = measured.latencies
    assert latencies.e2el.tolist() == [4.0, 2.0]
    assert latencies.ttft.tolist() == [1.0, 2.0]
    assert latencies.tpot.tolist() == [(4.0 - 1.0) / 3]  # one token has none
    assert latencies.itl.tolist() == [1.0, 1.0, 1.0]  # 101 -> 102, and two tokens share 102 -> 104
    assert latencies.gaps.tolist() == [1.0, 2.0]
    assert measured.itls == [[1.0, 1.0, 1.0], []]
    figures = measured.figures
    assert figures["mean_e2e_latency_ms"] == 3000 and figures["std_e2e_latency_ms"] == 1000
    assert figures["median_ttft_ms"] == 1500 and figures["p90_ttft_ms"] == pytest.approx(1900)
    assert figures["mean_tpot_ms"] == figures["mean_itl_ms"] == 1000
    assert figures["max_itl_ms"] == 1000 and figures["max_chunk_gap_ms"] == 2000


@given(st.integers(-100, 1000).map(float))
def test_times_count_from_the_first_request_that_was_sent(zero: float) -> None:
    early, late = (
        output(zero + start, zero + end, [zero + at for at in arrivals], counts, completion_tokens=sum(counts))
        for start, end, arrivals, counts in ((0, 4, [1, 2, 4], [1, 1, 2]), (1, 3, [3], [5]))
    )
    timeline = run([late, early], 4.0).timeline
    assert timeline.token_s.tolist() == [1, 2, 3, 4] and timeline.tokens.tolist() == [1, 1, 5, 2]
    assert timeline.starts_s.tolist() == [0, 1] and timeline.ends_s.tolist() == [3, 4]


def test_percentiles() -> None:
    figures = statistics_ms("x", np.arange(101) / 1000)
    assert [figures[f"{name}_x_ms"] for name in ("mean", "median", "p90", "p95", "p99", "max")] == pytest.approx(
        [50, 50, 90, 95, 99, 100]
    )
    assert set(statistics_ms("x", np.zeros(0)).values()) == {None}


def test_failures_are_counted_by_message_and_count_nowhere_else() -> None:
    failed = [output(100.0, 190.0, [101.0], [9], error=None) for _ in range(3)]
    for one, message in zip(failed, ("503: full", "reset", "503: full"), strict=True):
        one.error = message
    with_failures = run([failed[0], *two(), *failed[1:]], 4.0)
    figures = with_failures.figures
    assert figures["failed"] == 3 and figures["errors_by_message"] == {"503: full": 2, "reset": 1}
    assert list(figures["errors_by_message"]) == ["503: full", "reset"]
    assert with_failures.output_lens == [0, 4, 1, 0, 0]
    clean = run(two(), 4.0).figures
    assert {**figures, "failed": 0, "errors_by_message": {}} == clean


def test_nothing_but_failures() -> None:
    lost = output(1.0, 2.0, [])
    lost.error = "reset"
    figures = run([lost], 1.0).figures
    assert figures["completed"] == 0 and figures["output_throughput"] == 0
    assert [figures[name] for name in ("mean_ttft_ms", "max_output_tokens_per_s", "tokens_per_chunk")] == [None] * 3
    assert figures["max_concurrent_requests"] == 0


def test_without_usage_text_is_counted() -> None:
    measured = run([output(0.0, 2.0, [1.0, 2.0], texts=["ab", "cde"])], 2.0)
    assert measured.output_lens == [5] and measured.figures["total_output_tokens"] == 5
    assert measured.figures["output_tokens_told_by_server"] == 0 and measured.figures["total_cached_tokens"] is None
    assert measured.figures["total_input_tokens"] == 10  # as this client counts
    assert measured.latencies.itl.tolist() == pytest.approx([1 / 3] * 3)


def test_text_is_counted_without_the_special_tokens_around_it() -> None:
    stream = output(0.0, 3.0, [1.0, 2.0, 3.0], texts=["The quick brown fox", " jumps", "."])
    plain, with_bos = (measure([Request("x", 1, 3)], [stream], 3.0, merging(bos)) for bos in (False, True))
    assert plain.output_lens == with_bos.output_lens
    assert plain.timeline.tokens.tolist() == with_bos.timeline.tokens.tolist()


def test_without_a_stream_there_is_no_first_token() -> None:
    measured = run([output(0.0, 2.0, [], texts=["abcd"], completion_tokens=4)], 2.0, {"e2el": 2500})
    figures = measured.figures
    assert figures["mean_e2e_latency_ms"] == 2000 and figures["output_throughput"] == 2
    assert [figures[f"mean_{name}_ms"] for name in ("ttft", "tpot", "itl", "chunk_gap")] == [None] * 4
    assert figures["slo_attainment"] == 1


def test_the_peak_is_of_any_one_second() -> None:
    arrivals = [10.0, 10.9, 11.1, 11.2, 11.85, 15.0]  # 10.9 to 11.85: four chunks of two, across a whole second
    figures = run([output(9.0, 15.0, arrivals, [2] * 6, completion_tokens=12)], 6.0).figures
    assert figures["max_output_tokens_per_s"] == 8
    short = run([output(9.0, 9.5, [9.25, 9.5], [2, 2], completion_tokens=4)], 0.5).figures
    assert short["max_output_tokens_per_s"] == short["output_throughput"] == 8


def test_one_request_after_the_other_is_not_two_at_once() -> None:
    chain = [output(float(i), float(i + 1), [i + 0.5], [1], completion_tokens=1) for i in range(5)]
    assert run(chain, 5.0).figures["max_concurrent_requests"] == 1
    assert run(chain, 5.0).figures["concurrency"] == pytest.approx(1)


def test_goodput_wants_every_objective_met_and_counts_what_failed() -> None:
    lost = output(100.0, 100.1, [])
    lost.error = "reset"
    figures = run([*two(), lost], 4.0, {"ttft": 1500, "tpot": 1000, "e2el": 2000}).figures
    # The first meets ttft (1000) and tpot (1000); the second tpot (one token: 0) and e2el (2000).
    assert figures["slo_attainment_by_metric"] == pytest.approx({"ttft": 1 / 3, "tpot": 2 / 3, "e2el": 1 / 3})
    assert figures["slo_attainment"] == 0 and figures["request_goodput"] == 0
    figures = run([*two(), lost], 4.0, {"tpot": 1000}).figures
    assert figures["slo_attainment"] == pytest.approx(2 / 3) and figures["request_goodput"] == 0.5
    assert "request_goodput" not in run(two(), 4.0).figures


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=4))
def test_an_objective_is_met_up_to_its_limit(shapes: list[tuple[int, int, int]]) -> None:
    """Each request: quarters of a second to its first token and from there to its end, and its number of tokens."""
    outputs = [
        output(0.0, (first + rest) / 4, [first / 4], [count], completion_tokens=count) for first, rest, count in shapes
    ]
    worst = {
        "ttft": max(first for first, _, _ in shapes) * 250.0,
        "tpot": max(rest * 250.0 / (count - 1) if count > 1 else 0.0 for _, rest, count in shapes),
        "e2el": max(first + rest for first, rest, _ in shapes) * 250.0,
    }
    loosely = {name: limit + 1e-6 for name, limit in worst.items()}
    assert run(outputs, 1.0, loosely).figures["slo_attainment"] == 1
    for name, limit in worst.items():
        figures = run(outputs, 1.0, {**loosely, name: limit - 1e-6}).figures
        assert figures["slo_attainment"] < 1
        assert [key for key, share in figures["slo_attainment_by_metric"].items() if share < 1] == [name]


def test_without_a_stream_no_objective_of_one_is_met() -> None:
    figures = run([output(0.0, 2.0, [], completion_tokens=4)], 2.0, {"ttft": 9e9, "tpot": 9e9, "e2el": 2000}).figures
    assert figures["slo_attainment_by_metric"] == {"ttft": 0, "tpot": 0, "e2el": 1}


def test_tokens_of_chunks_are_told_or_one_each_or_by_their_text() -> None:
    def counts(texts: Sequence[str], total: int, told: Sequence[int] = ()) -> list[int]:
        arrivals = [float(i) for i in range(len(texts))]
        return chunk_counts(output(0, 9, arrivals, told, texts), total, bytes_only()).tolist()

    assert counts(["abc", "d"], 9, told=[3, 6]) == [3, 6]
    assert counts(["abc", "", "d"], 3) == [1, 1, 1]
    assert counts(["abc", "d"], 4) == [3, 1]
    assert counts(["abc", "d"], 8) == [6, 2]
    assert counts(["", "ab", "", ""], 10) == [2, 4, 2, 2]
    assert counts([], 5) == []


@given(st.lists(st.text("ab", max_size=5), min_size=1, max_size=20), st.integers(1, 200))
def test_shared_out_tokens_sum_up(texts: list[str], total: int) -> None:
    counts = chunk_counts(output(0, 9, [float(i) for i in range(len(texts))], (), texts), total, bytes_only())
    assert counts.sum() == total and (counts >= 0).all()


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 5)), min_size=1, max_size=20))
def test_inter_token_latencies_cover_the_time_between_first_and_last_token(chunks: list[tuple[float, int]]) -> None:
    arrivals = np.cumsum([gap for gap, _ in chunks])
    counts = np.array([count for _, count in chunks])
    itl = token_gaps(arrivals, counts)
    held = np.flatnonzero(counts)
    assert itl.size == counts[held[1:]].sum()
    if held.size:
        assert itl.sum() == pytest.approx(arrivals[held[-1]] - arrivals[held[0]], abs=1e-9)

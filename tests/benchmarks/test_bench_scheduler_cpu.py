"""The benchmark of the scheduler's processor time: whose time it counts, and that its command measures every case."""

from __future__ import annotations

import pytest
from bench_models import json_of

from tercet.benchmarks import bench_scheduler_cpu
from tercet.benchmarks.bench_scheduler_cpu import CASES
from tercet.benchmarks.scheduler_cpu import Phase, PhaseTimer

SMALL = ["--num-running", "6", "--num-steps", "30", "--rounds", "2", "--input-len", "8-40", "--output-len", "2-9"]


class Part:
    """Each call takes as many nanoseconds as it says."""

    def __init__(self, clock: list[int]) -> None:
        self._clock = clock

    def outer(self) -> str:
        self._clock[0] += 10
        self.inner()
        self._clock[0] += 1
        return "result"

    def inner(self) -> None:
        self._clock[0] += 500


def test_time_counts_for_the_innermost_phase() -> None:
    clock = [0]
    timer, part = PhaseTimer(lambda: clock[0]), Part(clock)
    timer.wrap(part, ("outer", "missing"), Phase.KV)
    timer.wrap(part, ("inner",), Phase.CACHE)
    timer.enter(Phase.PLAN)
    clock[0] += 3
    assert part.outer() == "result"
    clock[0] += 4
    timer.enter(Phase.OUTSIDE)
    clock[0] += 9
    spent = timer.take()
    assert (spent[Phase.PLAN], spent[Phase.KV], spent[Phase.CACHE], sum(spent)) == (7, 11, 500, 518)
    assert timer.take() == [0] * len(Phase)


def test_the_time_of_the_timer_counts_for_nobody() -> None:
    clock = [0]

    def read() -> int:
        clock[0] += 50
        return clock[0]

    timer = PhaseTimer(read)
    timer.enter(Phase.PLAN)
    clock[0] += 7
    timer.enter(Phase.OUTSIDE)
    assert timer.take()[Phase.PLAN] == 7


def test_every_case_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Each round must have the same schedule, or the command fails."""
    assert bench_scheduler_cpu.main(SMALL) == 0
    found = json_of(capsys)
    for case in CASES:
        phases = found[case]
        for kind in ("decode", "extend"):
            parts = sum(phases[phase.name.lower()][kind]["mean"] for phase in Phase if phase is not Phase.OUTSIDE)
            assert phases["total"][kind]["mean"] == pytest.approx(parts)
            assert all(phases[name][kind]["p50"] > 0 for name in ("plan", "results", "kv", "observe"))
        assert 0 < phases["cache_share"] < 1
    observed = found["observed"]
    assert observed["observability_share"] == observed["observe_share"] + observed["metrics_share"] != 0


@pytest.mark.timeout(60)  # with requests that the scheduler refuses, it would never end
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--cases", "plain,x"], "'x' is none of plain"),
        (["--cost", "x"], "--cost"),
        (["--input-len", "9000"], "allow 9009 tokens, but a request has room for 8192"),
        (["--output-len", "9000"], "allow 9040 tokens, but a request has room for 8192"),
        (["--input-len", "500", "--max-total-tokens", "256"], "allow 509 tokens, but a request has room for 256"),
    ],
)
def test_wrong_flags_are_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_scheduler_cpu.main([*SMALL, *argv])
    assert message in capsys.readouterr().err

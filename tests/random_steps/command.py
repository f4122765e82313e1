"""scripts/steps: many random steps of the scheduler and of the prefix cache, with all checks after each step.

The cases are numbered, and a number always gives the same case. Half of the steps are turns of a whole scheduler
(scheduler_case.py), half are operations of allocator and radix tree against a reference model
(tests/mem_cache/test_radix_machine.py).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import TextIO

from endurance.options import report_file
from random_steps.cases import Case, draw_case
from random_steps.scheduler_case import SchedulerCase

from tercet.benchmarks.argument_types import above_zero, positive

_MAX_FAILURES = 5
_PROGRESS_INTERVAL_S = 10.0
_MAX_SHRINK_RUNS = 400


def scheduler_steps(number: int, seen: Counter[str]) -> int:
    """Runs a case of the scheduler. Returns its turns, and adds to `seen` what is rare and has happened.

    Raises what is wrong, with a note that says how to repeat it."""
    case = draw_case(number)
    run = SchedulerCase(case)
    try:
        run.run()
    except Exception as error:
        error.add_note(f"case {number}, after {run.num_turns} turns; repeat it with: scripts/steps --case {number}")
        raise
    seen.update(run.seen)
    return run.num_turns


def cache_steps(number: int, seen: Counter[str]) -> int:
    """Runs a case of the prefix cache. Returns its steps."""
    from test_radix_machine import PLAY_STEPS, play  # imported here: only scripts/steps has its folder on the path

    play(number)
    return PLAY_STEPS


def shrink(case: Case) -> Case:
    """The case without the happenings that its failure does not need."""
    expected = _failure(case)
    assert expected is not None, "the case does not fail"
    size = max(len(case.happenings) // 2, 1)
    runs_left = _MAX_SHRINK_RUNS
    while runs_left:
        smaller = None
        for start in range(0, len(case.happenings), size):
            candidate = replace(case, happenings=case.happenings[:start] + case.happenings[start + size :])
            runs_left -= 1
            if _failure(candidate) == expected:
                smaller = candidate
                break
            if not runs_left:
                break
        if smaller is not None:
            case = smaller
        elif size == 1:
            break
        else:
            size //= 2
    return case


def _failure(case: Case) -> str | None:
    """The place in the code where the case fails."""
    try:
        SchedulerCase(case).run()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} {last.filename}:{last.lineno}"
    return None


def run(first: int, num_steps: int, time_limit_s: float, progress: TextIO) -> tuple[dict[str, object], list[str]]:
    """Runs cases from number `first` on. Returns the counts, and the tracebacks of what is wrong."""
    began = reported = time.monotonic()
    counts = {"scheduler": 0, "cache": 0}
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    numbers: dict[str, Iterator[int]] = {name: iter(range(first, sys.maxsize)) for name in counts}
    kinds = {"scheduler": scheduler_steps, "cache": cache_steps}
    while sum(counts.values()) < num_steps and len(wrong) < _MAX_FAILURES:
        name = min(counts, key=counts.__getitem__)
        number = next(numbers[name])
        try:
            counts[name] += kinds[name](number, seen)
        except Exception:
            wrong.append(traceback.format_exc())
            progress.write(wrong[-1])
        now = time.monotonic()
        if now - reported > _PROGRESS_INTERVAL_S:
            reported = now
            progress.write(
                f"{sum(counts.values()):,} steps in {now - began:.0f} s, case {number}, {len(wrong)} wrong\n"
            )
            progress.flush()
        if now - began > time_limit_s:
            break
    seconds = round(time.monotonic() - began, 1)
    report = {"steps": sum(counts.values()), **counts, "seconds": seconds, "seen": dict(seen)}
    return report, wrong


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/steps", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=positive, default=1_000_000, help="steps in all (default: %(default)s)")
    parser.add_argument("--first", type=int, help="number of the first case (default: random)")
    parser.add_argument(
        "--time-limit", type=above_zero, default=float("inf"), metavar="S", help="end after so many seconds"
    )
    parser.add_argument("--case", type=int, help="run this case of the scheduler alone, and make it small if it fails")
    parser.add_argument("--cache-case", type=int, help="run this case of the prefix cache alone")
    parser.add_argument("--report", type=report_file, help="write the counts to this JSON file")
    args = parser.parse_args(arguments)
    logging.getLogger("tercet").setLevel(logging.CRITICAL)  # weights that cannot be loaded bring lines
    if args.case is not None:
        return _repeat(args.case)
    if args.cache_case is not None:
        sys.stdout.write(f"passed {cache_steps(args.cache_case, Counter())} steps\n")
        return 0
    first = Random().randrange(1 << 32) if args.first is None else args.first
    sys.stdout.write(f"cases from {first} on\n")
    report, wrong = run(first, args.steps, args.time_limit, sys.stdout)
    if args.report is not None:
        args.report.write_text(json.dumps(report | {"first": first, "wrong": wrong}, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{report}\n{'FAILED' if wrong else 'passed'}\n")
    return 1 if wrong else 0


def _repeat(number: int) -> int:
    case = draw_case(number)
    if _failure(case) is None:
        sys.stdout.write("passed\n")
        return 0
    case = shrink(case)
    sys.stdout.write(f"{case.rig}\n" + "".join(f"{one}\n" for one in case.happenings))
    SchedulerCase(case).run()
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The report of a run: a dictionary for a JSON file, and lines for a person."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from endurance.tally import Tally, Wait

_WRONG_SHOWN = 20


def tally_report(tally: Tally) -> dict[str, Any]:
    return {
        "requests": tally.requests,
        "completed": tally.completed,
        "completed_streams": tally.streams,
        "resumed_streams": tally.resumed.total(),
        "resumed_streams_by_path": dict(+tally.resumed),
        "streams_continued_at_another_server": tally.continued,
        "sent_again_to_another_server": tally.sent_again,
        "left_on_purpose": tally.left,
        "refused": dict(tally.refused.most_common()),
        "lost_streams": dict(tally.lost.most_common()),
    }


def seconds(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"count": 0}
    return {"count": len(values), "median_s": round(statistics.median(values), 3), "longest_s": round(max(values), 3)}


def silence_beyond(wait: Wait, faults: Sequence[tuple[float, float]]) -> float:
    """Seconds of a wait that lie in none of the intervals."""
    left = [(wait.began, wait.ended)]
    for began, ended in faults:
        left = [part for one in left for part in _without(one, began, ended)]
    return sum(end - begin for begin, end in left)


def _without(part: tuple[float, float], began: float, ended: float) -> list[tuple[float, float]]:
    begin, end = part
    if ended <= begin or began >= end:
        return [part]
    return [one for one in ((begin, min(began, end)), (max(ended, begin), end)) if one[0] < one[1]]


def finish(report: dict[str, Any], wrong: Sequence[str], to: Path | None) -> int:
    """Prints the report, and writes it to a file. Returns the exit code: 1 if anything was wrong."""
    report["wrong"] = list(wrong)
    if to is not None:
        to.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    lines = [*_table(report), *(f"WRONG: {one}" for one in wrong[:_WRONG_SHOWN])]
    if len(wrong) > _WRONG_SHOWN:
        lines.append(f"and {len(wrong) - _WRONG_SHOWN} more")
    sys.stdout.write("\n".join(lines) + ("\nFAILED\n" if wrong else "\npassed\n"))
    return 1 if wrong else 0


def _table(value: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, inner in value.items():
        if name == "wrong":
            continue
        if isinstance(inner, dict) and inner:
            lines += [f"{indent}{name}:", *_table(inner, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {json.dumps(inner)}")
    return lines

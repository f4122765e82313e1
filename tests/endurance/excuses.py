"""What the faults of a chaos run may do to clients: which errors each allows, and which allow silence.

An error or a silence that no fault allows is a defect of the server. So no request may fail because a process was
killed or stopped, the disk was full, a clock jumped, or a second server was started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from endurance.faults import Event
from endurance.tally import Failure

FATAL = "fatal_request"
"""The engine died twice while it computed the request."""
REFUSED_AGAIN = "on an equal request"
"""In the message for a later request that equals a fatal one."""
OWN_DEATHS = frozenset(("failed allocation", "hanging step", "short memory"))
"""The engine dies by itself, so its requests are suspects. Two such deaths may convict one."""
_NO_VERDICT = "two grammar workers gave no result"
_NOT_FINITE = "logits for this request are not finite"
_ERRORS = {
    "invalid logits": (_NOT_FINITE,),
    "short memory": (
        "internal error; the server's log has the details",
        "could not create this request",
        "there is too little memory",
        "could not be compiled; the server's log has the details",
        _NO_VERDICT,
    ),
}
"""The errors besides FATAL, by the fault that allows them: parts of messages. The codes differ between APIs."""
_GRAMMAR_FAULTS = frozenset(("kill the grammar worker", "stop the grammar worker"))
"""A grammar is tried again, once. So only two of them may refuse a request."""
_SILENT = frozenset(("stop the HTTP process", "hanging step"))
"""Nobody else could send the comments that show life; and a step may take 10 s before there are comments."""
_DOWN = frozenset(("kill the server", "restart the server"))
"""Nobody answers until the next process is ready. At that one, a stream waits for its next event like a new request."""
_LATER_S = 5.0
"""A fault is over before all that it does is seen."""


def silent_times(events: Sequence[Event]) -> list[tuple[float, float]]:
    """When the faults excuse silence."""
    down = [(event.began, event.ended + _LATER_S) for event in events if event.kind in _DOWN]
    return [(event.began, event.ended) for event in events if event.kind in _SILENT] + down


def faults_during(failure: Failure, events: Sequence[Event]) -> list[Event]:
    """The faults that were active while the request ran."""
    return [
        event
        for event in events
        if not event.skipped and event.began <= failure.ended and event.ended + _LATER_S >= failure.began
    ]


def cause(failure: Failure, events: Sequence[Event]) -> str | None:
    """The kind of fault that allows this error; None if none does."""
    active = faults_during(failure, events)
    code = failure.error.partition(":")[0]
    if code == FATAL:
        if REFUSED_AGAIN in failure.error and not failure.had_begun:
            active = [event for event in events if not event.skipped and event.began <= failure.ended]
        deadly = [event.kind for event in active if event.kind in OWN_DEATHS]
        return deadly[-1] if len(deadly) >= 2 else None
    if _NO_VERDICT in failure.error and not failure.had_begun:
        hits = [event.kind for event in active if event.kind in _GRAMMAR_FAULTS]
        if len(hits) >= 2:
            return hits[-1]
    kinds = (one.kind for one in active if any(part in failure.error for part in _ERRORS.get(one.kind, ())))
    return next(kinds, None)


def unexcused(failures: Sequence[Failure], events: Sequence[Event]) -> list[str]:
    """The failures that no fault allows."""
    wrong = []
    for one in failures:
        if cause(one, events) is None:
            kinds = sorted({event.kind for event in faults_during(one, events)})
            fate = "lost" if one.had_begun else "refused"
            wrong.append(f"{one.name}: {fate}: {one.error[:300]}; no fault allows this: {', '.join(kinds) or 'none'}")
    num_hit = sum(_NOT_FINITE in one.error for one in failures)
    num_done = sum(event.kind == "invalid logits" and not event.skipped for event in events)
    if num_hit > num_done:
        wrong.append(f"{num_hit} requests failed because of invalid logits, and only {num_done} had them")
    return wrong


def by_fault(failures: Sequence[Failure], events: Sequence[Event]) -> dict[str, dict[str, int]]:
    """The number of lost streams and of refused requests, by the fault that allows it."""
    found: dict[str, Counter[str]] = {}
    for one in failures:
        kind = cause(one, events) or "no fault allows it"
        found.setdefault(kind, Counter())["lost" if one.had_begun else "refused"] += 1
    return {kind: dict(counts) for kind, counts in found.items()}

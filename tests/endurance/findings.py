"""What a fuzz run has found, and what is wrong about the answer to a hostile body."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from endurance.answers import Failed, Incomplete, events_of

_EXPLAINED = {503: "queue_full"}
_MISTAKES = frozenset(("invalid_request_error", "permission_error", "request_aborted"))
"""Types of the errors in a stream that the client has caused. Errors of /v1/responses have no type, but a code."""


class Findings:
    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.in_flight: set[bytes] = set()
        """The hostile bodies that have no answer yet."""

    def add(self, what: str, sent: bytes) -> None:
        self.wrong.append(f"{what}; sent: {sent[:1500]!r}{' ...' if len(sent) > 1500 else ''}")


def check(status: int, body: bytes) -> None:
    """Raises Incomplete for an answer that is wrong in form, and Failed for one that must not be."""
    if status == 200 and body.startswith((b"data: ", b"event: ", b":")):
        answer = _error_of_stream(body)
        if answer is None:
            return
        status = _status_of(answer.get("error"))
    else:
        try:
            answer = json.loads(body)
        except ValueError:
            raise Incomplete(f"status {status} with a body that is not JSON: {body[:200]!r}") from None
        if status == 200:
            return
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict) or not error.get("message"):
        raise Incomplete(f"status {status} without a reason")
    if status >= 500 and _EXPLAINED.get(status) != error.get("code"):
        raise Failed(f"status {status}: {error['message']}")


def _error_of_stream(body: bytes) -> dict[str, Any] | None:
    """What has the error that ends a stream; None if it ends normally. Raises Incomplete."""
    events = events_of(body)
    if not events or events[-1] != "[DONE]":
        raise Incomplete(f"the stream ended after {len(events)} events, without [DONE]")
    for event in map(json.loads, events[:-1]):
        if event.get("error") is not None:
            return event
        if event.get("type") == "response.failed":
            return event["response"]
    return None


def _status_of(error: Any) -> int:
    """The status that an error in a stream would have as an answer. Only known mistakes of clients are 4xx."""
    if not isinstance(error, dict) or error.get("type") in _MISTAKES:
        return 400
    return 503 if error.get("code") in _EXPLAINED.values() else 500

"""What a fuzz run has found, and what is wrong about the answer to a hostile body."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from endurance.answers import Failed, Incomplete, events_of

_EXPLAINED = {503: "queue_full"}


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
        events = events_of(body)
        if not events or events[-1] != "[DONE]":
            raise Incomplete(f"the stream ended after {len(events)} events, without [DONE]")
        errors = [json.loads(event).get("error") for event in events[:-1]]
        answer: Any = {"error": next((error for error in errors if error), None)}
        if answer["error"] is None:
            return
        status = 500 if answer["error"].get("type") in ("server_error", "internal_error") else 400
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

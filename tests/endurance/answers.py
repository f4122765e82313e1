"""What an answer says, without what may differ between two answers to one request: names, times, and how it was cut.

The events of a stream are merged into one value, so a stream is equal to another one that was cut into other events.
"""

from __future__ import annotations

import json
from typing import Any

_VOLATILE = frozenset(
    [
        "id",
        "call_id",
        "item_id",
        "rid",
        "created",
        "created_at",
        "completed_at",
        "e2e_latency",
        "cached_tokens",
        "cache_read_input_tokens",
        "input_tokens",  # of /v1/messages, without those; total_tokens of /v1/responses has the others
        "cached_tokens_details",
        "num_recoveries",
        "num_retractions",
        "prompt_tokens_details",
        "input_tokens_details",
        "sequence_number",
        "queue_time",
        "prefill_time",
        "time_to_first_token",
        "first_token_latency",
        "decode_throughput",
    ]
)
_TEXTS = frozenset(("text", "content", "arguments", "reasoning_content", "refusal", "delta"))
_DONE = "[DONE]"
_RESTARTING = b": restarting\n"
_SHOWN = 300
"""The characters of a value that a difference shows: the last ones."""


class Incomplete(Exception):
    """A stream that ended without its last event."""


class Failed(Exception):
    """An answer, or the end of a stream, that is an error. The message is the error's code or type, and its message."""


def whole_answer(status: int, body: bytes) -> Any:
    """What a body says that was not streamed. Raises Failed."""
    try:
        value = json.loads(body)
    except ValueError:
        raise Incomplete(f"status {status} with a body that is not JSON: {body[:200]!r}") from None
    if status != 200:
        raise Failed(_reason(value, status))
    return _stable(value)


def streamed_answer(data: bytes) -> Any:
    """What the events of a complete stream say. Raises Failed and Incomplete."""
    events = events_of(data)
    if not events or events[-1] != _DONE:
        raise Incomplete(f"the stream ended after {len(events)} events, without [DONE]")
    merged: dict[str, Any] = {}
    for text in events[:-1]:
        event = json.loads(text)
        if event.get("error") is not None:
            raise Failed(_reason(event, 200))
        if event.get("type") == "response.failed":
            raise Failed(_reason(event["response"], 200))
        key = str(event.get("type") or event.get("index", ""))
        merged[key] = _merged(merged.get(key), _stable(event))
    return merged


def difference(answer: Any, wanted: Any, place: str = "") -> str:
    """Where two answers differ first, and how."""
    if isinstance(answer, dict) and isinstance(wanted, dict) and answer.keys() == wanted.keys():
        pairs = [(name, answer[name], wanted[name]) for name in answer]
    elif isinstance(answer, list) and isinstance(wanted, list) and len(answer) == len(wanted):
        pairs = [(str(index), *both) for index, both in enumerate(zip(answer, wanted, strict=True))]
    else:
        return f"{place.lstrip('.')} is {str(answer)[-_SHOWN:]!r}, and was {str(wanted)[-_SHOWN:]!r}"
    return next((difference(one, other, f"{place}.{name}") for name, one, other in pairs if one != other), "")


def events_of(data: bytes) -> list[str]:
    """The data of each complete event. Comments are left out."""
    complete = data[: data.rfind(b"\n\n") + 1]
    return [line[6:].decode() for line in complete.split(b"\n") if line.startswith(b"data: ")]


def recoveries(data: bytes) -> int:
    """The restarts that a stream has outlived: what /generate tells, or at least one if the stream was told to wait."""
    events = [json.loads(text) for text in events_of(data) if text != _DONE]
    told = max((event.get("meta_info", {}).get("num_recoveries", 0) for event in events), default=0)
    has_waited = _RESTARTING in data and not any("meta_info" in event for event in events)
    return max(told, int(has_waited))


def _reason(value: Any, status: int) -> str:
    """Raises Incomplete if an error does not say why."""
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict) or not error.get("message"):
        raise Incomplete(f"status {status} without a reason: {str(value)[:200]}")
    return f"{error.get('code') or error.get('type') or status}: {error['message']}"


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _stable(inner) for name, inner in value.items() if name not in _VOLATILE}
    if isinstance(value, list):
        return [_stable(inner) for inner in value]
    return value


def _merged(old: Any, new: Any, name: str = "") -> Any:
    """Texts and lists are continued. Elements with an index are continued one by one. Of others the last one counts."""
    if old is None or new is None:
        return old if new is None else new
    if isinstance(old, dict) and isinstance(new, dict):
        both = {key: _merged(old.get(key), inner, key) for key, inner in new.items()}
        return {**old, **both}
    if isinstance(old, list) and isinstance(new, list):
        if all(isinstance(one, dict) and "index" in one for one in [*old, *new]):
            by_index = {one["index"]: one for one in old}
            for one in new:
                by_index[one["index"]] = _merged(by_index.get(one["index"]), one)
            return [by_index[index] for index in sorted(by_index)]
        return old + new
    if isinstance(old, str) and isinstance(new, str) and name in _TEXTS:
        return old + new
    return new

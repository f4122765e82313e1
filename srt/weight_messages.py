"""The messages that load other weights into a running engine: TokenizerManager -> Scheduler, and the reply."""

from __future__ import annotations

import msgspec


class WeightFacts(msgspec.Struct, frozen=True):
    """What the weights in use are like."""

    dtype: str
    """Type of the matrices: a data type, or the forms of quantized ones."""
    num_bytes: int


VERSION_RULE = "1 to 128 printable characters"
"""What the name of weights has."""


def is_version(name: str) -> bool:
    """Whether weights may have this name (VERSION_RULE)."""
    return 0 < len(name) <= 128 and name.isprintable()


class UpdateWeightsReq(msgspec.Struct, frozen=True, tag="update_weights"):
    """Load other weights of the same model. Generation must be paused. The answer is an UpdateWeightsReply."""

    call_id: int
    model_path: str
    load_format: str
    weight_version: str


class UpdateWeightsReply(msgspec.Struct, frozen=True, tag="weights"):
    """An UpdateWeightsReq has taken effect. With `refusal`, `failure` or `busy` the old weights stay in use."""

    call_id: int
    num_waiting: int = 0
    """Requests that wait, and go on with the new weights."""
    refusal: str | None = None
    """Why the engine does not take these weights."""
    failure: str | None = None
    """What failed in the engine."""
    busy: str | None = None
    """Why the engine can load no weights now."""
    facts: WeightFacts | None = None
    """About the new weights; None if the old ones are in use."""

"""What an EngineView (io_struct.py) consists of: finished steps, unfinished requests, and hot prefixes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class StepRecord(msgspec.Struct, frozen=True, gc=False):
    """One step that the runner has finished."""

    number: Annotated[int, Meta(description="The number of the step, counted from 1 since the start")]
    start_s: Annotated[float, Meta(description="When the step began, in seconds on the scheduler's clock")]
    duration_s: Annotated[float, Meta(description="How long the step took, in seconds")]
    prompt_tokens: Annotated[int, Meta(description="Prompt tokens that the step computed")]
    decodes: Annotated[int, Meta(description="Tokens of running requests that the step computed, drafts included")]


class RequestView(msgspec.Struct, frozen=True, gc=False):
    """One unfinished request."""

    rid: Annotated[str, Meta(description="Name of the sample inside the engine")]
    stage: Annotated[str, Meta(description="`waiting`, `extending` (its prompt is computed in chunks) or `decoding`")]
    prompt_tokens: Annotated[int, Meta(description="Tokens of the prompt")]
    cached_tokens: Annotated[int, Meta(description="Prompt tokens that were in the prefix cache")]
    computed_tokens: Annotated[int, Meta(description="Tokens of prompt and output whose KV is in memory")]
    output_tokens: Annotated[int, Meta(description="Tokens generated so far")]
    max_new_tokens: Annotated[int, Meta(description="Maximum number of tokens to generate")]


class HotPrefix(msgspec.Struct, frozen=True):
    """One edge of the prefix cache's tree."""

    depth: int
    """Number of listed edges above this one. The list is in depth-first order, so the depths describe the tree."""
    start: int
    """Position of the edge's first token in the prompts that contain it."""
    num_tokens: int
    num_uses: int
    """Number of requests that have used the edge."""
    is_locked: bool
    """Whether a running request uses the edge."""
    token_ids: list[int]
    """The first tokens of the edge."""

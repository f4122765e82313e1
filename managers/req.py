"""One request inside the scheduler: its tokens, its place, and what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..mem_cache.base_prefix_cache import CacheNode
from ..model_executor.step import NewRow
from ..srt.io_struct import AbortFinish, Counts, DecodeOptions, FinishReason, LengthFinish, StopFinish, TokenOut
from ..srt.request_options import RequestOptions
from ..srt.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]


class Stage(Enum):
    """Where a request is; RequestQueues alone moves it."""

    WAITING = "waiting"
    EXTENDING = "extending"
    DECODING = "decoding"
    FINISHED = "finished"


class StopChecker(Protocol):
    """Watches the text of one request for its stop strings."""

    def push(self, token_ids: Sequence[int]) -> str | None:
        """The stop string that these tokens completed."""


class Req:
    """Mutable state of one request. Token positions count from the start of the prompt."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "finish",
        "in_flight",
        "kv_len",
        "locked_len",
        "node",
        "num_retractions",
        "num_sent",
        "options",
        "output_ids",
        "passed_over",
        "pending_abort",
        "prompt_ids",
        "reused_len",
        "rid",
        "row",
        "stage",
        "stop_checker",
        "stop_ids",
        "stream_interval",
    )

    def __init__(
        self,
        rid: str,
        prompt_ids: Int32Array,
        options: RequestOptions,
        *,
        arrival: int,
        eos_ids: frozenset[int] = frozenset(),
        stream_interval: int = 1,
        stop_checker: StopChecker | None = None,
    ) -> None:
        sampling = options.sampling
        assert sampling.max_new_tokens is not None and sampling.sampling_seed is not None
        self.rid = rid
        self.prompt_ids = prompt_ids
        self.output_ids: list[int] = []
        self.options = options
        self.arrival = arrival
        """A counter, not a clock: the order in which requests came."""
        self.stop_ids = frozenset(sampling.stop_token_ids or ()) | (frozenset() if sampling.ignore_eos else eos_ids)
        self.stop_checker = stop_checker
        self.stream_interval = stream_interval
        self.stage = Stage.WAITING
        self.finish: FinishReason | None = None
        self.pending_abort: AbortFinish | None = None
        self.in_flight = 0
        """Launched steps with this request in them whose results are not processed."""
        self.passed_over = 0
        """Passes in which a later arrival was admitted before this one. The schedule policy counts them."""
        self.num_retractions = 0
        self.cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache at the first admission."""
        self.num_sent = 0
        # What it holds, see docs/memory.md. KVCacheManager alone writes these.
        self.row = 0
        self.kv_len = 0
        self.locked_len = 0
        self.node: CacheNode | None = None
        """Where its locked prefix ends; None while it has no row."""
        self.reused_len = 0
        """Tokens at the start whose KV it found in the cache at every admission; it may have computed all others."""

    @property
    def sampling(self) -> SamplingParams:
        return self.options.sampling

    @property
    def namespace(self) -> str:
        """Of the prefix cache."""
        return self.options.cache_salt

    @property
    def max_new_tokens(self) -> int:
        assert self.sampling.max_new_tokens is not None
        return self.sampling.max_new_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens known on the host."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_new_left(self) -> int:
        return self.max_new_tokens - len(self.output_ids)

    @property
    def ends_in_flight(self) -> bool:
        """The step in flight produces its last token, whatever that token is: known before it is home."""
        return len(self.output_ids) + self.in_flight >= self.max_new_tokens

    def token_ids(self) -> Int32Array:
        """[num_tokens] prompt and outputs."""
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate((self.prompt_ids, np.asarray(self.output_ids, dtype=np.int32)))

    def as_new_row(self) -> NewRow:
        assert self.row and self.sampling.sampling_seed is not None
        return NewRow(
            row=self.row,
            sampling=self.sampling,
            seed=self.sampling.sampling_seed,
            prompt_ids=self.prompt_ids,
            output_ids=np.asarray(self.output_ids, dtype=np.int32),
            stop_ids=tuple(sorted(self.stop_ids)),
        )

    def accept(self, tokens: Sequence[int]) -> FinishReason | None:
        """Appends the new tokens of a step up to the one that ends the request; how it ends, if it does.

        `tokens`: valid ids, at least one.
        """
        for token in tokens:
            self.output_ids.append(token)
            if self.stop_checker is not None:
                matched = self.stop_checker.push((token,))
                if matched is not None:
                    return StopFinish(matched)
            if token in self.stop_ids:
                return StopFinish(token)
            if len(self.output_ids) >= self.max_new_tokens:
                return LengthFinish(len(self.output_ids))
        return None

    @property
    def has_news(self) -> bool:
        """Whether the client should hear something now: the first token, an interval's worth, or the end."""
        unsent = len(self.output_ids) - self.num_sent
        return self.finish is not None or unsent >= self.stream_interval or (unsent > 0 and self.num_sent == 0)

    def take_news(self) -> TokenOut:
        """What the client has not heard yet."""
        options = None
        if self.num_sent == 0:
            options = decode_options(self.sampling)
        news = TokenOut(
            rid=self.rid,
            token_ids=self.output_ids[self.num_sent :],
            finish=self.finish,
            counts=Counts(len(self.prompt_ids), len(self.output_ids), self.cached_tokens or 0, self.num_retractions),
            options=options,
        )
        self.num_sent = len(self.output_ids)
        return news


def decode_options(params: SamplingParams) -> DecodeOptions:
    """What decoding has to know of a request's wishes."""
    return DecodeOptions(params.skip_special_tokens, params.no_stop_trim, list(params.stop_strings))

"""Makes a Req out of a GenerateReq, or says why there can be none."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from ..srt.errors import PromptTooLong, QueueFull
from ..srt.io_struct import GenerateReq, unpack_ids
from ..srt.sampling_params import SamplingParams
from .req import Req, StopChecker

_NEVER = 1 << 30


class ReqFactory:
    """Everything about a request that is fixed at its arrival."""

    def __init__(
        self,
        *,
        eos_ids: frozenset[int],
        max_total_tokens: int,
        max_queued_requests: int,
        stream_interval: int,
        make_stop_checker: Callable[[SamplingParams], StopChecker | None],
    ) -> None:
        """`max_total_tokens`: prompt and output of one request, the lesser of context and KV pool."""
        self._eos_ids = eos_ids
        self._max_total_tokens = max_total_tokens
        self._max_queued_requests = max_queued_requests
        self._stream_interval = stream_interval
        self._make_stop_checker = make_stop_checker
        self._arrivals = itertools.count()

    def make(self, message: GenerateReq, *, num_waiting: int) -> Req:
        """Raises QueueFull, and PromptTooLong for a request that could never run to its end."""
        if num_waiting >= self._max_queued_requests:
            raise QueueFull(f"the waiting queue is full ({num_waiting} requests); try again later")
        prompt_ids = unpack_ids(message.input_ids)
        sampling = message.options.sampling
        assert sampling.max_new_tokens is not None
        total = len(prompt_ids) + sampling.max_new_tokens
        if total > self._max_total_tokens:
            raise PromptTooLong(
                f"the request needs {total} tokens (prompt and output); at most {self._max_total_tokens} fit"
            )
        return Req(
            message.rid,
            prompt_ids,
            message.options,
            arrival=next(self._arrivals),
            eos_ids=self._eos_ids,
            stream_interval=self._stream_interval if message.options.stream else _NEVER,
            stop_checker=self._make_stop_checker(sampling) if sampling.stop_strings else None,
        )

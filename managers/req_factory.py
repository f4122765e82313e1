"""Makes a Req of a GenerateReq, or refuses it with an error."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from ..srt.adapters import AdapterRef
from ..srt.errors import PromptTooLong
from ..srt.io_struct import GenerateReq, unpack_ids
from ..srt.request_options import RequestOptions
from .req import Req
from .text_stream import StopChecker

_NEVER = 1 << 30


class ReqFactory:
    """Makes requests. It sets everything that is fixed at the arrival of a request."""

    def __init__(
        self,
        *,
        eos_ids: frozenset[int],
        max_total_tokens: int,
        stream_interval: int,
        low_priority_values_first: bool = False,
        slot_of: Callable[[AdapterRef], int],
        make_stop_checker: Callable[[RequestOptions], StopChecker | None],
    ) -> None:
        """`max_total_tokens`: prompt and output of one request, the lesser of context and KV pool.
        `low_priority_values_first`: a lower value is a higher priority. `slot_of`: the slot of an adapter in the
        runner; it raises TercetError for one that is not loaded."""
        self._eos_ids = eos_ids
        self._max_total_tokens = max_total_tokens
        self._urgency_sign = -1 if low_priority_values_first else 1
        self._stream_interval = stream_interval
        self._slot_of = slot_of
        self._make_stop_checker = make_stop_checker
        self._arrivals = itertools.count()

    def make(self, message: GenerateReq) -> Req:
        """Raises PromptTooLong for a request that could never finish, and the errors of `slot_of`. A resumed one may
        have a `finish` already."""
        prompt_ids = unpack_ids(message.input_ids)
        sampling = message.options.sampling
        assert sampling.max_new_tokens is not None
        total = len(prompt_ids) + sampling.max_new_tokens
        if total > self._max_total_tokens:
            raise PromptTooLong.of(
                self._max_total_tokens, f"the request needs {total} tokens for its prompt and its output"
            )
        req = Req(
            message.rid,
            prompt_ids,
            message.options,
            arrival=next(self._arrivals),
            adapter=0 if message.options.adapter is None else self._slot_of(message.options.adapter),
            urgency=self._urgency_sign * message.options.priority,
            eos_ids=self._eos_ids,
            stream_interval=self._stream_interval if message.options.stream else _NEVER,
            stop_checker=self._make_stop_checker(message.options) if sampling.stops_at_text else None,
        )
        if message.resumed is not None:
            req.resume(message.resumed)
        return req

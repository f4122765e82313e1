"""A request in the scheduler: its tokens, its stage, and the KV that it owns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

import numpy as np

from ..mem_cache.base_prefix_cache import CacheNode, Lookup
from ..model_executor.step import NewRow
from ..srt.arrays import Int32Array
from ..srt.io_struct import (
    AbortFinish,
    Counts,
    DecodeOptions,
    FinishReason,
    LengthFinish,
    Resumed,
    StopFinish,
    TokenOut,
)
from ..srt.request_options import RequestOptions
from ..srt.sampling_params import SamplingParams
from .grammar import GrammarState
from .req_hidden import ReqHidden
from .req_logprobs import ReqLogprobs
from .req_pooling import ReqPooling
from .req_states import ReqStates
from .req_tiers import ReqTiers
from .text_stream import StopChecker

MAX_FORCED = 32
"""Forced tokens that follow one sampled token at most. Other requests wait while their masks are computed, and while a
step computes them."""


class Stage(Enum):
    """The stage of a request. Only RequestQueues changes it."""

    WAITING = "waiting"
    EXTENDING = "extending"
    DECODING = "decoding"
    FINISHED = "finished"


class Req:
    """The state of one request. Positions count from the first token of the prompt."""

    __slots__ = (
        "adapter",
        "arrival",
        "arrived_s",
        "awaits_grammar",
        "cached_tokens",
        "deadline",
        "finish",
        "grammar",
        "has_begun",
        "hidden",
        "host_tokens",
        "is_announced",
        "is_streaming",
        "kv_len",
        "locked_len",
        "logprobs",
        "lookup",
        "matched_len",
        "max_kv_len",
        "max_new_tokens",
        "namespace",
        "next_output_len",
        "node",
        "num_accepted_drafts",
        "num_drafts",
        "num_retractions",
        "num_sent",
        "num_steps_in_flight",
        "num_unchecked",
        "options",
        "output_ids",
        "passed_over",
        "pending_abort",
        "pooling",
        "prompt_ids",
        "queue_time_s",
        "queued_tokens",
        "ran_s",
        "reused_len",
        "rid",
        "row",
        "stage",
        "states",
        "stop_checker",
        "stop_ids",
        "storage_tokens",
        "stream_interval",
        "tenant",
        "tiers",
        "urgency",
    )

    def __init__(
        self,
        rid: str,
        prompt_ids: Int32Array,
        options: RequestOptions,
        *,
        arrival: int,
        adapter: int = 0,
        urgency: int = 0,
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
        """The number of the request in the order of arrival. Not a time."""
        self.adapter = adapter
        """The slot of its adapter in the runner; 0: none."""
        self.namespace = options.namespace
        self.urgency = urgency
        """Its priority, turned so that higher goes first. 0 without priorities."""
        self.tenant = options.tenant
        self.max_new_tokens = sampling.max_new_tokens
        # A request of 0 tokens ends by length, whatever token its prefill samples.
        stops = sampling.max_new_tokens > 0
        own_ids = frozenset(sampling.stop_token_ids or ()) | (frozenset() if sampling.ignore_eos else eos_ids)
        self.stop_ids = own_ids if stops else frozenset()
        self.stop_checker = stop_checker if stops else None
        self.stream_interval = stream_interval
        self.max_kv_len = len(prompt_ids) + max(sampling.max_new_tokens, 1) - 1
        """Tokens that need KV: all but the last, which is no input of any step."""
        self.stage = Stage.WAITING
        self.finish: FinishReason | None = None
        self.pending_abort: AbortFinish | None = None
        self.grammar: GrammarState | None = None
        """What its output must match. It survives a retraction, because it follows `output_ids`."""
        self.awaits_grammar = False
        """Its grammar is being compiled, so it cannot be admitted."""
        self.num_steps_in_flight = 0
        """Launched steps of this request whose results are not processed. Those of a retracted request are processed in
        the same turn. So between turns, a waiting request has none."""
        self.passed_over = 0
        """The number of admission passes that admitted a request from behind it in the queue."""
        self.num_retractions = 0
        self.cached_tokens: int | None = None
        """Prompt tokens that the first admission found in the prefix cache and in lower tiers. None before."""
        self.host_tokens = 0
        """Those of them that came from host memory."""
        self.storage_tokens = 0
        """Those of them that were read from files."""
        self.num_drafts = self.num_accepted_drafts = 0
        """Drafts that steps of this engine have verified, and those of them that were right."""
        self.arrived_s = 0.0
        """When it arrived, on the scheduler's clock. SchedulerMetrics writes this and the next one."""
        self.queue_time_s: float | None = None
        """Seconds from its arrival to its first admission; None before."""
        self.queued_tokens = 0
        """Tokens that it had to compute when it arrived, as far as that was known. QueueLimits writes it."""
        self.deadline = math.inf
        """When it is over its waiting time or its running time. Only Timeouts reads and writes it."""
        self.has_begun = False
        """Whether it has had its first step, also in an engine that has died. Only Timeouts reads and writes it."""
        self.ran_s = 0.0
        """How long it has run in engines that have died, each time from its first token on."""
        self.matched_len = 0
        """Tokens that the last look-up while it waited, or its admission, found in the prefix cache and in lower tiers.
        Look-ups of the policy `dfs-weight` leave lower tiers out."""
        self.num_unchecked = 0
        """Forced tokens before its newest one whose logits no step has returned. They may not be finite."""
        self.num_sent = 0
        self.next_output_len = 1
        """Output tokens at which the next output is due, unless the request ends before: the first token, and then
        every `stream_interval` tokens."""
        self.is_announced = False
        """Whether the detokenizer knows this request."""
        self.is_streaming = False
        """Whether its next token may be sent in NextTokens: the detokenizer knows all that a TokenOut would add."""
        self.logprobs = None if options.logprobs is None else ReqLogprobs(options.logprobs, prompt_ids)
        self.pooling = None if options.pooling is None else ReqPooling(options.pooling, len(prompt_ids))
        self.hidden = ReqHidden(len(prompt_ids)) if options.return_hidden_states else None
        self.tiers: ReqTiers | None = None
        """What the tiers below the KV pool know about it. Only KVTiers changes it."""
        # Its row and KV, see docs/memory.md. Only KVCacheManager writes them.
        self.row = 0
        self.kv_len = 0
        self.locked_len = 0
        self.node: CacheNode | None = None
        """The end of its locked prefix; None while it has no row."""
        self.states: ReqStates | None = None
        """Its saved states. Only PrefixStates changes it. None: it has no row, or the model has no recurrent layers."""
        self.lookup: tuple[Lookup, int] | None = None
        """While it waits: what the prefix cache had of it, and the number of its output tokens then. None: unknown."""
        self.reused_len = 0
        """The length of the shortest prefix that any of its admissions found in the prefix cache. It may have computed
        all KV after that."""

    @property
    def sampling(self) -> SamplingParams:
        return self.options.sampling

    @property
    def place(self) -> tuple[int, int]:
        """Its place in the waiting queue: highest priority first, then in the order of arrival."""
        return (-self.urgency, self.arrival)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the host knows."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def reusable_len(self) -> int:
        """Tokens at the start whose KV may come from the prefix cache; at least one token is always computed."""
        reusable = None if self.logprobs is None else self.logprobs.reusable_len
        if reusable is None:
            reusable = self.num_tokens - 1
        if self.hidden is not None:
            reusable = min(reusable, self.hidden.reusable_len)
        return reusable if self.pooling is None else min(reusable, self.pooling.reusable_len)

    @property
    def takes_drafts(self) -> bool:
        """Whether drafts may be proposed for it. Hidden states of rejected drafts would have to be dropped."""
        return self.hidden is None

    @property
    def takes_forced_tokens(self) -> bool:
        """Whether tokens that its grammar forces are taken before a step samples them. Their log probabilities and
        hidden states would come later."""
        return self.grammar is not None and self.logprobs is None and self.hidden is None

    @property
    def joins_forced_tokens(self) -> bool:
        """Whether one step may compute several forced tokens. The device counts for penalties what it samples."""
        return not self.sampling.has_penalties

    @property
    def num_new_left(self) -> int:
        return self.max_new_tokens - len(self.output_ids)

    @property
    def is_admissible(self) -> bool:
        """Whether it may leave the waiting queue for a step."""
        return self.pending_abort is None and self.num_steps_in_flight == 0 and not self.awaits_grammar

    @property
    def awaits_results(self) -> bool:
        """Whether a running request takes part in no further step before those in flight are processed.

        A step returns at most as many tokens as it has positions after the known tokens. So a request waits when its
        KV is planned to the end: the step in flight may return its last token. It also waits when more than one token
        may be in flight: its next position depends on how many are accepted.
        """
        return self.kv_len >= self.max_kv_len or self.kv_len > len(self.prompt_ids) + len(self.output_ids)

    def token_ids(self) -> Int32Array:
        """[num_tokens], prompt and output."""
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate((self.prompt_ids, np.asarray(self.output_ids, dtype=np.int32)))

    def output_from(self, position: int) -> list[int]:
        """The known output tokens from a position on, which counts from the start of the prompt. May be empty."""
        return self.output_ids[position - len(self.prompt_ids) :]

    def as_new_row(self) -> NewRow:
        assert self.row and self.sampling.sampling_seed is not None
        return NewRow(
            row=self.row,
            sampling=self.sampling,
            seed=self.sampling.sampling_seed,
            prompt_ids=self.prompt_ids,
            output_ids=np.asarray(self.output_ids, dtype=np.int32),
            # A grammar's masks bar early stop tokens themselves: only they know where nothing else may come.
            stop_ids=tuple(sorted(self.stop_ids)) if self.grammar is None else (),
            logprobs=self.options.logprobs,
            adapter=self.adapter,
        )

    def accept(self, tokens: Sequence[int]) -> FinishReason | None:
        """Appends the new tokens of a step, up to the token that ends the request. Returns the finish reason, if any.

        A request of 0 tokens drops the token that its prefill has sampled. `tokens`: valid ids. Raises GrammarFailed.
        """
        output_ids = self.output_ids
        for token in tokens:
            output_ids.append(token)
            if self.grammar is not None:
                self.grammar.accept(token)
            if self.stop_checker is not None and token not in self.stop_checker.quiet:
                matched = self.stop_checker.push(token)
                if matched is not None:
                    return StopFinish(matched)
            if token in self.stop_ids:
                return StopFinish(token)
            if len(output_ids) >= self.max_new_tokens:
                del output_ids[self.max_new_tokens :]
                return LengthFinish(len(output_ids))
            if self.grammar is not None and self.grammar.is_over:
                return StopFinish(token)
        return None

    def accept_forced(self) -> FinishReason | None:
        """Appends the tokens that the grammar forces: no other token may come, whatever the logits are.

        Returns the finish reason, if any. Raises GrammarFailed.
        """
        assert self.grammar is not None
        for _ in range(MAX_FORCED):
            token = self.grammar.forced_token(len(self.output_ids))
            if token is None:
                return None
            finish = self.accept((token,))
            if finish is not None:
                return finish
        return None

    def on_retract(self) -> None:
        """It has lost its row and its KV."""
        self.num_retractions += 1
        self.is_streaming = False

    def on_new_weights(self) -> None:
        """Other weights compute it from now on. It has no KV.

        Before its first token, what the old weights have computed of its prompt is computed anew: an embedding or the
        log probabilities of a prompt are of one model.
        """
        self.tiers = None
        if self.output_ids:
            return
        if self.logprobs is not None:
            self.logprobs = ReqLogprobs(self.logprobs.options, self.prompt_ids)
        if self.options.pooling is not None:
            self.pooling = ReqPooling(self.options.pooling, len(self.prompt_ids))
        if self.hidden is not None:
            self.hidden = ReqHidden(len(self.prompt_ids))

    def resume(self, resumed: Resumed) -> None:
        """Continues a request of an engine that has died, like a retracted one. It may turn out to have ended.

        The tokens pass the same tests as new ones, so the state of these tests is rebuilt.
        """
        self.cached_tokens = resumed.cached_tokens
        self.host_tokens, self.storage_tokens = resumed.host_tokens, resumed.storage_tokens
        self.num_retractions = resumed.num_retractions
        self.ran_s = resumed.ran_s
        if resumed.output_ids:
            self.finish = self.accept(resumed.output_ids)
            if self.logprobs is not None:
                self.logprobs.resume()
            if self.hidden is not None:
                self.hidden.resume(len(resumed.output_ids))
            self.num_sent = len(self.output_ids)
            self.next_output_len = self.num_sent + self.stream_interval

    @property
    def is_complete(self) -> bool:
        """Whether it has ended, without an abort."""
        return self.finish is not None and not isinstance(self.finish, AbortFinish)

    def take_output(self) -> TokenOut:
        """The output that was not sent yet."""
        options = None
        num_sent, num_tokens = self.num_sent, len(self.output_ids)
        if not self.is_announced:
            options = DecodeOptions.of(self.options, self.output_ids[:num_sent])
            self.is_announced = True
        self.num_sent = num_tokens
        self.next_output_len = num_tokens + self.stream_interval
        self.is_streaming = self.stream_interval == 1 and self.grammar is None and self.hidden is None
        return TokenOut(
            rid=self.rid,
            token_ids=self.output_ids[num_sent:],
            finish=self.finish,
            counts=Counts(
                len(self.prompt_ids),
                num_tokens,
                self.cached_tokens or 0,
                self.num_retractions,
                None if self.finish is None else self.queue_time_s,
                self.host_tokens,
                self.storage_tokens,
                self.num_drafts,
                self.num_accepted_drafts,
            ),
            options=options,
            logprobs=None if self.logprobs is None else self.logprobs.take(num_tokens - num_sent),
            hidden_states=None if self.hidden is None else self.hidden.take(num_tokens),
            embedding=self.pooling.take() if self.pooling is not None and self.is_complete else None,
        )

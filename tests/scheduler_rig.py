"""A complete scheduler on the fake runner, with its messages in lists, for the tests of `managers`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from counting_runner import CountingRunner
from fake_proposers import FakeProposer
from fake_states import FakeStates
from fake_trace import FakeTrace
from hash_grammar import HashGrammars, hashed_vocabulary
from kv_makers import make_tiers

from fakes import FakeClock, FakeInbox, FakeOutbox
from tercet.managers.adapters import Adapters
from tercet.managers.explained_planner import ExplainedPlanner
from tercet.managers.grammar_loader import GrammarLoader
from tercet.managers.kv_cache_manager import KVCacheManager
from tercet.managers.planner import PlanLimits, Planner
from tercet.managers.prefix_states import PrefixStates
from tercet.managers.profiling import StartTrace
from tercet.managers.proposer import Proposer
from tercet.managers.req_factory import ReqFactory
from tercet.managers.request_queues import RequestQueues
from tercet.managers.scheduler import InFlight, Scheduler
from tercet.managers.scheduler_io import SchedulerIO
from tercet.managers.scheduler_metrics import SchedulerMetrics
from tercet.managers.timeouts import Timeouts
from tercet.managers.token_out_reader import TokenOutReader
from tercet.managers.weight_updates import LoadWeights
from tercet.mem_cache.allocator import make_allocator
from tercet.mem_cache.chunk_cache import ChunkCache
from tercet.mem_cache.radix_cache import RadixCache
from tercet.mem_cache.recurrent_cache import RecurrentCache
from tercet.mem_cache.req_to_token_pool import ReqToTokenPool
from tercet.model_executor.step import Runner
from tercet.srt.adapters import AdapterRef
from tercet.srt.grammar_spec import ReasoningSpan
from tercet.srt.io_struct import AbortReq, FinishReason, GenerateReq, Resumed, TokenOut, pack_ids
from tercet.srt.logprobs import LogprobOptions, NewLogprobs
from tercet.srt.request_options import Pooling, RequestOptions
from tercet.srt.sampling_params import SamplingParams


@dataclass
class Heard:
    """The outputs that a client received for one request."""

    ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    last: TokenOut | None = None
    logprobs: list[NewLogprobs] = field(default_factory=list)
    hidden: bytes = b""


class StopAfter:
    """A stop checker for tests. It matches when the last tokens are `pattern`."""

    quiet = ()

    def __init__(self, pattern: tuple[int, ...]) -> None:
        self._pattern = pattern
        self._seen: list[int] = []

    def push(self, token: int) -> str | None:
        self._seen.append(token)
        return "stop" if tuple(self._seen[-len(self._pattern) :]) == self._pattern else None


class Rig:
    def __init__(
        self,
        *,
        pool_size: int = 512,
        page_size: int = 1,
        max_running: int = 8,
        context_len: int = 256,
        max_prefill_tokens: int = 64,
        chunked_prefill_size: int = 64,
        radix: bool = True,
        policy: str = "lpm",
        overlap: bool = True,
        mixed: bool = False,
        eviction: str = "lru",
        eos_ids: frozenset[int] = frozenset(),
        max_queued: int = 10_000,
        max_queue_time_s: float | None = None,
        vocab_size: int = 97,
        stream_interval: int = 1,
        audit: bool = True,
        conservativeness: float = 1.0,
        watermark: float = 0.0,
        preemption_threshold: int | None = None,
        low_first: bool = False,
        max_itl_s: float | None = None,
        joins_forced: bool = True,
        decode_log_interval: int = 1_000_000,
        waiting_timeout: float | None = None,
        running_timeout: float | None = None,
        threads: bool = False,
        max_grammars: int = 64,
        max_drafts: int = 0,
        proposer: Proposer | None = None,
        tenant_weights: dict[str, float] | None = None,
        make_runner: Callable[[], Runner] | None = None,
        explain_s: float | None = None,
        host_blocks: int = 0,
        block_pages: int = 2,
        storage: Path | None = None,
        storage_bytes: int = 1 << 30,
        start_trace: StartTrace = lambda wanted: FakeTrace(),
        load_weights: LoadWeights | None = None,
        max_retained_share: float = 0.5,
        max_loras: int = 0,
        saved_states: int | None = None,
        min_gain: int = 1,
    ) -> None:
        """`threads`: compile grammars in a thread. `max_drafts`: most drafts of a FakeProposer, if there is no
        `proposer`. `make_runner`: makes the runner; a CountingRunner by default. `host_blocks`: blocks of `block_pages`
        pages in host memory; 0: no tiers. `storage`: the folder of KV files. `saved_states`: of
        recurrent layers, if there are any, which a step saves if they gain `min_gain` tokens."""
        pool = ReqToTokenPool(max_running, context_len)
        allocator = make_allocator(pool_size, page_size)
        self.clock = FakeClock()
        options = {"max_retained_share": max_retained_share, "clock": self.clock}
        states = None
        if not radix:
            cache = ChunkCache(page_size)
        elif saved_states is None:
            cache = RadixCache(allocator, page_size, eviction, **options)
        else:
            rows = range(max_running + 1, max_running + 1 + saved_states)
            cache = RecurrentCache(allocator, page_size, eviction, rows, **options)
            states = PrefixStates(cache, min_gain=min_gain, tail=2)
        if make_runner is None:
            num_host_pages = host_blocks * block_pages
            self.runner = CountingRunner(pool.req_to_token.shape, pool_size, page_size, vocab_size, num_host_pages)
            if saved_states is not None:
                self.runner.states = FakeStates(max_running + 1 + saved_states)
        else:
            self.runner = make_runner()
        tiers = None
        if host_blocks:
            if make_runner is None:
                memory = self.runner.host.reshape(host_blocks, -1).view(np.uint8)
            else:
                memory = self.runner.host_kv.memory
                assert self.runner.host_kv.block_len == page_size * block_pages
            tiers = make_tiers(page_size, block_pages, memory, storage, self.clock, storage_bytes)
        self.kv = KVCacheManager(pool, allocator, cache, tiers, states)
        self.inbox = FakeInbox()
        self.detokenizer = FakeOutbox()
        self.tokenizer = FakeOutbox()
        self.eos_ids = eos_ids
        self.heard: dict[str, Heard] = defaultdict(Heard)
        self.ended: list[str] = []
        """The requests that have ended, in this order."""
        self._outs = TokenOutReader()
        self._audit = audit
        limits = PlanLimits(
            max_prefill_tokens=max_prefill_tokens,
            chunked_prefill_size=chunked_prefill_size,
            enable_mixed_chunk=mixed,
            schedule_policy=policy,
            schedule_conservativeness=conservativeness,
            admission_watermark=watermark,
            preemption_threshold=preemption_threshold,
            max_itl_s=max_itl_s,
            joins_forced_tokens=joins_forced,
            tenant_weights=tenant_weights,
        )
        if proposer is None and max_drafts:
            proposer = FakeProposer(max_drafts, vocab_size)
        queues = RequestQueues(max_queued)
        io = SchedulerIO(self.inbox, self.detokenizer, self.tokenizer, self.clock)
        self.adapters = Adapters(self.runner, max_loras, queues, io)
        if explain_s is None:
            self.planner = Planner(limits, self.kv, queues, proposer, clock=self.clock)
        else:
            self.planner = ExplainedPlanner(limits, self.kv, queues, proposer, clock=self.clock, slow_s=explain_s)
        self.scheduler = Scheduler(
            self.planner,
            self.runner,
            io,
            ReqFactory(
                eos_ids=eos_ids,
                max_total_tokens=min(context_len, pool_size),
                low_priority_values_first=low_first,
                slot_of=self.adapters.slot_of,
                stream_interval=stream_interval,
                make_stop_checker=lambda options: StopAfter(
                    tuple(int(i) for i in options.sampling.stop_strings[0].split())
                ),
            ),
            SchedulerMetrics(decode_log_interval, clock=self.clock),
            GrammarLoader(
                lambda: hashed_vocabulary(vocab_size, eos_ids), HashGrammars, in_thread=threads, max_cached=max_grammars
            ),
            Timeouts(waiting_timeout, running_timeout, self.clock),
            self.adapters,
            enable_overlap=overlap,
            clock=self.clock,
            max_queue_time_s=max_queue_time_s,
            start_trace=start_trace,
            load_weights=load_weights,
        )
        self.in_flight: InFlight | None = None

    def add(
        self,
        rid: str,
        prompt: list[int],
        salt: str = "",
        adapter: AdapterRef | None = None,
        stream: bool = True,
        priority: int = 0,
        tenant: str = "",
        logprobs: LogprobOptions | None = None,
        pooling: Pooling | None = None,
        hidden: bool = False,
        waiting_timeout: float | None = None,
        running_timeout: float | None = None,
        session_id: str = "",
        retention_seconds: float | None = None,
        reasoning: ReasoningSpan | None = None,
        resumed: Resumed | None = None,
        waited_s: float | None = 0.0,
        **sampling: object,
    ) -> None:
        params = SamplingParams(**{"max_new_tokens": 8, "sampling_seed": 1, **sampling})
        options = RequestOptions(
            sampling=params,
            cache_salt=salt,
            adapter=adapter,
            priority=priority,
            tenant=tenant,
            stream=stream,
            logprobs=logprobs,
            pooling=pooling,
            return_hidden_states=hidden,
            waiting_timeout=waiting_timeout,
            running_timeout=running_timeout,
            session_id=session_id,
            retention_seconds=retention_seconds,
            reasoning=reasoning,
        )
        if resumed is not None:
            self.heard[rid].ids = list(resumed.output_ids)
        self.inbox.messages.append(GenerateReq(rid, pack_ids(prompt), options, resumed, waited_s))

    def abort(self, rid: str | None) -> None:
        self.inbox.messages.append(AbortReq(rid))

    def turn(self) -> None:
        """Runs one turn of the scheduler, and then audits the KV memory."""
        self.in_flight = self.scheduler.turn(self.in_flight)
        if self._audit:
            self.kv.audit(self.scheduler.queues.holders())
        for batch in self.detokenizer.messages:
            for out in self._outs.read(batch):
                heard = self.heard[out.rid]
                assert heard.finish is None, f"{out.rid}: an output after its end"
                heard.ids.extend(out.token_ids)
                assert out.counts.completion_tokens == len(heard.ids)
                heard.finish = out.finish
                if out.finish is not None:
                    self.ended.append(out.rid)
                if out.logprobs is not None:
                    assert len(out.logprobs.output) == len(out.token_ids)
                    heard.logprobs.append(out.logprobs)
                heard.hidden += out.hidden_states or b""
                heard.last = out
        self.detokenizer.messages.clear()

    @property
    def is_busy(self) -> bool:
        return self.in_flight is not None or self.scheduler.queues.is_busy or bool(self.inbox.messages)

    def run(self, max_turns: int = 20_000) -> int:
        """Runs turns until no request is left. Returns their number. Fails after `max_turns`."""
        for count in range(max_turns):
            if not self.is_busy:
                return count
            self.turn()
        raise AssertionError(f"not finished after {max_turns} turns")

    @property
    def extend_sizes(self) -> list[int]:
        """Number of tokens in each extend step so far."""
        return [int(np.sum(step.extend_lens)) for step in self.runner.steps if step.extend_lens is not None]

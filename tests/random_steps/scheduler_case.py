"""Runs a random case through a whole scheduler on the fake runner, and checks it after every turn.

After every turn: each slot, row and host block has one owner, no request is passed over too often, the readers of KV
events know what the cache has, the cache retains what was asked for, and no more than it may. At the end: every request
has the output of the fake model, whatever else happened. Only an update of the weights changes its later tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from fake_proposers import FakeProposer
from kv_event_reader import DISK, HOST
from random_steps.adapters import LoadedAdapters
from random_steps.books import cached_slots, check_host_blocks, check_limits, check_owners
from random_steps.cases import BROKEN, CONTEXT_LEN, POISON, UNSUITABLE, Case, Happening
from random_steps.clients import VOCAB, Clients
from random_steps.files import FakeStorage
from random_steps.retention import RetentionBooks
from scheduler_rig import Rig
from tier_reader import TierReader

from tercet.managers.fair_policy import FairPolicy
from tercet.managers.kv_tiers import READ_TIMEOUT_S
from tercet.managers.req import Req
from tercet.managers.schedule_policy import MAX_PASSED_OVER
from tercet.managers.weight_updates import LoadedWeights
from tercet.mem_cache.base_prefix_cache import MatchResult
from tercet.mem_cache.radix_cache import RadixCache
from tercet.srt.adapters import AdapterReply, LoadAdapterReq, UnloadAdapterReq
from tercet.srt.io_struct import FlushCacheReply, FlushCacheReq
from tercet.srt.pause_messages import ContinueReq, PauseReply, PauseReq
from tercet.srt.weight_messages import UpdateWeightsReply, UpdateWeightsReq, WeightFacts

_CALLS = (PauseReq, ContinueReq, FlushCacheReq, UpdateWeightsReq, LoadAdapterReq, UnloadAdapterReq)
_REPLIES = (PauseReply, FlushCacheReply, UpdateWeightsReply, AdapterReply)
_TURN_S = 0.01
_AUDIT_INTERVAL = 16
"""Turns between two runs of the scheduler's own audit, which is slower than `check_owners`."""
_MAX_DRAIN_TURNS = 5_000
_MAX_DELAYED = 16
"""Passes in which a request that was passed over often enough may still be delayed by a chunk that has begun, or by a
prefix that a step computes. Earlier arrivals in chunks are not counted: each of them is computed only once. Nor are
passes while the request waits for KV files, for READ_TIMEOUT_S at most."""


class Listener:
    """A reader of the KV events."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._known = TierReader(rig.kv)

    def check(self) -> None:
        """The reader knows as many tokens as the tree has, and the blocks of the lower tiers."""
        self._known.read()
        self._check_device()
        if self._rig.kv.tiers is not None:
            self._known.check_host()
            if isinstance(self._rig.kv.tiers._storage, FakeStorage):
                self._check_files(self._rig.kv.tiers._storage)

    def _check_files(self, storage: FakeStorage) -> None:
        """The reader knows all files, except those of which neither it nor the engine knows what is before them."""
        identity = _identity(self._rig.runner.weights)
        listed = self._known.keys_in(DISK)
        assert listed <= storage.contents.keys(), "files that have gone"
        known = listed | self._known.keys_in(HOST)
        for key in storage.contents.keys() - listed:
            content = storage.contents[key]
            assert content.before not in known and not content.is_first(identity), "a file is not reported"

    def _check_device(self) -> None:
        num_listed = len(self._known.reader.prefixes) * self._rig.kv.page_size
        cache = self._rig.kv.cache
        assert num_listed <= cache.evictable_size + cache.protected_size
        if not self._rig.scheduler.queues.holders():  # no discarded node is locked
            assert num_listed == cache.evictable_size


class WaitingBound:
    """Counts, independently of the policies, how often later arrivals are admitted before a request.

    Only without priorities: more urgent prompts in chunks may delay a request for any time. While a request waits for
    KV files, any number of others may pass it (docs/memory.md). That wait is bounded in time, so it has a clock here,
    which shares nothing with that of the scheduler.
    """

    def __init__(self, rig: Rig) -> None:
        self._queues = rig.scheduler.queues
        self._clock = rig.clock
        self._holders: set[Req] = set()
        self._unfinished: list[Req] = []
        self._passes: defaultdict[Req, int] = defaultdict(int)
        self._read_until: dict[Req, float] = {}
        """The requests that wait for files, and until when they may."""
        self._has_priorities = rig.planner._limits.preemption_threshold is not None
        self._is_fair = isinstance(rig.planner._policy, FairPolicy)

    def check(self) -> None:
        holders = set(self._queues.holders())
        admitted = holders - self._holders
        in_chunks = [*self._unfinished, *self._queues.unfinished]
        self._holders, self._unfinished = holders, list(self._queues.unfinished)
        now = self._clock()
        reading = [req for req in self._queues.waiting if req.tiers is not None and req.tiers.awaits_files]
        self._read_until = {req: self._read_until.get(req, now + READ_TIMEOUT_S) for req in reading}
        if not admitted or self._has_priorities:
            return
        last: dict[str, int] = {}
        for req in admitted:
            group = self._group(req)
            last[group] = max(last.get(group, 0), req.arrival)
        for req in self._queues.waiting:
            if req.arrival < last.get(self._group(req), 0) and req.is_admissible:
                is_delayed = any(one.arrival < req.arrival for one in in_chunks) or now < self._read_until.get(req, 0.0)
                if self._passes[req] >= MAX_PASSED_OVER and is_delayed:
                    continue
                self._passes[req] += 1
                assert self._passes[req] <= MAX_PASSED_OVER + _MAX_DELAYED, f"{req.rid} is starved"

    def _group(self, req: Req) -> str:
        """The requests among which the bound holds."""
        return req.tenant if self._is_fair else ""


class SchedulerCase:
    """One run of a case. `num_turns`: turns so far. `seen`: how often what is rare has happened."""

    def __init__(self, case: Case) -> None:
        self.num_turns = 0
        self.seen: Counter[str] = Counter()
        self._case = case
        self._clients = Clients(self.seen)
        self._adapters = LoadedAdapters(self.seen)
        self._storage: FakeStorage | None = None
        self._weights = 0
        self._start()

    def _start(self) -> None:
        """Starts an engine. It has the files and the weights of the last one, if there was one."""
        case = self._case
        rig = Rig(**case.rig, context_len=CONTEXT_LEN, vocab_size=VOCAB, audit=False, load_weights=self._load)
        self._rig = rig
        rig.runner.poison = POISON if case.has_poison else None
        self._num_unanswered = 0
        self._num_loads = 0
        self._misled: list[Req] = []
        """Requests with KV of other weights than those in use. An error in `_load` would only fail the update."""
        if rig.kv.tiers is not None:
            rig.kv.tiers.change_identity(_identity(self._weights))
        if case.has_files:
            assert rig.kv.tiers is not None
            memory = rig.runner.host.reshape(case.rig["host_blocks"], -1).view("uint8")
            seed = f"{case.seed} {self.seen['restarts']}"
            self._storage = rig.kv.tiers._storage = FakeStorage(memory, seed, self._storage)
        self._use_weights(self._weights)
        self._adapters.begin(rig)
        self._listener = Listener(rig) if case.has_listener else None
        self._bound = WaitingBound(rig)
        self._check_matches()
        self._count_preemptions()
        self._retention = None
        if isinstance(rig.kv.cache, RadixCache) and rig.kv.cache.retentions is not None:
            self._retention = RetentionBooks(rig.kv, case.rig["max_retained_share"], rig.clock)
        self._clients.meet(rig, self._retention)

    def _count_preemptions(self) -> None:
        planner = self._rig.planner
        preempt = planner._preempt

        def counted(threshold: int) -> bool:
            has_preempted = preempt(threshold)
            self.seen["preemptions"] += has_preempted
            return has_preempted

        planner._preempt = counted  # type: ignore[method-assign]

    def _use_weights(self, version: int) -> None:
        self._weights = self._rig.runner.weights = version
        if isinstance(self._rig.planner._proposer, FakeProposer):
            self._rig.planner._proposer.weights = version

    def _check_matches(self) -> None:
        """An admission finds what the policies count as cached, in all tiers."""
        kv = self._rig.kv
        admit = kv.admit

        def checked(req: Req, match: MatchResult) -> None:
            expected = kv.match_len(req)
            admit(req, match)
            assert req.kv_len == expected, f"{req.rid} finds {req.kv_len} tokens, not {expected}"

        kv.admit = checked  # type: ignore[method-assign]

    def run(self) -> None:
        """Raises AssertionError, or whatever the scheduler raises, if anything is wrong."""
        happenings = iter([*self._case.happenings, Happening(1 << 30, "end", 0)])
        following = next(happenings)
        for turn in range(self._case.num_turns + _MAX_DRAIN_TURNS):
            while following.turn <= turn:
                self._act(following)
                following = next(happenings)
            if turn >= self._case.num_turns:
                if not self._rig.is_busy and not self._rig.kv.has_copies:
                    break
                self._send(ContinueReq(0))
            self._turn()
        else:
            raise AssertionError("requests wait for ever")
        self._check_end()

    def _turn(self) -> None:
        rig = self._rig
        rig.clock.now += _TURN_S
        self._clients.tell_tool_calls(self.num_turns)
        must_rest = rig.scheduler._pause.is_on and not rig.inbox.messages
        num_loads = self._num_loads
        rig.turn()
        assert not (must_rest and rig.runner.steps), "a step in a pause"
        for step in rig.runner.steps:
            check_limits(step, self._case.rig)
        rig.runner.steps.clear()
        self.num_turns += 1
        self._clients.hear(self.num_turns)
        self._count_replies(self._num_loads - num_loads)
        queues = rig.scheduler.queues
        holders = queues.holders()
        check_owners(rig.kv, holders)
        assert not any(one.num_steps_in_flight for one in queues.waiting), "a waiting request is in a step in flight"
        without_kv = [*queues.waiting, *queues.unfinished]
        assert {one for one in without_kv if one.output_ids} == {one for one in queues.interrupted if one.output_ids}
        if rig.kv.tiers is not None:
            rig.kv.tiers.audit()
            check_host_blocks(rig.kv.tiers, self._storage)
        if self.num_turns % _AUDIT_INTERVAL == 0:
            rig.kv.audit(holders)
        self._bound.check()
        if self._listener is not None:
            self._listener.check()
        if self._retention is not None:
            self._retention.check(rig.scheduler.state().num_retained_tokens)
            self.seen["turns with all retained that may be"] += self._retention.is_full
        if self._num_loads > num_loads and rig.scheduler._pause.is_on:
            self._check_forgotten()

    # What happens

    def _send(self, message: object) -> None:
        self._num_unanswered += isinstance(message, _CALLS)
        self._rig.inbox.messages.append(message)

    def _act(self, one: Happening) -> None:
        rig = self._rig
        if one.request is not None:
            self._clients.arrive(f"r{one.number}", dict(one.request), self._weights, self._adapters)
        elif one.kind == "load adapter":
            self._send(self._adapters.load(one.name, one.number))
        elif one.kind == "unload adapter":
            self._send(self._adapters.unload(one.name))
        elif one.kind == "abort":
            self._clients.abort(f"r{one.number}")
        elif one.kind == "abort all":
            self._clients.abort(None)
        elif one.kind == "late":
            rig.clock.now += 0.7
        elif one.kind == "flush":
            self._send(FlushCacheReq(one.number))
        elif one.kind == "continue":
            self._send(ContinueReq(one.number))
        elif one.kind == "weights":
            self._send(UpdateWeightsReq(one.number, "", "auto", str(one.number)))
        elif one.kind == "restart":
            self._restart()
        else:
            if one.kind == "pause abort":
                self._clients.abort(None)
            self._send(PauseReq(one.number, one.kind == "retract"))

    # Weights

    def _load(self, message: UpdateWeightsReq) -> LoadedWeights:
        """Loads weights into the runner."""
        version = int(message.weight_version)
        if version == UNSUITABLE:
            raise ValueError("these weights are of another model")
        if version == BROKEN:
            raise MemoryError("no memory for these weights")
        self._misled += self._rig.scheduler.queues.holders()
        self._use_weights(version)
        self._clients.on_weights(version)
        self._num_loads += 1
        self.seen["updates of weights"] += 1
        return LoadedWeights(_identity(version), WeightFacts("float32", 1))

    def _count_replies(self, num_loads: int) -> None:
        """`num_loads`: updates of the weights in this turn."""
        replies = [one for one in self._rig.tokenizer.messages if isinstance(one, _REPLIES)]
        updates = [one for one in replies if isinstance(one, UpdateWeightsReply)]
        self._adapters.hear([one for one in replies if isinstance(one, AdapterReply)])
        self._rig.tokenizer.messages.clear()
        self._num_unanswered -= len(replies)
        assert sum(one.facts is not None for one in updates) == num_loads
        assert not self._misled, "the weights have changed under requests with KV"
        self.seen["refused or failed updates"] += len(updates) - num_loads

    def _check_forgotten(self) -> None:
        """Nothing of the old weights can be found."""
        kv = self._rig.kv
        assert kv.cache.evictable_size == kv.cache.protected_size == kv.cache.retained_size == 0
        assert kv.tiers is None or not kv.tiers.blocks._block_of, "host memory has KV of the old weights"

    # Restarts

    def _restart(self) -> None:
        """The engine dies, and its requests go on in another one, as in `TokenizerManager.resume`."""
        old = self._rig
        assert old.scheduler.state().num_kv_repairs == 0
        self._close()
        self.seen["restarts"] += 1
        is_paused = old.scheduler._pause.is_on
        self._start()
        self._rig.clock.now = old.clock.now
        self._rig.heard = old.heard
        if is_paused:
            self._send(PauseReq(0, False))
        self._clients.resume()

    def _close(self) -> None:
        """Counts what an engine has done."""
        planner, tiers = self._rig.planner, self._rig.kv.tiers
        self.seen["retractions"] += planner.num_retractions
        self.seen["drafts after forced tokens"] += self._rig.runner.num_runs_with_drafts
        self.seen["drafts accepted under a grammar"] += self._rig.runner.num_masked_drafts
        self.seen["drafts accepted with penalties"] += self._rig.runner.num_counted_drafts
        if tiers is not None:
            self.seen["blocks displaced from host memory"] += tiers.blocks.num_dropped
        if self._storage is not None:
            self.seen["blocks read from files"] += self._storage.num_read
            self.seen["files that others have removed"] += self._storage.num_gone
            self.seen["damaged files"] += self._storage.num_damaged
            self.seen["full disks"] += not self._storage.is_writing

    # The end

    def _check_end(self) -> None:
        rig = self._rig
        self._close()
        assert self._num_unanswered == 0, "a call has no answer"
        self._clients.check()
        rig.kv.audit([])
        assert not rig.runner.is_nan[cached_slots(rig.kv.cache)].any(), "KV that is NaN stays in the cache"
        if rig.kv.tiers is not None:
            blocks = [*rig.kv.tiers.blocks._block_of.values()]
            in_host = rig.runner.host.reshape(rig.kv.tiers.blocks.num_blocks, -1, 3, rig.kv.page_size)
            assert not in_host[blocks, :, 2].any(), "KV that is NaN stays in host memory"
        state = rig.scheduler.state()
        assert state.num_kv_repairs == 0 and state.num_running == state.num_waiting == 0
        policy = rig.planner._policy
        if isinstance(policy, FairPolicy):
            assert not (policy.waiting or policy._num_charged)
        self._check_eviction()

    def _check_eviction(self) -> None:
        """Everything can be evicted, whatever is retained, and every retention lapses."""
        rig = self._rig
        cache = rig.kv.cache
        if self._case.seed % 2:
            rig.clock.now += 1e6
            cache.evict(0)
            assert cache.retained_size == 0, "a retention does not lapse"
        cache.evict(rig.kv.allocator.size)
        assert rig.kv.allocator.num_free == rig.kv.allocator.size and cache.retained_size == 0
        rig.kv.audit([])


def _identity(weights: int) -> bytes:
    """Of the KV of a version of the weights."""
    return f"weights {weights}".encode()

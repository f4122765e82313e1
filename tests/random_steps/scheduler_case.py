"""Runs a random case through a whole scheduler on the fake runner, and checks it after every turn.

After every turn: each slot, row and host block has one owner, no request is passed over too often, the readers of KV
events know what the cache has. At the end: every request has the output of the fake model, whatever else happened.
"""

from __future__ import annotations

from collections import defaultdict

from hash_grammar import constrained_output
from kv_event_reader import DISK, HOST
from random_steps.books import cached_slots, check_owners
from random_steps.cases import CONTEXT_LEN, POISON, Case, Happening
from random_steps.files import FakeStorage
from scheduler_rig import Rig
from tier_reader import TierReader

from fakes import expected_output
from tercet.managers.fair_policy import FairPolicy
from tercet.managers.req import Req
from tercet.managers.schedule_policy import MAX_PASSED_OVER
from tercet.mem_cache.base_prefix_cache import MatchResult
from tercet.srt.errors import PromptTooLong, QueueFull, WaitingTimeout
from tercet.srt.io_struct import AbortFinish, FlushCacheReq, LengthFinish
from tercet.srt.pause_messages import ContinueReq, PauseReq

VOCAB = 97
_TURN_S = 0.01
_AUDIT_INTERVAL = 16
"""Turns between two runs of the scheduler's own audit, which is slower than `check_owners`."""
_MAX_DRAIN_TURNS = 5_000
_MAX_DELAYED = 16
"""Passes in which a request that was passed over often enough may still be delayed by a chunk that has begun, or by a
prefix that a step computes. Earlier arrivals in chunks are not counted: each of them is computed only once."""


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
        listed = self._known.keys_in(DISK)
        assert listed <= storage.contents.keys(), "files that have gone"
        known = listed | self._known.keys_in(HOST)
        for key in storage.contents.keys() - listed:
            content = storage.contents[key]
            assert content.before not in known and not content.is_first(b"fake"), "a file is not reported"

    def _check_device(self) -> None:
        num_listed = len(self._known.reader.prefixes) * self._rig.kv.page_size
        cache = self._rig.kv.cache
        assert num_listed <= cache.evictable_size + cache.protected_size
        if not self._rig.scheduler.queues.holders():  # no discarded node is locked
            assert num_listed == cache.evictable_size


class WaitingBound:
    """Counts, independently of the policies, how often later arrivals are admitted before a request.

    Only without priorities: more urgent prompts in chunks may delay a request for any time.
    """

    def __init__(self, rig: Rig) -> None:
        self._queues = rig.scheduler.queues
        self._holders: set[Req] = set()
        self._unfinished: list[Req] = []
        self._passes: defaultdict[Req, int] = defaultdict(int)
        self._has_priorities = rig.planner._limits.preemption_threshold is not None
        self._is_fair = isinstance(rig.planner._policy, FairPolicy)

    def check(self) -> None:
        holders = set(self._queues.holders())
        admitted = holders - self._holders
        in_chunks = [*self._unfinished, *self._queues.unfinished]
        self._holders, self._unfinished = holders, list(self._queues.unfinished)
        if not admitted or self._has_priorities:
            return
        last: dict[str, int] = {}
        for req in admitted:
            group = self._group(req)
            last[group] = max(last.get(group, 0), req.arrival)
        for req in self._queues.waiting:
            if req.arrival < last.get(self._group(req), 0) and req.is_admissible:
                if self._passes[req] >= MAX_PASSED_OVER and any(one.arrival < req.arrival for one in in_chunks):
                    continue
                self._passes[req] += 1
                assert self._passes[req] <= MAX_PASSED_OVER + _MAX_DELAYED, f"{req.rid} is starved"

    def _group(self, req: Req) -> str:
        """The requests among which the bound holds."""
        return req.tenant if self._is_fair else ""


class SchedulerCase:
    """One run of a case. `num_turns`: turns so far."""

    def __init__(self, case: Case) -> None:
        self.num_turns = 0
        self._case = case
        self._rig = rig = Rig(**case.rig, context_len=CONTEXT_LEN, vocab_size=VOCAB, audit=False)
        rig.runner.poison = POISON if case.has_poison else None
        if case.has_files:
            assert rig.kv.tiers is not None
            memory = rig.runner.host.reshape(case.rig["host_blocks"], -1).view("uint8")
            rig.kv.tiers._storage = FakeStorage(memory, case.seed)
        self._listener = Listener(rig) if case.has_listener else None
        self._bound = WaitingBound(rig)
        self._check_matches()
        self._aborted: set[str] = set()

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
        rig.turn()
        rig.runner.steps.clear()
        self.num_turns += 1
        holders = rig.scheduler.queues.holders()
        check_owners(rig.kv, holders)
        if rig.kv.tiers is not None:
            rig.kv.tiers.audit()
        if self.num_turns % _AUDIT_INTERVAL == 0:
            rig.kv.audit(holders)
        self._bound.check()
        if self._listener is not None:
            self._listener.check()

    def _send(self, message: object) -> None:
        self._rig.inbox.messages.append(message)

    def _act(self, one: Happening) -> None:
        rig = self._rig
        if one.request is not None:
            rig.add(f"r{one.number}", ignore_eos=True, **one.request)
        elif one.kind == "abort":
            self._aborted.add(f"r{one.number}")
            rig.abort(f"r{one.number}")
        elif one.kind == "abort all":
            self._aborted.update(f"r{other.number}" for other in self._case.happenings if other.turn <= one.turn)
            rig.abort(None)
        elif one.kind == "late":
            rig.clock.now += 0.7
        elif one.kind == "flush":
            self._send(FlushCacheReq(one.number))
        elif one.kind == "continue":
            self._send(ContinueReq(one.number))
        else:
            self._send(PauseReq(one.number, one.kind == "retract"))

    def _check_end(self) -> None:
        rig = self._rig
        for one in self._case.happenings:
            if one.request is not None:
                self._check_answer(f"r{one.number}", **one.request)
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

    def _check_answer(
        self, rid: str, prompt: list[int], max_new_tokens: int, regex: str | None = None, **_: object
    ) -> None:
        length = max_new_tokens
        heard = self._rig.heard[rid]
        assert heard.finish is not None, f"{rid} has no end"
        if len(prompt) + length > min(CONTEXT_LEN, self._rig.kv.allocator.size):
            assert isinstance(heard.finish, AbortFinish) and heard.finish.err_type == PromptTooLong.__name__
            return
        assert heard.ids == _expected(prompt, len(heard.ids), regex), f"{rid} has other tokens"
        if not isinstance(heard.finish, AbortFinish):
            assert heard.finish == LengthFinish(length) and len(heard.ids) == length
            assert heard.last is not None
            counts = heard.last.counts
            assert counts.host_tokens + counts.storage_tokens <= counts.cached_tokens
        elif heard.finish.err_type == "InvalidLogits":
            assert POISON in _expected(prompt, length, regex)
        elif heard.finish.err_type is not None:
            assert heard.finish.err_type in (QueueFull.__name__, WaitingTimeout.__name__)
        else:
            assert rid in self._aborted or "run" in heard.finish.message


def _expected(prompt: list[int], length: int, regex: str | None) -> list[int]:
    if regex is None:
        return expected_output(prompt, 1, length, VOCAB)
    eos_ids: frozenset[int] = frozenset()
    return constrained_output(prompt, 1, length, VOCAB, grammar=int(regex), eos_ids=eos_ids, ignore_eos=True)

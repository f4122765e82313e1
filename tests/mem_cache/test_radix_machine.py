"""Random lives of random requests over allocator and radix cache together, against a model of one entry a page.

The machine plays the KV manager: it does with slots what docs/memory.md says that a manager does.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prefix_model import Page, PrefixModel

from tercet.mem_cache.allocator import make_allocator
from tercet.mem_cache.base_prefix_cache import CacheNode, RetentionOwner
from tercet.mem_cache.evict_policy import EVICT_POLICIES
from tercet.mem_cache.radix_cache import RadixCache

NAMESPACES = ["", "a", "b"]
PLAY_STEPS = 200
NUM_CASES = int(os.environ.get("TERCET_STEPS", "40000")) // PLAY_STEPS


def i32(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@dataclass
class Request:
    namespace: str
    tokens: list[int]
    node: CacheNode
    locked_len: int
    pages: list[Page]  # the model's, of the first locked_len tokens
    slots: list[int] = field(default_factory=list)  # of the first kv_len tokens


class CacheMachine(RuleBasedStateMachine):
    page_size = 1
    policies = tuple(sorted(EVICT_POLICIES))

    @initialize(pick=st.integers(0, 1000), num_pages=st.integers(4, 24))
    def build(self, pick: int, num_pages: int) -> None:
        policy = self.policies[pick % len(self.policies)]
        self.now_s = 0.0
        self.allocator = make_allocator(num_pages * self.page_size, self.page_size)
        self.cache = RadixCache(
            self.allocator, self.page_size, policy, max_retained_share=0.6, clock=lambda: self.now_s
        )
        max_retained = 0 if self.cache.retentions is None else self.cache.retentions.max_tokens
        self.model = PrefixModel(self.page_size, policy, lambda: self.now_s, max_retained)
        self.requests: list[Request] = []

    # A prompt is a few blocks out of three, each about half a page long or less, so that prompts share prefixes that
    # end at, before and after page borders.
    def tokens(self, blocks: list[int], extra: int) -> list[int]:
        length = max(self.page_size // 2, 1)
        return [block for block in blocks for _ in range(length)] + [2] * extra

    prompts = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(0, 3))
    picks = st.integers(0, 1000)

    def pick(self, number: int) -> Request:
        return self.requests[number % len(self.requests)]

    def make_room(self, num_tokens: int) -> None:
        short = num_tokens - self.allocator.num_free
        if short > 0:
            assert self.cache.evict(short) == self.model.evict(short)

    def extend(self, request: Request, num_tokens: int) -> bool:
        kv_len = len(request.slots)
        before, after = i32([kv_len]), i32([min(kv_len + num_tokens, len(request.tokens))])
        self.make_room(self.allocator.tokens_needed(before, after))
        slots = self.allocator.alloc_extend(before, after, i32(request.slots[-1:] or [0]))
        if slots is None:
            return False
        request.slots += slots.tolist()
        return True

    def insert(self, request: Request) -> tuple[int, CacheNode]:
        """Offer all KV of a request and free its duplicates; the length that is the cache's now, and its end."""
        is_discarded = any(page.is_discarded for page in request.pages)
        assert self.cache.is_discarded(request.node) == is_discarded
        if is_discarded:
            return request.locked_len, request.node
        tokens, slots = request.tokens[: len(request.slots)], request.slots
        result = self.cache.insert(i32(tokens), i32(slots), request.namespace)
        assert result[:2] == self.model.insert(request.namespace, tokens, slots)
        assert result.duplicate_len >= request.locked_len
        self.allocator.free(i32(slots[request.locked_len : result.duplicate_len]))
        return result.taken_len, result.node

    def unlock(self, request: Request) -> None:
        self.cache.unlock(request.node)
        self.model.unlock(request.pages)

    @rule(prompt=prompts, namespace=st.sampled_from(NAMESPACES), chunk=picks)
    def start(self, prompt: tuple[list[int], int], namespace: str, chunk: int) -> None:
        tokens = self.tokens(*prompt)
        match = self.cache.match(i32(tokens[:-1]), namespace)
        assert match.slots.tolist() == self.model.match(namespace, tokens[:-1])
        self.cache.lock(match.node)
        pages = self.model.lock(namespace, tokens[: len(match.slots)])
        request = Request(namespace, tokens, match.node, len(match.slots), pages, match.slots.tolist())
        if self.extend(request, 1 + chunk % len(tokens)):
            self.requests.append(request)
        else:
            self.unlock(request)

    @precondition(lambda self: self.requests)
    @rule(number=picks, num_tokens=st.integers(1, 20))
    def next_chunk(self, number: int, num_tokens: int) -> None:
        request = self.pick(number)
        if len(request.slots) < len(request.tokens):
            self.extend(request, num_tokens)

    @precondition(lambda self: self.requests)
    @rule(number=picks, by_moving=st.booleans())
    def stash(self, number: int, by_moving: bool) -> None:
        """What is there of an unfinished prompt goes to the cache, so that others can share it."""
        request = self.pick(number)
        taken_len, node = self.insert(request)
        if self.cache.is_discarded(request.node):
            return
        match = self.cache.match(i32(request.tokens[:taken_len]), request.namespace)
        assert match.slots.tolist() == self.model.match(request.namespace, request.tokens[:taken_len])
        assert len(match.slots) == taken_len and match.node is node
        if by_moving:
            self.cache.move_lock(request.node, match.node)
            request.pages += self.model.lock(request.namespace, request.tokens[:taken_len], already=request.locked_len)
        else:
            self.cache.lock(match.node)
            pages = self.model.lock(request.namespace, request.tokens[:taken_len])
            self.unlock(request)
            request.pages = pages
        request.slots[:taken_len] = match.slots.tolist()
        request.node, request.locked_len = match.node, taken_len

    @rule(token=st.integers(0, 2))
    def decode(self, token: int) -> None:
        batch = [request for request in self.requests if len(request.slots) == len(request.tokens)]
        lens = i32([len(request.tokens) for request in batch])
        self.make_room(self.allocator.tokens_needed(lens, lens + 1))
        slots = self.allocator.alloc_decode(lens + 1, i32([request.slots[-1] for request in batch]))
        if slots is not None:
            for request, slot in zip(batch, slots.tolist(), strict=True):
                request.tokens.append(token)
                request.slots.append(slot)

    @precondition(lambda self: self.requests)
    @rule(number=picks)
    def finish(self, number: int) -> None:
        request = self.pick(number)
        taken_len, _ = self.insert(request)
        self.allocator.free(i32(request.slots[taken_len:]))
        self.unlock(request)
        self.requests.remove(request)

    @precondition(lambda self: self.requests)
    @rule(number=picks)
    def abort(self, number: int) -> None:
        request = self.pick(number)
        self.allocator.free(i32(request.slots[request.locked_len :]))
        self.unlock(request)
        self.requests.remove(request)

    @rule(num_tokens=st.integers(0, 40))
    def evict(self, num_tokens: int) -> None:
        assert self.cache.evict(num_tokens) == self.model.evict(num_tokens)

    @rule(seconds=st.integers(1, 12))
    def pass_time(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(
        prompt=prompts,
        namespace=st.sampled_from(NAMESPACES),
        seconds=st.integers(0, 20),
        tenant=st.sampled_from(["", "t"]),
        session=st.sampled_from(["", "s", "u"]),
    )
    def retain(self, prompt: tuple[list[int], int], namespace: str, seconds: int, tenant: str, session: str) -> None:
        if self.cache.retentions is None:
            return
        tokens = self.tokens(*prompt)
        self.cache.retain(i32(tokens), seconds, RetentionOwner(tenant, session), namespace)
        self.model.retain(namespace, tokens, seconds, tenant, session)

    @rule(prompt=prompts, num_kept_pages=st.integers(0, 3), namespace=st.sampled_from(NAMESPACES))
    def discard(self, prompt: tuple[list[int], int], num_kept_pages: int, namespace: str) -> None:
        tokens, kept_len = self.tokens(*prompt), num_kept_pages * self.page_size
        self.cache.discard(i32(tokens), kept_len, namespace)
        self.model.discard(namespace, tokens, kept_len)

    @precondition(lambda self: self.requests)
    @rule(number=picks, num_kept_pages=st.integers(0, 3))
    def invalid(self, number: int, num_kept_pages: int) -> None:
        """A request ends, and what it computed leaves the cache."""
        request = self.pick(number)
        self.finish(number)
        kept_len = num_kept_pages * self.page_size
        self.cache.discard(i32(request.tokens), kept_len, request.namespace)
        self.model.discard(request.namespace, request.tokens, kept_len)

    @rule(prompt=prompts, namespace=st.sampled_from(NAMESPACES))
    def look(self, prompt: tuple[list[int], int], namespace: str) -> None:
        tokens = self.tokens(*prompt)
        expected = self.model.match(namespace, tokens)
        assert self.cache.match_len(i32(tokens), namespace) == len(expected)
        match = self.cache.match(i32(tokens), namespace)
        assert match.slots.tolist() == expected
        unlocked = [page for page in self.model.path(namespace, tokens) if not page.num_locks]
        evictable, protected = self.cache.evictable_size, self.cache.protected_size
        self.cache.lock(match.node, is_use=False)
        num_locked = len(unlocked) * self.page_size
        assert self.cache.evictable_size == evictable - num_locked
        assert self.cache.protected_size == protected + num_locked
        self.cache.unlock(match.node)

    @precondition(lambda self: not self.requests)
    @rule()
    def flush(self) -> None:
        self.cache.reset()
        self.allocator.clear()
        self.model.clear()

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        held = self.cache.audit()
        assert sorted(held.tolist()) == sorted(self.model.slots())
        private = i32([slot for request in self.requests for slot in request.slots[request.locked_len :]])
        self.allocator.audit(np.concatenate((held, private)))
        num_private = len(np.unique(private // self.page_size)) * self.page_size
        cached = self.cache.evictable_size + self.cache.protected_size
        assert self.allocator.num_free + cached + num_private == self.allocator.size

    @invariant()
    def the_cache_is_the_model(self) -> None:
        assert self.cache.evictable_size == self.model.num_tokens(locked=False)
        assert self.cache.protected_size == self.model.num_tokens(locked=True)
        for (namespace, tokens), page in self.model.pages.items():
            assert self.cache.match_len(i32(tokens), namespace) == len(tokens), page
        # A namespace that holds nothing leaves nothing.
        assert len(self.cache._root.children) == len({namespace for namespace, _ in self.model.pages})

    @invariant()
    def retained_tokens_are_counted_and_limited(self) -> None:
        if self.cache.retentions is not None:
            assert self.cache.retentions.num_tokens == self.model.num_retained <= self.cache.retentions.max_tokens
            assert self.cache.retentions.num_live == len(self.model.retentions)

    @invariant()
    def it_knows_what_the_ends_of_requests_would_unlock(self) -> None:
        num_unlocks: Counter[int] = Counter()
        expected = []
        for request in self.requests:
            num_unlocks.update(map(id, request.pages))
            last = [page for page in request.pages if num_unlocks[id(page)] == page.num_locks]
            expected.append(len(last) * self.page_size)
        assert list(self.cache.freed_by_unlock(request.node for request in self.requests)) == expected

    @invariant()
    def a_running_request_sees_its_own_kv(self) -> None:
        for request in self.requests:
            assert [slot for page in request.pages for slot in page.slots] == request.slots[: request.locked_len]


class PagesOf4(CacheMachine):
    page_size = 4


class PagesOf16(CacheMachine):
    page_size = 16


class WithRetention(CacheMachine):
    """Other policies honour no retention."""

    page_size = 2
    policies = ("value",)


ALWAYS = ["start", "start", "decode", "evict", "discard", "look", "pass_time", "retain"]
WITH_REQUESTS = ["next_chunk", "stash", "stash", "finish", "finish", "abort", "invalid"]
PARAMETERS = {
    name: [*signature(getattr(CacheMachine, name)).parameters][1:] for name in [*ALWAYS, *WITH_REQUESTS, "flush"]
}


def play(seed: int) -> None:
    """Runs PLAY_STEPS random rules of a machine, drawn from `seed`, and checks the invariants after each of them.

    A step costs a fraction of a step of hypothesis, which can make a failing run smaller in exchange.
    """
    try:
        _play(Random(seed))
    except Exception as error:
        error.add_note(f"repeat it with: scripts/steps --cache-case {seed}")
        raise


def _play(rng: Random) -> None:
    machine = rng.choice([CacheMachine, PagesOf4, PagesOf16, WithRetention])()
    machine.build(rng.randrange(1001), rng.randint(4, 24))
    draws: dict[str, Callable[[], object]] = {
        "prompt": lambda: ([rng.randrange(3) for _ in range(rng.randint(1, 8))], rng.randrange(4)),
        "namespace": lambda: rng.choice(NAMESPACES),
        "chunk": lambda: rng.randrange(1001),
        "number": lambda: rng.randrange(1001),
        "num_tokens": lambda: rng.randint(1, 40),
        "num_kept_pages": lambda: rng.randrange(4),
        "token": lambda: rng.randrange(3),
        "by_moving": lambda: rng.random() < 0.5,
        "seconds": lambda: rng.randint(1, 20),
        "tenant": lambda: rng.choice(["", "t"]),
        "session": lambda: rng.choice(["", "s", "u"]),
    }
    for _ in range(PLAY_STEPS):
        name = rng.choice(ALWAYS + WITH_REQUESTS if machine.requests else [*ALWAYS, "start", "start", "flush"])
        rule = getattr(machine, name)
        rule(**{argument: draws[argument]() for argument in PARAMETERS[name]})
        machine.every_slot_has_one_owner()
        machine.the_cache_is_the_model()
        machine.retained_tokens_are_counted_and_limited()
        machine.it_knows_what_the_ends_of_requests_would_unlock()
        machine.a_running_request_sees_its_own_kv()


@pytest.mark.parametrize("policy", sorted(EVICT_POLICIES))
@given(turns=st.lists(st.integers(0, 5 * 2 * 4 * 81 - 1), min_size=20, max_size=50))
def test_pages_go_in_the_order_of_the_model(policy: str, turns: list[int]) -> None:
    """Small evictions from a tree that many inserts, matches and locks have shaped: each must take the same page."""
    allocator = make_allocator(1000, 1)
    cache = RadixCache(allocator, 1, policy, clock=lambda: 0.0)
    model = PrefixModel(1, policy)
    for code in turns:  # one number a turn: drawing lists of tuples would take longer than all else
        turn = ("insert", "insert", "look", "use", "evict")[code % 5]
        number, length = code // 5 % 2, code // 10 % 4 + 1
        tokens = [code // 40 // 3**i % 3 for i in range(length)]
        if turn == "insert":
            slots = allocator.alloc_extend(i32([0]), i32([len(tokens)]), i32([0]))
            assert slots is not None
            duplicate_len = cache.insert(i32(tokens), slots).duplicate_len
            model.insert("", tokens, slots.tolist())
            allocator.free(slots[:duplicate_len])
        elif turn == "evict":
            assert cache.evict(1 + number) == model.evict(1 + number)
            assert sorted(cache.audit().tolist()) == sorted(model.slots())
        else:
            match = cache.match(i32(tokens))
            assert match.slots.tolist() == model.match("", tokens)
            if turn == "use":
                cache.lock(match.node)
                cache.unlock(match.node)
                model.unlock(model.lock("", tokens))
    while model.pages:
        assert cache.evict(1) == model.evict(1) == 1
        assert sorted(cache.audit().tolist()) == sorted(model.slots())
    allocator.audit(cache.audit())


@pytest.mark.timeout(600)
def test_many_random_steps() -> None:
    """`scripts/steps` makes millions."""
    first = 0 if os.environ.get("CI") else Random().randrange(1 << 32)
    for number in range(first, first + NUM_CASES):
        play(number)


MACHINE_SETTINGS = settings(max_examples=40, stateful_step_count=40, deadline=None)

TestPageSize1 = CacheMachine.TestCase
TestPageSize1.settings = MACHINE_SETTINGS
TestPageSize4 = PagesOf4.TestCase
TestPageSize4.settings = MACHINE_SETTINGS
TestPageSize16 = PagesOf16.TestCase
TestPageSize16.settings = MACHINE_SETTINGS
TestRetention = WithRetention.TestCase
TestRetention.settings = MACHINE_SETTINGS

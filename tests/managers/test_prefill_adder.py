"""One pass of admissions: who waits for whom, and what a pass leaves untouched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_makers import make_kv, make_req, put_into_cache
from scheduler_rig import Rig

from tercet.managers.kv_cache_manager import KVCacheManager
from tercet.managers.prefill_adder import CHUNK_SHARE, SHARE_LEN, PrefillAdder
from tercet.managers.req import Req
from tercet.managers.token_gap import MIN_TOKENS, TimeBudget


def make_adder(
    kv: KVCacheManager,
    *,
    max_tokens: int = 4096,
    expected: float = 0.0,
    unfinished: Sequence[Req] = (),
    time: TimeBudget | None = None,
) -> PrefillAdder:
    return PrefillAdder(
        kv,
        joining=(),
        max_tokens=max_tokens,
        chunk_size=max_tokens,
        expected=expected,
        unfinished=unfinished,
        engine_empty=False,
        time=time,
    )


class NoTime(TimeBudget):
    """There is no time for prompts."""

    def __init__(self) -> None: ...

    def room(self, req: Req, start: int) -> float:
        return 0.0

    def take(self, req: Req, start: int, end: int) -> None: ...


def num_common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Blocks of equal tokens: prompts agree up to places before, at and after the ends of pages."""
    blocks = draw(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([16, 31, 32, 33, 64])), min_size=1, max_size=5))
    return [token for token, length in blocks for _ in range(length)]


@settings(deadline=None, max_examples=200)
@given(
    page_size=st.sampled_from([1, 4, 16, 20, 32, 64]),
    cached=st.lists(prompts(), max_size=2),
    waiting=st.lists(prompts(), min_size=2, max_size=6),
)
def test_a_request_waits_exactly_when_it_gains_by_waiting(
    page_size: int, cached: list[list[int]], waiting: list[list[int]]
) -> None:
    kv = make_kv(page_size, pool_size=8000 // page_size * page_size)
    for prompt in cached:
        put_into_cache(kv, prompt)
    reqs = [make_req(prompt, index) for index, prompt in enumerate(waiting)]
    worth_waiting = -(-SHARE_LEN // page_size) * page_size
    expected: list[int] = []
    for index, prompt in enumerate(waiting):
        num_cached = kv.match_len(reqs[index])
        found_later = [num_common(waiting[other], prompt[:-1]) // page_size * page_size for other in expected]
        if max(found_later, default=0) - num_cached < worth_waiting:
            expected.append(index)
    adder = make_adder(kv)
    adder.fill(reqs)
    assert [extend.req.arrival for extend in adder.extends] == expected


def test_the_next_chunk_counts_as_soon_in_the_cache() -> None:
    """A short prompt that begins with the next chunk of a long one waits for it."""
    rig = Rig(pool_size=4096, context_len=4096, max_prefill_tokens=128, chunked_prefill_size=64)
    rig.add("long", list(range(90)) * 3, max_new_tokens=1)
    rig.turn()
    rig.add("short", list(range(90)) + list(range(40)), max_new_tokens=1)
    rig.run()
    assert rig.extend_sizes[:2] == [64, 64]
    assert rig.heard["short"].last.counts.cached_tokens == 128


@pytest.mark.parametrize(
    ("page_size", "prompt_len", "num_requests", "sizes"),
    [
        (64, 33, 8, [8 * 33]),  # nothing of it can be matched: the last token is always computed
        (64, 64, 8, [8 * 64]),
        (64, 65, 8, [65, 7 * 1]),
        (32, 33, 8, [33, 7 * 1]),
        (32, 64, 8, [64, 7 * 32]),  # matched whole is one page
        (32, 70, 8, [70, 7 * 6]),
        (1, 32, 8, [8 * 32]),
        (1, 33, 8, [33, 7 * 1]),
    ],
)
def test_equal_prompts_take_two_steps_at_most(
    page_size: int, prompt_len: int, num_requests: int, sizes: list[int]
) -> None:
    rig = Rig(pool_size=4096, page_size=page_size, max_running=16, max_prefill_tokens=1024, chunked_prefill_size=1024)
    for index in range(num_requests):
        rig.add(f"r{index}", [i % 31 for i in range(prompt_len)], max_new_tokens=1)
    rig.run()
    assert rig.extend_sizes == sizes


def test_a_cached_beginning_does_not_keep_equal_prompts_from_sharing_the_rest() -> None:
    rig = Rig(pool_size=4096, max_running=16, max_prefill_tokens=1024, chunked_prefill_size=1024)
    system_prompt = [5] * 60
    rig.add("seed", system_prompt, max_new_tokens=1)
    rig.run()
    for index in range(4):
        rig.add(f"r{index}", [*system_prompt, *range(60)], sampling_seed=index, max_new_tokens=1)
    rig.run()
    assert rig.extend_sizes[1:] == [60, 3 * 1]


def test_looking_at_a_request_that_does_not_fit_is_no_use_of_its_prefix() -> None:
    """Else a prefix that is waited for would stay, under lfu, and one that is used would go."""
    kv = make_kv(1, eviction="lfu")
    used, wanted = [1] * 40, [2] * 40
    put_into_cache(kv, used)
    put_into_cache(kv, wanted)
    for question in (7, 8):
        put_into_cache(kv, [*used, question])
    for _ in range(10):
        adder = make_adder(kv, expected=1e9)
        adder.fill([make_req([*wanted, 3])])
        assert not adder.extends
    kv.cache.evict(42)  # both questions and one prefix
    assert kv.match_len(make_req([*used, 3])) == 40
    assert kv.match_len(make_req([*wanted, 3])) == 0


def test_a_locked_match_is_no_room_and_stays_whatever_is_evicted() -> None:
    kv = make_kv(1, pool_size=100)
    put_into_cache(kv, [1] * 60)
    put_into_cache(kv, [2] * 30)
    match = kv.match(make_req([1] * 41))
    with kv.locked(match):
        assert kv.num_available == 100 - 40
        assert kv.cache.evict(100) == 50
    assert kv.num_available == 100
    assert kv.match_len(make_req([1] * 61)) == 40
    with pytest.raises(ZeroDivisionError), kv.locked(match):
        raise ZeroDivisionError
    assert kv.cache.evict(100) == 40


def test_a_cached_prefix_is_no_room_for_the_rest_of_its_own_request() -> None:
    """The prefix is evictable now, but not once its request is admitted."""
    kv = make_kv(1, pool_size=100)
    put_into_cache(kv, [1] * 60)
    adder = make_adder(kv)
    adder.fill([make_req([1] * 60 + [2] * 38)])  # with its output and a page, it would have to leave nothing free
    assert adder.extends == []
    adder.fill([make_req([1] * 60 + [2] * 37)])
    assert [extend.end for extend in adder.extends] == [97]


@pytest.mark.parametrize(("pool_size", "is_admitted"), [(240, False), (400, True)])
def test_a_new_request_leaves_room_for_the_rest_of_an_unfinished_prompt(pool_size: int, is_admitted: bool) -> None:
    kv = make_kv(1, pool_size=pool_size)
    long, short = make_req([1] * 200), make_req([2] * 39, 1)
    make_adder(kv, max_tokens=40).fill([long])
    assert kv.extend([long], np.array([40], np.int32)) is not None
    adder = make_adder(kv, max_tokens=40, unfinished=[long])
    adder.fill([short])
    assert [extend.req for extend in adder.extends] == ([short, long] if is_admitted else [long])
    assert (adder.refused is None) == is_admitted


def test_of_equal_lengths_an_unfinished_prompt_ends_before_a_waiting_one_begins() -> None:
    kv = make_kv(1)
    first, second = make_req([1] * 60), make_req([2] * 20, 1)
    make_adder(kv, max_tokens=40).fill([first])
    assert kv.extend([first], np.array([40], np.int32)) is not None
    adder = make_adder(kv, max_tokens=30, unfinished=[first])
    assert [extend.req for extend in adder.fill([second])] == [first, second]
    assert adder.extends[0].is_last_chunk and not adder.extends[1].is_last_chunk


def make_unfinished(kv: KVCacheManager, arrival: int, rest: int, urgency: int = 0) -> Req:
    """A prompt of which 40 tokens are computed."""
    req = make_req([arrival + 10] * (40 + rest), arrival)
    req.urgency = urgency
    make_adder(kv, max_tokens=40).fill([req])
    assert kv.extend([req], np.array([40], np.int32)) is not None
    return req


def lens(adder: PrefillAdder) -> list[tuple[int, int]]:
    """The requests of the step, and their tokens in it."""
    return [(extend.req.arrival, extend.end - extend.start) for extend in adder.extends]


@pytest.mark.parametrize(("pool_size", "is_admitted"), [(93, False), (94, True)])
def test_what_a_step_computes_is_reserved_once(pool_size: int, is_admitted: bool) -> None:
    """The unfinished prompt has 40 tokens and gets 20. It expects an output. The other one needs 32."""
    kv = make_kv(1, pool_size=pool_size)
    adder = make_adder(kv, unfinished=[make_unfinished(kv, 0, 20)])
    adder.fill([make_req([1] * 30, 1)])
    assert lens(adder) == [(0, 20), (1, 30)][: 1 + is_admitted]


@pytest.mark.parametrize("time", [None, NoTime()])
def test_no_step_has_more_tokens_than_it_may(time: TimeBudget | None) -> None:
    kv = make_kv(1)
    adder = make_adder(kv, max_tokens=10, unfinished=[make_unfinished(kv, 0, 5), make_unfinished(kv, 1, 6)], time=time)
    adder.fill([])
    assert lens(adder) == [(0, 5), (1, 5 // CHUNK_SHARE)]


def test_a_prompt_begins_only_with_a_whole_page() -> None:
    adder = make_adder(make_kv(16, pool_size=1600), max_tokens=40)
    adder.fill([make_req([1] * 30, 0), make_req([2] * 100, 1)])
    assert lens(adder) == [(0, 30)]


def test_a_prompt_that_is_due_leaves_half_of_the_step() -> None:
    kv = make_kv(1)
    due = make_unfinished(kv, 0, 500)
    adder = make_adder(kv, max_tokens=64, unfinished=[due])
    adder.fill([make_req([1] * 10, 1)], due=due)
    assert lens(adder) == [(0, 32), (1, 10)]


def test_an_urgent_prompt_that_starts_shares_its_step_with_no_less_urgent_one() -> None:
    kv = make_kv(1)
    urgent = make_req([1] * 500, 1)
    urgent.urgency = 1
    adder = make_adder(kv, max_tokens=64, unfinished=[make_unfinished(kv, 0, 20)])
    adder.fill([urgent])
    assert lens(adder) == [(1, 64)]


def test_without_a_radix_cache_no_request_waits_for_a_prefix() -> None:
    adder = make_adder(make_kv(1, radix=False))
    adder.fill([make_req([1] * 60, 0), make_req([1] * 60, 1)])
    assert lens(adder) == [(0, 60), (1, 60)]


@given(
    page_size=st.integers(1, 16), num_pages=st.integers(1, 8), odd=st.integers(0, 15), prompt_len=st.integers(1, 300)
)
def test_a_chunk_ends_its_prompt_or_a_page(page_size: int, num_pages: int, odd: int, prompt_len: int) -> None:
    kv = make_kv(page_size, pool_size=page_size * 512)
    req = make_req([1] * prompt_len)
    ends = [0]
    while ends[-1] < prompt_len:
        max_tokens = page_size * num_pages + odd % page_size
        adder = make_adder(kv, max_tokens=max_tokens, unfinished=[req] if req.kv_len else ())
        (extend,) = adder.fill([] if req.kv_len else [req])
        assert kv.extend([req], np.array([extend.end], np.int32)) is not None
        ends.append(extend.end)
        assert extend.end == prompt_len or extend.end % page_size == 0
        assert ends[-2] == extend.start < extend.end <= extend.start + max_tokens


def test_prompts_without_time_share_the_least_tokens_of_a_step() -> None:
    kv = make_kv(1)
    reqs = [make_req([number] * 50, number) for number in range(4)]
    for req in reqs:
        make_adder(kv, max_tokens=40).fill([req])
        assert kv.extend([req], np.array([40], np.int32)) is not None
    adder = make_adder(kv, unfinished=reqs, time=NoTime())
    assert [extend.end - extend.start for extend in adder.fill([])] == [10, 10, 10, MIN_TOKENS - 30]

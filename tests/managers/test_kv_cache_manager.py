"""Every change of ownership of KV by itself, with and without pages: docs/memory.md is what it says."""

from __future__ import annotations

import numpy as np
import pytest
from kv_makers import admit, extend, i32, make_kv, make_req, put_into_cache

from tercet.managers.kv_cache_manager import KVCacheManager
from tercet.managers.req import Req

PAGES = pytest.mark.parametrize("page_size", [1, 16])


def aligned(num_tokens: int, page_size: int) -> int:
    return num_tokens // page_size * page_size


def pages_to(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size) * page_size


def table(kv: KVCacheManager, req: Req, end: int, start: int = 0) -> list[int]:
    return kv.req_to_token_pool.req_to_token[req.row, start:end].tolist()


def books(kv: KVCacheManager) -> tuple[int, int, int]:
    """Tokens that are taken from the free list, evictable, protected."""
    return kv.allocator.size - kv.allocator.num_free, kv.cache.evictable_size, kv.cache.protected_size


# Admission


@PAGES
def test_admitting_a_cold_prompt_takes_a_row_and_nothing_else(page_size: int) -> None:
    kv = make_kv(page_size)
    req = make_req(range(40))
    admit(kv, req)
    assert req.row and kv.req_to_token_pool.num_free == 63
    assert (req.locked_len, req.kv_len, req.cached_tokens, req.reused_len) == (0, 0, 0, 0)
    assert books(kv) == (0, 0, 0)
    kv.audit([req])


@PAGES
def test_admitting_a_cached_prompt_locks_all_but_its_last_token(page_size: int) -> None:
    kv = make_kv(page_size)
    put_into_cache(kv, range(48))
    found = aligned(47, page_size)
    req = make_req(range(48))
    assert kv.match_len(req) == found
    match = kv.match(req)
    assert books(kv) == (48, 48, 0)
    kv.admit(req, match)
    assert books(kv) == (48, 48 - found, found)
    assert (req.locked_len, req.kv_len, req.cached_tokens, req.reused_len) == (found, found, found, found)
    assert table(kv, req, found) == match.slots.tolist()
    (update,) = kv.req_to_token_pool.take_updates()
    assert (update.row, update.start, update.slots.tolist()) == (req.row, 0, match.slots.tolist())
    assert (kv.num_available, kv.num_used) == (kv.allocator.size - found, found)
    kv.audit([req])


@PAGES
def test_a_later_admission_keeps_what_was_cached_first_and_the_shortest_prefix_that_was_reused(page_size: int) -> None:
    kv = make_kv(page_size)
    put_into_cache(kv, range(64))
    req = make_req(range(80))
    admit(kv, req)
    assert (req.kv_len, req.cached_tokens, req.reused_len) == (64, 64, 64)
    kv.release(req)
    kv.cache.evict(32)
    admit(kv, req)
    assert (req.kv_len, req.cached_tokens, req.reused_len) == (32, 64, 32)
    extend(kv, req, 80)
    kv.release(req)
    admit(kv, req)  # it finds again what it has computed itself
    assert (req.kv_len, req.cached_tokens, req.reused_len) == (aligned(79, page_size), 64, 32)


@PAGES
def test_namespaces_share_nothing(page_size: int) -> None:
    kv = make_kv(page_size)
    put_into_cache(kv, range(48), salt="a")
    assert kv.match_len(make_req(range(48), salt="a")) == aligned(47, page_size)
    assert kv.match_len(make_req(range(48), salt="b")) == kv.match_len(make_req(range(48))) == 0
    for salt, found in (("a", aligned(47, page_size)), ("b", 0), ("", 0)):
        req = make_req(range(48), salt=salt)
        admit(kv, req)
        assert req.locked_len == found


# Growth


@PAGES
def test_extending_gives_each_request_its_slots_in_the_order_of_the_requests(page_size: int) -> None:
    kv = make_kv(page_size)
    reqs = [make_req(range(60), 0), make_req(range(100, 160), 1)]
    for req in reqs:
        admit(kv, req)
    first = kv.extend(reqs, i32(20, 5))
    assert first is not None
    second = kv.extend(reqs, i32(33, 40))
    assert second is not None
    assert (len(first), len(second)) == (25, 13 + 35)
    assert [req.kv_len for req in reqs] == [33, 40]
    assert [req.locked_len for req in reqs] == [0, 0]
    assert table(kv, reqs[0], 33) == [*first[:20].tolist(), *second[:13].tolist()]
    assert table(kv, reqs[1], 40) == [*first[20:].tolist(), *second[13:].tolist()]
    assert kv.req_to_token_pool.take_updates() == [], "the step itself names its slots"
    for req in reqs:
        slots = table(kv, req, req.kv_len)
        assert [slot % page_size for slot in slots] == [i % page_size for i in range(req.kv_len)]
    assert books(kv)[0] == kv.num_private(reqs) == pages_to(33, page_size) + pages_to(40, page_size)
    kv.audit(reqs)


@PAGES
def test_extending_evicts_what_is_missing_and_no_more(page_size: int) -> None:
    kv = make_kv(page_size, 64)
    put_into_cache(kv, range(48))
    req = make_req(range(100, 180))
    admit(kv, req)
    extend(kv, req, 32)
    assert books(kv) == (64, 32, 0)
    kv.audit([req])


@PAGES
def test_extending_without_room_changes_no_request(page_size: int) -> None:
    kv = make_kv(page_size, 64)
    reqs = [make_req(range(60), 0), make_req(range(100, 160), 1)]
    for req in reqs:
        admit(kv, req)
    assert kv.extend(reqs, i32(33, 32)) is None
    assert [req.kv_len for req in reqs] == [0, 0]
    assert books(kv) == (0, 0, 0)
    assert kv.extend(reqs, i32(32, 32)) is not None
    kv.audit(reqs)


@pytest.mark.parametrize(("page_size", "demand"), [(1, 3), (16, 32)])
def test_a_decode_step_demands_a_page_for_each_request_at_the_end_of_one(page_size: int, demand: int) -> None:
    kv = make_kv(page_size, 80)
    put_into_cache(kv, range(300, 316))
    reqs = [make_req(range(100 * i, 100 * i + 30), i) for i in range(3)]
    for req, length in zip(reqs, (16, 15, 16), strict=True):
        admit(kv, req)
        extend(kv, req, length)
    assert (kv.decode_demand(reqs), kv.decode_demand([])) == (demand, 0)
    assert kv.decode_demand(reqs[1:2]) == (1 if page_size == 1 else 0)
    assert kv.num_available == 80 - kv.num_private(reqs), "what is cached can be evicted"
    assert kv.decode_shortfall(reqs) == demand - kv.num_available
    assert kv.has_room_for_decode(reqs) and not kv.has_room_for_decode(reqs[:1] * (kv.num_available // page_size + 1))


@PAGES
def test_decoding_gives_every_row_its_next_slot_and_evicts_for_it(page_size: int) -> None:
    kv = make_kv(page_size, 64)
    put_into_cache(kv, range(300, 332))
    reqs = [make_req(range(100 * i, 100 * i + 30), i) for i in range(2)]
    for req, length in zip(reqs, (16, 15), strict=True):
        admit(kv, req)
        extend(kv, req, length)
    free = kv.allocator.num_free
    evictable = kv.cache.evictable_size
    demand = kv.decode_demand(reqs)
    slots = kv.decode(i32(*(req.row for req in reqs)), i32(16, 15))
    assert [req.kv_len for req in reqs] == [16, 15], "the caller bumps it"
    for req in reqs:
        req.kv_len += 1
    assert [table(kv, req, req.kv_len)[-1] for req in reqs] == slots.tolist()
    if page_size > 1:
        assert slots[1] == table(kv, reqs[1], 15)[-1] + 1, "its page goes on"
        assert slots[0] % page_size == 0, "a new page"
    assert kv.cache.evictable_size == evictable - max(demand - free, 0)
    kv.audit(reqs)


# Sharing


@PAGES
def test_sharing_gives_whole_pages_to_the_cache_and_locks_them(page_size: int) -> None:
    kv = make_kv(page_size)
    req = make_req(range(60))
    admit(kv, req)
    slots = extend(kv, req, 40)
    kv.share(req)
    shared = aligned(40, page_size)
    assert (req.locked_len, req.kv_len) == (shared, 40)
    assert books(kv) == (pages_to(40, page_size), 0, shared)
    assert table(kv, req, 40) == slots.tolist()
    assert kv.req_to_token_pool.take_updates() == [], "they are the slots that it had"
    assert kv.private_slots([req]).tolist() == slots[shared:].tolist()
    kv.share(req)  # nothing is new
    assert books(kv) == (pages_to(40, page_size), 0, shared)
    kv.audit([req])


@PAGES
def test_of_two_equal_prompts_the_second_takes_over_the_slots_of_the_first(page_size: int) -> None:
    kv = make_kv(page_size)
    first, second = make_req(range(60), 0), make_req(range(60), 1)
    for req in (first, second):
        admit(kv, req)
    kept, own = extend(kv, first, 40), extend(kv, second, 45)
    kv.share(first)
    free = kv.allocator.num_free
    kv.share(second)
    duplicates, taken = aligned(40, page_size), aligned(45, page_size)
    assert kv.allocator.num_free == free + duplicates
    assert second.locked_len == taken
    assert table(kv, second, 45) == [*kept[:duplicates].tolist(), *own[duplicates:].tolist()]
    (update,) = kv.req_to_token_pool.take_updates()
    assert (update.row, update.start, len(update.slots)) == (second.row, 0, duplicates)
    assert kv.cache.protected_size == taken
    kv.audit([first, second])


@PAGES
def test_the_lock_moves_with_the_chunks_and_goes_with_the_request(page_size: int) -> None:
    kv = make_kv(page_size)
    req = make_req(range(70))
    admit(kv, req)
    for end in (20, 47, 70):
        extend(kv, req, end)
        kv.share(req)
        assert req.locked_len == kv.cache.protected_size == aligned(end, page_size)
        kv.audit([req])
    kv.release(req)
    assert books(kv) == (aligned(70, page_size), aligned(70, page_size), 0)


def test_without_a_prefix_cache_everything_stays_private() -> None:
    kv = make_kv(16, radix=False)
    req = make_req(range(60))
    admit(kv, req)
    slots = extend(kv, req, 40)
    kv.share(req)
    assert (req.locked_len, kv.private_slots([req]).tolist()) == (0, slots.tolist())
    kv.audit([req])
    kv.release(req)
    assert books(kv) == (0, 0, 0)
    kv.audit([])


# Release


@PAGES
def test_releasing_leaves_whole_pages_in_the_cache_and_frees_the_rest(page_size: int) -> None:
    kv = make_kv(page_size)
    req = make_req(range(40), output=[900, 901, 902])
    admit(kv, req)
    slots = extend(kv, req, 42)  # the newest token has no KV yet
    kv.release(req)
    kept = aligned(42, page_size)
    assert books(kv) == (kept, kept, 0)
    assert (req.row, req.kv_len, req.locked_len, req.node) == (0, 0, 0, None)
    assert kv.req_to_token_pool.num_free == 64
    match = kv.match(make_req([*range(40), 900, 901, 902, 903]))
    assert match.slots.tolist() == slots[:kept].tolist()
    kv.audit([])


@PAGES
def test_kv_beyond_the_known_tokens_is_freed(page_size: int) -> None:
    """A step in flight has computed it for a token that the host does not know."""
    kv = make_kv(page_size)
    req = make_req(range(47), output=[900])
    admit(kv, req)
    extend(kv, req, 50)
    kv.release(req)
    assert books(kv)[:2] == (48, 48)
    kv.audit([])


@PAGES
def test_releasing_frees_the_copies_of_what_the_cache_had(page_size: int) -> None:
    kv = make_kv(page_size)
    first, second = make_req(range(60), 0), make_req(range(60), 1)
    for req in (first, second):
        admit(kv, req)
        extend(kv, req, 40)
    kv.release(first)
    kv.release(second)
    kept = aligned(40, page_size)
    assert books(kv) == (kept, kept, 0)
    kv.audit([])


# Discarding


@PAGES
def test_discarding_keeps_what_was_reused_and_drops_all_that_was_computed_on_top(page_size: int) -> None:
    kv = make_kv(page_size)
    put_into_cache(kv, range(32))
    req = make_req(range(64))
    admit(kv, req)
    extend(kv, req, 64)
    kv.release(req)
    put_into_cache(kv, [*range(64), *range(500, 532)])  # another request, on top of it
    put_into_cache(kv, [*range(32), *range(700, 732)])  # one that shares only what was good
    assert books(kv)[1] == 64 + 32 + 32
    kv.discard(req)
    assert books(kv) == (64, 64, 0)
    assert kv.match_len(make_req(range(64))) == 32
    assert kv.match_len(make_req([*range(32), *range(700, 733)])) == 64
    kv.audit([])


@PAGES
def test_a_request_on_a_discarded_prefix_offers_nothing_and_frees_everything(page_size: int) -> None:
    kv = make_kv(page_size)
    bad, beside = make_req(range(64), 0), make_req(range(90), 1)
    admit(kv, bad)
    extend(kv, bad, 64)
    kv.share(bad)
    admit(kv, beside)
    assert beside.locked_len == 64
    kv.release(bad)
    kv.discard(bad)
    assert books(kv) == (64, 0, 64)
    extend(kv, beside, 90)
    kv.share(beside)
    assert beside.locked_len == 64
    assert len(kv.private_slots([beside])) == 26 and kv.num_private([beside]) == pages_to(90, page_size) - 64
    kv.audit([beside])
    kv.release(beside)
    assert books(kv) == (0, 0, 0)
    kv.audit([])


# The whole pool


@PAGES
def test_private_slots_are_those_between_the_lock_and_the_end(page_size: int) -> None:
    kv = make_kv(page_size)
    put_into_cache(kv, range(32))
    reqs = [make_req(range(60), 0), make_req(range(100, 160), 1)]
    for req in reqs:
        admit(kv, req)
    own = kv.extend(reqs, i32(50, 7))
    assert own is not None
    assert kv.private_slots(reqs).tolist() == own.tolist()
    assert kv.num_private(reqs) == pages_to(50, page_size) - 32 + pages_to(7, page_size)
    assert kv.num_used == 32 + kv.num_private(reqs)
    assert kv.private_slots([]).tolist() == [] and kv.num_private([]) == 0
    kv.check_sums(reqs)


@PAGES
def test_sums_that_do_not_add_up_are_told(page_size: int) -> None:
    kv = make_kv(page_size)
    req = make_req(range(40))
    admit(kv, req)
    extend(kv, req, 40)
    with pytest.raises(AssertionError, match="tokens accounted for"):
        kv.check_sums([])
    kv.check_sums([req])
    kv.req_to_token_pool.alloc()
    with pytest.raises(AssertionError, match="62 rows free and 1 held, of 64"):
        kv.check_sums([req])


@PAGES
def test_a_slot_with_two_owners_is_found(page_size: int) -> None:
    kv = make_kv(page_size)
    reqs = [make_req(range(40), 0), make_req(range(100, 140), 1)]
    for req in reqs:
        admit(kv, req)
        extend(kv, req, 32)
    rows = kv.req_to_token_pool.req_to_token
    rows[reqs[1].row, :32] = rows[reqs[0].row, :32]
    kv.check_sums(reqs)
    with pytest.raises(AssertionError):
        kv.audit(reqs)


@PAGES
def test_flushing_forgets_everything(page_size: int) -> None:
    kv = make_kv(page_size)
    put_into_cache(kv, range(48))
    kv.req_to_token_pool.alloc()  # a row that was lost: the idle audit flushes then, too
    kv.flush()
    assert books(kv) == (0, 0, 0)
    assert kv.match_len(make_req(range(48))) == 0
    assert np.array_equal(extend_of_new(kv, 16), np.arange(page_size, page_size + 16))
    assert kv.req_to_token_pool.num_free == 63


def extend_of_new(kv: KVCacheManager, length: int) -> np.ndarray:
    req = make_req(range(900, 900 + length))
    admit(kv, req)
    return extend(kv, req, length)

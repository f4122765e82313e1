from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_rig import Rig

from fakes import expected_output


def cached_tokens(rig: Rig, rid: str) -> int:
    last = rig.heard[rid].last
    assert last is not None
    return last.counts.cached_tokens


def run(rig: Rig, rid: str, prompt: list[int], **sampling: object) -> int:
    """Runs a request alone. Returns how many tokens of its prompt it has found."""
    rig.add(rid, prompt, **sampling)
    rig.run()
    max_new_tokens = sampling.get("max_new_tokens", 8)
    assert rig.heard[rid].ids == expected_output(prompt, 1, max_new_tokens, rig.runner.vocab_size)
    return cached_tokens(rig, rid)


def numbers(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


def wide_rig(**options: object) -> Rig:
    """Prompts are computed in one step."""
    limits = {"context_len": 512, "pool_size": 4096, "max_prefill_tokens": 400, "chunked_prefill_size": 400}
    return Rig(**{"saved_states": 16, "min_gain": 16, **limits, **options})


@pytest.mark.parametrize("overlap", [True, False])
def test_the_same_prompt_is_found_up_to_its_tail(overlap: bool) -> None:
    rig = Rig(saved_states=4, overlap=overlap)
    prompt = numbers(0, 40)
    assert [run(rig, str(k), prompt) for k in range(3)] == [0, 38, 39]


def test_the_next_turn_of_a_chat_finds_the_answer() -> None:
    rig = Rig(saved_states=4)
    prompt = numbers(0, 40)
    run(rig, "a", prompt, max_new_tokens=20)
    assert run(rig, "b", [*prompt, *rig.heard["a"].ids, *numbers(1, 9)]) == 59


def test_with_pages_the_newest_state_is_that_of_a_whole_page() -> None:
    rig = Rig(saved_states=4, page_size=8)
    prompt = numbers(0, 40)
    run(rig, "a", prompt, max_new_tokens=20)
    assert run(rig, "b", [*prompt, *rig.heard["a"].ids, *numbers(1, 9)]) == 56
    assert run(rig, "c", prompt) == 32


def test_a_common_beginning_is_found_by_the_third_request() -> None:
    rig = Rig(saved_states=8)
    system = numbers(0, 30)
    assert [run(rig, str(k), [*system, *numbers(10 + k, 12)]) for k in range(4)] == [0, 0, 30, 30]


def test_a_short_common_beginning_is_no_reason_to_save_nothing_else() -> None:
    rig = Rig(saved_states=8, min_gain=16)
    prompts = [[*numbers(0, 10), *numbers(10 + k, 30)] for k in range(2)]
    assert [run(rig, str(k), prompts[k % 2], max_new_tokens=1) for k in range(4)] == [0, 0, 38, 38]


@pytest.mark.parametrize("overlap", [True, False])
def test_requests_of_one_token_leave_the_state_of_their_common_beginning(overlap: bool) -> None:
    """They end in the step that saves it, and their last state must not take its place."""
    rig = wide_rig(min_gain=8, overlap=overlap)
    system = numbers(0, 40)
    found = [run(rig, str(k), [*system, *numbers(10 + k, 30)], max_new_tokens=1) for k in range(4)]
    assert found == [0, 0, 40, 40]


@pytest.mark.parametrize("num_tokens", [64, 70, 75, 90])
def test_the_end_of_a_chunk_takes_nothing_from_the_end_of_the_prompt(num_tokens: int) -> None:
    rig = wide_rig(max_prefill_tokens=64, chunked_prefill_size=64)
    prompt = numbers(3, num_tokens)
    assert [run(rig, str(k), prompt, max_new_tokens=40) for k in range(2)] == [0, num_tokens - 2]


@pytest.mark.parametrize("num_common", [64, 70])
def test_the_end_of_a_chunk_takes_nothing_from_a_common_beginning(num_common: int) -> None:
    rig = wide_rig(max_prefill_tokens=64, chunked_prefill_size=64)
    system = numbers(0, num_common)
    found = [run(rig, str(k), [*system, *numbers(10 + k, 40)], max_new_tokens=20) for k in range(4)]
    assert found == [0, 0, num_common, num_common]


def test_decoding_requests_leave_half_of_the_rows_to_prefixes() -> None:
    rig = wide_rig(saved_states=8, min_gain=8, page_size=8, max_running=16, pool_size=8192)
    system = numbers(0, 40)
    for k in range(3):
        run(rig, f"a{k}", [*system, *numbers(10 + k, 12)], max_new_tokens=1)
    for k in range(12):
        rig.add(f"b{k}", [*system, *numbers(30 + k, 12)], max_new_tokens=100)
    for _ in range(40):
        rig.turn()
    assert rig.kv.cache.num_taken_rows == 4
    rig.add("c", [*system, *numbers(50, 12)], max_new_tokens=1)
    rig.run()
    assert cached_tokens(rig, "c") == 40


def test_with_pages_of_a_token_decoding_requests_take_no_rows() -> None:
    rig = wide_rig(min_gain=4)
    rig.add("a", numbers(0, 40), max_new_tokens=100)
    for _ in range(50):
        rig.turn()
    assert rig.kv.cache.num_taken_rows == 0 and rig.kv.cache.num_states == 1


@pytest.mark.parametrize(("saved_states", "sizes"), [(1, [400, 80]), (3, [120, 70])])
def test_prompts_wait_only_for_as_many_states_as_can_be_saved(saved_states: int, sizes: list[int]) -> None:
    """In each turn another prompt of higher priority takes a row first."""
    rig = wide_rig(saved_states=saved_states, min_gain=8, preemption_threshold=100)
    for k in range(6):
        rig.add(f"a{k}", numbers(7, 60), max_new_tokens=1)
    for k in range(6):
        rig.add(f"b{k}", numbers(100 + k, 60), max_new_tokens=1, priority=1)
        rig.turn()
    rig.run()
    assert rig.extend_sizes[:2] == sizes


def test_a_state_of_another_request_on_the_same_node_stays() -> None:
    """The state at the end of a chunk is dropped with the next one, but not one that was there before."""
    rig = wide_rig(max_prefill_tokens=64, chunked_prefill_size=64)
    run(rig, "a", numbers(0, 66), max_new_tokens=1)
    assert run(rig, "b", numbers(0, 200), max_new_tokens=1) == 64
    assert run(rig, "c", numbers(0, 66), max_new_tokens=1) == 64


def test_no_copy_of_a_flushed_state_is_made() -> None:
    rig = wide_rig(min_gain=4)
    run(rig, "a", numbers(0, 40))
    rig.kv.flush()
    run(rig, "b", numbers(1, 40))
    assert [step.state_copies for step in rig.runner.steps if step.rows[0]][-8] is None


def test_equal_prompts_wait_a_step_for_the_state_of_the_first() -> None:
    rig = Rig(saved_states=4, max_prefill_tokens=200, chunked_prefill_size=200)
    for k in range(3):
        rig.add(str(k), numbers(0, 40), max_new_tokens=1)
    rig.run()
    assert rig.extend_sizes == [40, 4]


@pytest.mark.parametrize(("min_gain", "sizes"), [(10, [42, 42, 24]), (31, [42, 126])])
def test_prompts_do_not_wait_for_kv_without_a_state(min_gain: int, sizes: list[int]) -> None:
    """The second wave waits for the state where its prompts branch off, but only if it will be saved."""
    rig = Rig(saved_states=8, max_prefill_tokens=200, chunked_prefill_size=200, min_gain=min_gain)
    system = numbers(0, 30)
    rig.add("a", [*system, *numbers(9, 12)], max_new_tokens=1)
    rig.run()
    for k in range(3):
        rig.add(str(k), [*system, *numbers(10 + k, 12)], max_new_tokens=1)
    rig.run()
    assert rig.extend_sizes == sizes


def test_a_long_prompt_goes_on_where_it_was_retracted() -> None:
    """Its chunks save states, each of which takes the place of the one before."""
    rig = Rig(saved_states=8, chunked_prefill_size=16, max_prefill_tokens=16)
    rig.add("a", numbers(0, 100))
    for _ in range(4):
        rig.turn()
    rig.abort("a")
    rig.run()
    assert rig.kv.cache.num_states == 1
    assert run(rig, "b", numbers(0, 100)) == 64


def test_a_state_that_gains_too_little_is_not_saved() -> None:
    rig = Rig(saved_states=4, min_gain=16)
    prompt = numbers(0, 40)
    lens = [15, 15, 18, 18, 30, 30]
    found = [run(rig, str(k), prompt[:length], max_new_tokens=1) for k, length in enumerate(lens)]
    assert found == [0, 0, 0, 16, 16, 16]


def test_the_least_recently_used_state_gives_way() -> None:
    rig = Rig(saved_states=2, min_gain=5)
    prompts = [numbers(k, 20) for k in range(3)]
    for k in (0, 1):
        run(rig, f"a{k}", prompts[k], max_new_tokens=1)
    assert run(rig, "b", prompts[0], max_new_tokens=1) == 18
    run(rig, "c", prompts[2], max_new_tokens=1)
    assert [run(rig, f"d{k}", prompts[k], max_new_tokens=1) for k in (2, 0)] == [18, 18]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    saved_states=st.integers(1, 6),
    page_size=st.sampled_from([1, 2, 4]),
    pool_size=st.sampled_from([64, 96, 256]),
    chunk=st.sampled_from([8, 16, 64]),
    mixed=st.booleans(),
    overlap=st.booleans(),
    min_gain=st.integers(1, 12),
    eviction=st.sampled_from(["lru", "value"]),
)
def test_random_requests_continue_their_own_states(
    seed: int,
    saved_states: int,
    page_size: int,
    pool_size: int,
    chunk: int,
    mixed: bool,
    overlap: bool,
    min_gain: int,
    eviction: str,
) -> None:
    """The fake states check every step. All tokens are right, and every row and slot has one owner after each turn."""
    rng = np.random.default_rng(seed)
    rig = Rig(
        saved_states=saved_states,
        page_size=page_size,
        pool_size=pool_size,
        max_running=4,
        chunked_prefill_size=chunk,
        max_prefill_tokens=chunk,
        mixed=mixed,
        overlap=overlap,
        min_gain=min_gain,
        eviction=eviction,
    )
    starts = [numbers(int(rng.integers(100)), int(rng.integers(1, 40))) for _ in range(3)]
    prompts: dict[str, tuple[list[int], int]] = {}
    aborted = set()
    for k in range(24):
        prompt = [*starts[int(rng.integers(3))], *numbers(int(rng.integers(4)), int(rng.integers(1, 12)))]
        if rng.random() < 0.4 and prompts:
            other = str(rng.choice(list(prompts)))
            prompt = [*prompts[other][0], *rig.heard[other].ids, *numbers(k, 2)]
        prompt = prompt[: pool_size - 20]
        prompts[str(k)] = prompt, int(rng.integers(0, 16))
        rig.add(str(k), prompt, max_new_tokens=prompts[str(k)][1])
        for _ in range(int(rng.integers(0, 6))):
            rig.turn()
        if rng.random() < 0.1:
            aborted.add(str(k))
            rig.abort(str(k))
    rig.run()
    for rid, (prompt, max_new_tokens) in prompts.items():
        if rid not in aborted:
            assert rig.heard[rid].ids == expected_output(prompt, 1, max_new_tokens, rig.runner.vocab_size)

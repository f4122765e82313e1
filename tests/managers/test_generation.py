from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S

from tercet.managers.generation import MAX_BACKLOG, Generation, OutputReader
from tercet.srt.io_struct import Counts, LengthFinish, TextOut, TokenOut


class Owner:
    rid = "r"
    prompt_ids = (1, 2)

    def stop(self, generation: Generation) -> None: ...

    def held_text(self, generation: Generation) -> str:
        return ""

    def on_end(self, generation: Generation) -> None: ...


def make(count: int) -> list[Generation]:
    return [Generation(Owner(), i, str(i)) for i in range(count)]


def push(generation: Generation, token: int, *, last: bool = False) -> None:
    counts = Counts(2, token + 1, 0, 0, 0.5 if last else None)
    finish = LengthFinish(token + 1) if last else None
    tokens = TokenOut(rid="r", token_ids=[token], finish=finish, counts=counts)
    generation.push(TextOut(tokens=tokens, text=f"{token} "))


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("num_tokens", [1, MAX_BACKLOG, MAX_BACKLOG + 1, 10 * MAX_BACKLOG + 7])
def test_what_waits_for_a_slow_reader_is_bounded_and_whole(num_tokens: int) -> None:
    (generation,) = make(1)
    for token in range(num_tokens):
        push(generation, token, last=token == num_tokens - 1)
        assert len(generation._waiting) <= MAX_BACKLOG
    out = generation.take()
    assert out.token_ids == list(range(num_tokens))
    assert out.text == "".join(f"{token} " for token in range(num_tokens))
    assert out.finish == LengthFinish(num_tokens) and out.counts.completion_tokens == num_tokens
    assert out.counts.queue_time_s == 0.5


def test_an_end_without_a_token_keeps_the_last_counts() -> None:
    (generation,) = make(1)
    push(generation, 0)
    end = TokenOut(rid="r", token_ids=[], finish=LengthFinish(1), counts=Counts(2, 1, 0, 0, 0.25))
    generation.push(TextOut(tokens=end, text=""))
    assert generation.take().counts.queue_time_s == 0.25


def test_a_step_wakes_the_reader_once() -> None:
    """All samples of a request that have a token in a step come together."""

    async def run() -> list[list[tuple[int, list[int]]]]:
        generations = make(4)
        batches = []

        async def read() -> None:
            reader = OutputReader(generations)
            while batch := await reader.next():
                batches.append([(place, out.token_ids) for place, out in batch])

        reading = asyncio.create_task(read())
        for token in range(3):
            await settle()
            for generation in generations[token:]:
                push(generation, token, last=token == 2 or generation.index == token)
        await asyncio.wait_for(reading, PATIENCE_S)
        return batches

    assert asyncio.run(run()) == [
        [(0, [0]), (1, [0]), (2, [0]), (3, [0])],
        [(1, [1]), (2, [1]), (3, [1])],
        [(2, [2]), (3, [2])],
    ]


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=40))
def test_a_reader_loses_nothing(schedule: list[tuple[int, bool]]) -> None:
    """`schedule`: which sample has a token next, and whether the reader runs then."""

    async def run() -> None:
        generations = make(3)
        seen: dict[int, list[int]] = {0: [], 1: [], 2: []}

        async def read() -> None:
            reader = OutputReader(generations)
            while batch := await reader.next():
                for place, out in batch:
                    seen[place] += out.token_ids

        reading = asyncio.create_task(read())
        sent = [0, 0, 0]
        for place, runs in schedule:
            push(generations[place], sent[place])
            sent[place] += 1
            if runs:
                await settle()
        for place, generation in enumerate(generations):
            push(generation, sent[place], last=True)
        await asyncio.wait_for(reading, PATIENCE_S)
        assert seen == {place: list(range(count + 1)) for place, count in enumerate(sent)}

    asyncio.run(run())

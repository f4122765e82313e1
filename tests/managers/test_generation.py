from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S

from tercet.managers.generation import MAX_BACKLOG, Generation, OutputReader, error_of
from tercet.srt.errors import QueueFull, TercetError
from tercet.srt.io_struct import AbortFinish, Counts, GenerateReq, LengthFinish, TextOut, TokenOut, pack_ids
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams

OPTIONS = RequestOptions(sampling=SamplingParams())


class Owner:
    rid = "r"
    prompt_ids = (1, 2)
    options = OPTIONS

    def __init__(self) -> None:
        self.told: list[str] = []

    def stop(self, generation: Generation) -> None:
        self.told.append("stop")

    def held_text(self, generation: Generation) -> str:
        return "(held)"

    def on_end(self, generation: Generation) -> None:
        self.told.append("end")


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


def test_a_sample_without_tokens_has_no_time_of_a_first_token() -> None:
    (generation,) = make(1)
    end = TokenOut(rid="r", token_ids=[], finish=LengthFinish(0), counts=Counts(2))
    generation.push(TextOut(tokens=end, text=""))
    assert generation.first_token_s is None and generation.finished_s is not None


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


def fail(generation: Generation) -> None:
    """An error of the detokenizer ends the sample. The scheduler continues it."""
    finish = AbortFinish.of(TercetError("odd"))
    end = TokenOut(rid="r", token_ids=[], finish=finish, counts=Counts(0))
    generation.push(TextOut(tokens=end, text=""))


def test_a_sample_that_was_aborted_before_the_queue_refused_it_is_not_sent_again() -> None:
    async def run() -> None:
        (generation,) = make(1)
        sent_again: list[str] = []
        generation.on_queue_full = lambda: sent_again.append(generation.key)
        generation.hold(GenerateReq(rid="0", input_ids=pack_ids([1, 2]), options=OPTIONS))
        generation.mark_sent()
        generation.abort()
        refused = TokenOut(rid="0", token_ids=[], finish=AbortFinish.of(QueueFull("full")), counts=Counts(0))
        generation.push(TextOut(tokens=refused, text=""))
        assert generation.is_over and not sent_again
        assert isinstance(generation.take().finish, AbortFinish)

    asyncio.run(run())


EVENTS = ("send", "token", "last", "error", "abort", "close", "fail", "lose")


@given(st.lists(st.sampled_from(EVENTS), max_size=12))
def test_a_sample_ends_once_whatever_happens(events: list[str]) -> None:
    """The engine is told to stop at most once, and only a sample that it has and does not end."""

    async def run() -> None:
        owner = Owner()
        generation = Generation(owner, 0, "0")
        outs: list[TextOut] = []
        generation.notify(lambda: outs.append(generation.take()))
        generation.hold(GenerateReq(rid="0", input_ids=pack_ids([1, 2]), options=OPTIONS))
        num_tokens, num_stops, end = 0, 0, ""
        for event in events:
            has = generation.is_sent and not end
            can_stop = has and not num_stops
            if event == "send" and generation.waits_for_engine:
                generation.mark_sent()
            elif event in ("token", "last") and has:
                push(generation, num_tokens, last=event == "last")
                num_tokens += 1
                end = event if event == "last" else ""
            elif event == "error" and has:
                fail(generation)
                end, num_stops = event, num_stops + can_stop
            elif event == "abort":
                generation.abort()
                end, num_stops = end if end or has else event, num_stops + can_stop
            elif event in ("close", "fail"):
                generation.close() if event == "close" else generation.fail(TercetError("odd"))
                end, num_stops = end or event, num_stops + can_stop
            elif event == "lose":
                assert generation.lose((), 0.0) == can_stop
                end = "abort" if has and not can_stop else end
            assert generation.is_over == bool(end)
            assert owner.told.count("end") == bool(end) and owner.told.count("stop") == num_stops
            assert [out.finish is not None for out in outs] == [False] * (len(outs) - bool(end)) + [True] * bool(end)
        assert [token for out in outs for token in out.token_ids] == generation.output_ids == list(range(num_tokens))
        shows_held = end == "abort" and num_tokens > 0  # nobody else will send the end of its text
        assert "".join(out.text for out in outs).endswith("(held)") == shows_held
        assert not end or (error_of(outs[-1].finish) is not None) == (end in ("error", "fail"))
        assert generation.is_complete == (end == "last")

    asyncio.run(run())

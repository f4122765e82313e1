"""Log probabilities through the scheduler: complete, once each, in any schedule, with and without cached prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_rig import Heard, Rig

from fakes import expected_input, expected_logprobs, expected_output, score
from tercet.managers.req_logprobs import ReqLogprobs
from tercet.srt.io_struct import AbortFinish, Resumed
from tercet.srt.logprobs import LogprobOptions, Logprobs, NewLogprobs

VOCAB = 97
TOP = LogprobOptions(logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=[5, 3])


def wishes(prompt_len: int) -> st.SearchStrategy[LogprobOptions]:
    return st.builds(
        LogprobOptions,
        logprob_start_len=st.integers(-1, prompt_len),
        top_logprobs_num=st.integers(0, 3),
        token_ids_logprob=st.lists(st.integers(0, VOCAB - 1), max_size=2),
    )


def check(heard: Heard, prompt: list[int], wish: LogprobOptions) -> None:
    got = NewLogprobs.joined(heard.logprobs)
    assert heard.logprobs[0].input is not None and all(news.input is None for news in heard.logprobs[1:])
    assert (got.input, got.output) == expected_logprobs(prompt, heard.ids, wish, VOCAB)


@st.composite
def schedules(draw):
    """Settings of a rig that retracts and chunks, and requests with common prefixes: prompt, wish, tokens, stream."""
    page = draw(st.sampled_from([1, 4]))
    rig = {
        "page_size": page,
        "pool_size": draw(st.sampled_from([64, 96, 256])),
        "chunked_prefill_size": draw(st.sampled_from([4, 8, 64])),
        "max_prefill_tokens": draw(st.sampled_from([16, 64])),
        "max_running": draw(st.integers(1, 4)),
        "mixed": draw(st.booleans()),
        "overlap": draw(st.booleans()),
        "conservativeness": draw(st.sampled_from([0.1, 1.0])),
        "stream_interval": draw(st.sampled_from([1, 3])),
    }
    common = list(range(1, 1 + draw(st.sampled_from([0, 9, 24]))))
    requests = []
    for _ in range(draw(st.integers(1, 6))):
        prompt = common + draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
        wish = draw(st.none() | wishes(len(prompt)))
        requests.append((prompt, wish, draw(st.integers(1, 16)), draw(st.booleans())))
    return rig, requests


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_every_schedule_gives_the_same(drawn) -> None:
    options, requests = drawn
    rig = Rig(**options)
    for number, (prompt, wish, max_new, stream) in enumerate(requests):
        rig.add(str(number), prompt, stream=stream, logprobs=wish, max_new_tokens=max_new, sampling_seed=number)
    rig.run()
    for number, (prompt, wish, max_new, _) in enumerate(requests):
        heard = rig.heard[str(number)]
        assert heard.ids == expected_output(prompt, number, max_new, VOCAB)
        if wish is None:
            assert heard.logprobs == []
        else:
            check(heard, prompt, wish)


def test_a_prefix_is_taken_from_the_cache_up_to_the_first_position_that_is_asked_for() -> None:
    rig = Rig()
    prompt = list(range(1, 31))
    rig.add("first", prompt)
    rig.run()
    for start, cached in ((0, 0), (12, 12), (28, 28), (29, 29), (30, 29), (-1, 29)):
        wish = LogprobOptions(logprob_start_len=start, top_logprobs_num=1)
        rig.add(f"from {start}", prompt, logprobs=wish)
        rig.run()
        heard = rig.heard[f"from {start}"]
        assert heard.last.counts.cached_tokens == cached
        check(heard, prompt, wish)


def test_a_retracted_request_keeps_what_it_has() -> None:
    rig = Rig(pool_size=40, max_running=4, conservativeness=0.1)
    prompts = {name: [ord(name)] * 8 for name in "abc"}
    for name, prompt in prompts.items():
        rig.add(name, prompt, logprobs=TOP, max_new_tokens=20)
    rig.run()
    assert rig.planner.num_retractions
    for name, prompt in prompts.items():
        check(rig.heard[name], prompt, TOP)


def test_a_prompt_that_is_retracted_between_two_chunks_goes_on_where_it_was() -> None:
    wish = LogprobOptions(logprob_start_len=2, top_logprobs_num=1)
    prompt = np.arange(10, 20, dtype=np.int32)
    one = ReqLogprobs(wish, prompt)
    assert one.reusable_len == 2
    first = one.plan(7, 5, 0, 4)
    assert (first.row, first.start, first.targets.tolist()) == (7, 7, [13, 14])
    assert one.reusable_len == 4
    again = one.plan(8, 0, 0, 10)  # after the retraction, without a cache: from the start
    assert (again.row, again.start, again.targets.tolist()) == (8, 4, [15, 16, 17, 18, 19])
    assert one.reusable_len is None
    assert one.plan(8, 0, 0, 12) is None  # with two output tokens, after another retraction


def test_those_of_the_prompt_are_not_sent_again_after_a_restart() -> None:
    rig, prompt = Rig(), list(range(1, 31))
    whole = expected_output(prompt, 1, 6, VOCAB)
    known = rig.heard["r"].ids = whole[:2]
    rig.add("r", prompt, logprobs=TOP, max_new_tokens=6, resumed=Resumed(known.copy(), 0, 0))
    rig.run()
    assert rig.heard["r"].ids == whole and not any(step.prompt_scores for step in rig.runner.steps)
    assert rig.heard["r"].logprobs and all(news.input is None for news in rig.heard["r"].logprobs)


def test_an_aborted_request_has_what_was_computed() -> None:
    rig = Rig(chunked_prefill_size=8, max_prefill_tokens=8)
    prompt = list(range(20))
    rig.add("a", prompt, logprobs=TOP)
    rig.turn()
    rig.abort("a")
    rig.run()
    heard = rig.heard["a"]
    assert isinstance(heard.finish, AbortFinish) and heard.ids == []
    (news,) = heard.logprobs
    assert 0 < len(news.input) < 19
    every = expected_input(prompt, TOP, VOCAB)
    assert every.own.startswith(news.input.own) and every.top.startswith(news.input.top)


@given(st.integers(1, 5), st.data())
def test_dropped_tokens_have_no_log_probabilities(num_made: int, data: st.DataObject) -> None:
    """A step may have made tokens behind a stop string."""
    one = ReqLogprobs(TOP, np.arange(1, dtype=np.int32))
    made = [score([1, token], token, TOP, VOCAB) for token in range(num_made)]
    for part in made:
        one.add_output(part)
    num_kept = data.draw(st.integers(0, num_made))
    assert one.take(num_kept).output == Logprobs.concat(made[:num_kept])
    assert one.take(0).output == Logprobs()


def test_parts_are_joined_in_order() -> None:
    parts = [Logprobs(b"abcd", b"efgh", b"ijkl"), Logprobs(b"mnop", b"qrst", b"uvwx")]
    assert Logprobs.concat(parts) == Logprobs(b"abcdmnop", b"efghqrst", b"ijkluvwx")
    assert len(Logprobs.concat(parts)) == 2 and Logprobs.concat([]) == Logprobs()
    news = [NewLogprobs(parts[0], parts[1]), NewLogprobs(None, parts[0])]
    assert NewLogprobs.joined(news) == NewLogprobs(parts[0], Logprobs.concat([parts[1], parts[0]]))
    assert NewLogprobs.joined(news[1:] * 2).input is None

"""What the tokens of a step mean for its requests: the finish test, its order, and what is told and released."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from kv_makers import admit, extend, make_kv, make_req
from scheduler_rig import StopAfter

from fakes import FakeClock, FakeInbox, FakeOutbox
from tercet.managers.batch_result import ResultProcessor
from tercet.managers.grammar import GrammarFailed
from tercet.managers.req import Req, Stage
from tercet.managers.request_queues import RequestQueues
from tercet.managers.schedule_batch import build_decode
from tercet.managers.scheduler_io import SchedulerIO
from tercet.managers.scheduler_metrics import SchedulerMetrics
from tercet.managers.token_out_reader import TokenOutReader
from tercet.model_executor.step import StepOutput
from tercet.srt.io_struct import AbortFinish, LengthFinish, StopFinish, TokenOut

CLIENT = AbortFinish("aborted by the client")


class Bench:
    """A result processor over real books, with requests that decode."""

    def __init__(self) -> None:
        self.kv = make_kv(1, 256)
        self.queues = RequestQueues()
        self._detokenizer = FakeOutbox()
        self._reader = TokenOutReader()
        self._io = SchedulerIO(FakeInbox(), self._detokenizer, FakeOutbox(), FakeClock())
        self.metrics = SchedulerMetrics(1_000, FakeClock())
        self.results = ResultProcessor(self.kv, self.queues, self._io, self.metrics)

    def add(self, arrival: int = 0, *, num_output: int = 0, **options: object) -> Req:
        """A request that decodes, with `num_output` tokens that its client knows. Its newest token has no KV yet."""
        options = {"max_new_tokens": 8, **options}
        prompt = range(1000 * arrival, 1000 * arrival + 10)
        req = make_req(prompt, arrival, output=[70] * num_output, **options)
        req.num_sent = num_output
        self.queues.add(req)
        admit(self.kv, req)
        extend(self.kv, req, req.num_tokens - 1)
        self.queues.start(req, whole=True)
        return req

    def step(self, *tokens: Sequence[int]) -> list[TokenOut]:
        """A decode step of all that run, which gives each its `tokens`; what their clients are told."""
        reqs = list(self.queues.running)
        for req in reqs:
            req.num_steps_in_flight += 1
        batch = build_decode(self.kv, reqs)
        flat = np.array([token for row in tokens for token in row], dtype=np.int32)
        self.results.process(batch, StepOutput(flat, np.array([len(row) for row in tokens], dtype=np.int32)))
        return self.told()

    def told(self) -> list[TokenOut]:
        self._io.flush(lambda: None)
        messages, self._detokenizer.messages = self._detokenizer.messages, []
        return [out for message in messages for out in self._reader.read(message)]

    def is_over(self, req: Req) -> bool:
        """It has left every place, and holds nothing."""
        self.kv.audit(self.queues.holders())
        assert (req.stage is Stage.FINISHED) == (self.queues.find(req.rid) is None) == (not req.row)
        assert (req.stage is Stage.FINISHED) == (req.finish is not None)
        return req.stage is Stage.FINISHED


@pytest.fixture
def bench() -> Bench:
    return Bench()


# One token


def test_a_token_that_ends_nothing_is_appended_and_told(bench: Bench) -> None:
    req = bench.add()
    (out,) = bench.step([5])
    assert (out.token_ids, out.finish, out.counts.completion_tokens) == ([5], None, 1)
    assert (req.output_ids, req.num_steps_in_flight) == ([5], 0)
    assert not bench.is_over(req)


def test_the_last_token_is_the_length_s(bench: Bench) -> None:
    req = bench.add(num_output=7)
    (out,) = bench.step([5])
    assert (out.token_ids, out.finish) == ([5], LengthFinish(8))
    assert bench.is_over(req) and bench.metrics.num_finished == 1


def test_a_request_of_0_tokens_drops_the_token_of_its_prefill_whatever_it_is(bench: Bench) -> None:
    stops = {"eos_ids": frozenset({5}), "stop_token_ids": [5], "stop_checker": StopAfter((5,))}
    req = bench.add(max_new_tokens=0, **stops)
    (out,) = bench.step([5])
    assert (out.token_ids, out.finish, req.output_ids) == ([], LengthFinish(0), [])
    assert (out.counts.prompt_tokens, out.counts.completion_tokens) == (10, 0)
    assert out.options is not None  # a detokenizer that never heard of the request needs them
    assert bench.is_over(req)


@pytest.mark.parametrize("options", [{"eos_ids": frozenset({5})}, {"stop_token_ids": [5]}])
def test_a_stop_token_ends_the_request_and_stays_in_its_output(bench: Bench, options: dict) -> None:
    req = bench.add(**options)
    (out,) = bench.step([5])
    assert (out.token_ids, out.finish, req.output_ids) == ([5], StopFinish(5), [5])
    assert bench.is_over(req)


def test_eos_is_ignored_where_the_request_says_so_and_its_own_stop_tokens_are_not(bench: Bench) -> None:
    req = bench.add(eos_ids=frozenset({5}), ignore_eos=True, stop_token_ids=[6])
    assert bench.step([5])[0].finish is None
    assert bench.step([6])[0].finish == StopFinish(6)
    assert bench.is_over(req)


def test_what_was_computed_goes_to_the_cache(bench: Bench) -> None:
    req = bench.add(eos_ids=frozenset({5}))
    bench.step([9])
    bench.step([5])
    assert bench.is_over(req)
    assert bench.kv.cache.evictable_size == 10 + 1  # all but the newest token
    assert bench.kv.allocator.num_free == 256 - 11


# The order of the finish test


def test_a_stop_string_comes_before_the_stop_token_that_completes_it(bench: Bench) -> None:
    bench.add(num_output=7, stop_checker=StopAfter((5,)), eos_ids=frozenset({5}))
    assert bench.step([5])[0].finish == StopFinish("stop")


def test_a_stop_token_comes_before_the_length(bench: Bench) -> None:
    bench.add(num_output=7, eos_ids=frozenset({5}))
    assert bench.step([5])[0].finish == StopFinish(5)


def test_a_stop_string_comes_before_the_length(bench: Bench) -> None:
    bench.add(num_output=7, stop_checker=StopAfter((5,)))
    assert bench.step([5])[0].finish == StopFinish("stop")


def test_a_pending_abort_comes_before_everything_and_its_token_is_dropped(bench: Bench) -> None:
    req = bench.add(num_output=7, stop_checker=StopAfter((5,)), eos_ids=frozenset({5}))
    bench.results.abort(req, CLIENT)
    assert bench.step([5]) == [] and not bench.is_over(req)
    bench.results.finish_aborted()
    (out,) = bench.told()
    assert (out.token_ids, out.finish, out.counts.completion_tokens) == ([], CLIENT, 7)
    assert bench.is_over(req)


def test_invalid_logits_end_a_request_alone_and_leave_nothing_in_the_cache(bench: Bench) -> None:
    bad, good = bench.add(0, eos_ids=frozenset({-1})), bench.add(1)
    outs = bench.step([-1], [6])
    finish = outs[0].finish
    assert isinstance(finish, AbortFinish)
    assert (finish.status_code, finish.err_type, outs[0].token_ids) == (500, "InvalidLogits", [])
    assert (outs[1].token_ids, outs[1].finish) == ([6], None)
    assert bench.is_over(bad) and not bench.is_over(good)
    assert bench.kv.cache.evictable_size == 0


def test_a_pending_abort_is_the_end_of_a_request_with_invalid_logits_too(bench: Bench) -> None:
    req = bench.add()
    bench.results.abort(req, CLIENT)
    (out,) = bench.step([-1])
    assert out.finish == CLIENT and bench.is_over(req)
    assert bench.kv.cache.evictable_size == 0
    bench.results.finish_aborted()
    assert bench.told() == []


# Several tokens in one step


def test_two_tokens_of_one_step_are_appended_and_told_together(bench: Bench) -> None:
    first, second = bench.add(0), bench.add(1)
    outs = bench.step([5, 6], [7])
    assert [out.token_ids for out in outs] == [[5, 6], [7]]
    assert (first.output_ids, second.output_ids) == ([5, 6], [7])


@pytest.mark.parametrize(
    ("options", "finish"),
    [
        ({"eos_ids": frozenset({5})}, StopFinish(5)),
        ({"stop_checker": StopAfter((5,))}, StopFinish("stop")),
        ({"num_output": 7}, LengthFinish(8)),
    ],
    ids=["token", "string", "length"],
)
def test_what_follows_the_token_that_ends_the_request_is_dropped(bench: Bench, options: dict, finish: object) -> None:
    req = bench.add(**options)
    (out,) = bench.step([5, 6, 7])
    assert (out.token_ids, out.finish) == ([5], finish)
    assert req.output_ids[-1] == 5 and bench.is_over(req)


def test_the_second_of_two_tokens_may_be_the_last(bench: Bench) -> None:
    req = bench.add(num_output=6, stop_checker=StopAfter((5, 6)))
    (out,) = bench.step([5, 6])
    assert (out.token_ids, out.finish) == ([5, 6], StopFinish("stop"))
    assert bench.is_over(req)


def test_invalid_logits_do_not_drop_the_tokens_before_them(bench: Bench) -> None:
    req = bench.add()
    (out,) = bench.step([5, -1])
    assert isinstance(out.finish, AbortFinish) and out.finish.err_type == "InvalidLogits"
    assert out.token_ids == req.output_ids == [5] and bench.is_over(req)
    assert bench.kv.cache.evictable_size == 0


def test_invalid_logits_behind_the_last_token_change_the_cache_and_not_the_end(bench: Bench) -> None:
    req = bench.add(eos_ids=frozenset({6}))
    (out,) = bench.step([5, 6, -1])
    assert (out.token_ids, out.finish) == ([5, 6], StopFinish(6)) and bench.is_over(req)
    assert bench.kv.cache.evictable_size == 0


# Requests that ended while the step was in flight


def test_a_token_of_a_request_that_has_ended_is_dropped(bench: Bench) -> None:
    req = bench.add()
    reqs = [req]
    for _ in range(2):
        req.num_steps_in_flight += 1
    batch = build_decode(bench.kv, reqs)
    bench.results.finish(req, LengthFinish(0))
    assert len(bench.told()) == 1
    for token in (5, -1):
        bench.results.process(batch, StepOutput(np.array([token], dtype=np.int32)))
    assert bench.told() == [] and req.output_ids == [] and req.num_steps_in_flight == 0
    assert bench.is_over(req) and bench.metrics.num_finished == 1
    assert bench.kv.cache.evictable_size == 0, "invalid logits take out of the cache what it left there"


def test_an_abort_waits_for_every_step_in_flight_and_the_first_reason_stays(bench: Bench) -> None:
    req = bench.add()
    req.num_steps_in_flight = 1
    bench.results.abort(req, CLIENT)
    bench.results.abort(req, AbortFinish("another reason", 500))
    bench.results.finish_aborted()
    assert bench.told() == [] and not bench.is_over(req)
    req.num_steps_in_flight = 0
    bench.results.finish_aborted()
    (out,) = bench.told()
    assert out.finish == CLIENT and bench.is_over(req)
    bench.results.finish_aborted()
    assert bench.told() == [] and bench.metrics.num_aborted == 1


def test_a_waiting_request_is_aborted_at_once(bench: Bench) -> None:
    req = make_req([1, 2])
    bench.queues.add(req)
    bench.results.abort(req, CLIENT)
    bench.results.finish_aborted()
    (out,) = bench.told()
    assert (out.finish, out.counts.prompt_tokens) == (CLIENT, 2) and bench.is_over(req)


# What is told when


def test_a_stream_interval_holds_tokens_back_but_for_the_first_and_the_end(bench: Bench) -> None:
    bench.add(stream_interval=3, eos_ids=frozenset({9}))
    told = [[out.token_ids for out in bench.step([token])] for token in (1, 2, 3, 4, 5, 9)]
    assert told == [[[1]], [], [], [[2, 3, 4]], [], [[5, 9]]]


def test_a_stop_checker_that_fails_ends_its_request_alone(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        quiet = ()

        def push(self, token: int) -> str | None:
            raise RuntimeError("no text")

    bad, good = bench.add(0, stop_checker=Broken()), bench.add(1)
    outs = bench.step([5], [6])
    finish = outs[0].finish
    assert isinstance(finish, AbortFinish) and finish.status_code == 500 and "no text" not in finish.message
    assert (outs[1].token_ids, outs[1].finish) == ([6], None)
    assert bench.is_over(bad) and not bench.is_over(good)
    assert "Could not check the stop strings of request r0" in caplog.text


def test_a_grammar_that_takes_no_further_token_ends_its_request_alone(bench: Bench) -> None:
    class Broken:
        is_over = False

        def accept(self, token: int) -> None:
            raise GrammarFailed("it is too complex")

    bad, good = bench.add(0, regex="a"), bench.add(1)
    bad.grammar = Broken()
    told, _ = bench.step([5], [5])
    assert isinstance(told.finish, AbortFinish) and bench.is_over(bad) and not bench.is_over(good)
    assert (told.finish.status_code, told.finish.param) == (400, "regex") and "too complex" in told.finish.message

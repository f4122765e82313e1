"""tercet.Engine: real processes with made-up tokens, driven from threads, coroutines, and scripts that end badly."""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fake_child
import numpy as np
import pytest
from patience import PATIENCE_S
from toy_engine import text_of, toy_args

import tercet
from tercet.srt import errors
from tercet.srt.entrypoints.engine import Engine
from tercet.srt.errors import EngineBusy, InvalidRequest, UnsupportedField
from tercet.srt.sampling_params import SamplingParams

LONG = {"max_new_tokens": 400}
SHORT = {"max_new_tokens": 2}


class ToyEngine(Engine):
    _child_module = fake_child.MODULE


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyEngine]:
    with ToyEngine(server_args=toy_args(tmp_path_factory.mktemp("toy"))) as engine:
        yield engine


def _num_running(engine: Engine) -> int:
    return engine.get_server_info()["internal_states"][0]["num_running"]


def _becomes_idle(engine: Engine) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while _num_running(engine) and time.monotonic() < deadline:
        time.sleep(0.02)
    return _num_running(engine) == 0


OF_SERVERS = {
    "EnginePaused",
    "MetricsOff",
    "ModelNotFound",
    "NotAllowed",
    "PreviousNotFound",
    "RequestAborted",
    "ResponseNotFound",
    "ResponseStoreOff",
    "ResumeOff",
    "StreamChanged",
    "StreamGone",
    "StreamNotFound",
}
"""Errors that only HTTP clients get."""


def test_the_public_name_is_this_class() -> None:
    assert tercet.Engine is Engine


def test_the_errors_of_the_python_engines_are_public() -> None:
    known = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert {name for name in tercet.__all__ if getattr(tercet, name) is vars(errors).get(name)} == known - OF_SERVERS


def test_one_prompt_gives_one_answer(engine: Engine) -> None:
    answer = engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 3}, rid="me")
    assert answer.pop("meta_info").pop("e2e_latency") > 0
    assert answer == {"text": text_of(3), "output_ids": [100, 101, 102]}
    meta = engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 3}, rid="me")["meta_info"]
    del meta["e2e_latency"]
    assert meta == {
        "id": "me",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 0,
        "cached_tokens_details": {"device": 0, "host": 0},
        "num_retractions": 0,
        "num_recoveries": 0,
        "weight_version": "default",
    }


def test_lists_keep_their_order_and_n_gives_a_list(engine: Engine) -> None:
    sampling = [{"max_new_tokens": 5}, SamplingParams(max_new_tokens=2), {"max_new_tokens": 3}]
    answers = engine.generate(input_ids=[[1], [1, 2], [1, 2, 3]], sampling_params=sampling)
    assert [answer["text"] for answer in answers] == [text_of(5), text_of(2), text_of(3)]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 2, 3]
    assert len(engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 1, "n": 3})) == 3


def test_no_new_tokens_are_an_answer_without_text(engine: Engine) -> None:
    whole = engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 0, "n": 2})
    streamed = list(engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 0}, stream=True))
    assert len(whole) == 2 and len(streamed) == 1
    for answer in (*whole, *streamed):
        assert (answer["text"], answer["output_ids"]) == ("", [])
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert answer["meta_info"]["completion_tokens"] == 0


def test_arrays_are_token_ids_too(engine: Engine) -> None:
    answer = engine.generate(input_ids=np.array([1, 2], dtype=np.int32), sampling_params={"max_new_tokens": 1})
    assert answer["meta_info"]["prompt_tokens"] == 2


def test_a_stream_is_cumulative(engine: Engine) -> None:
    answers = list(engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 6}, stream=True))
    assert answers[-1]["text"] == text_of(6)
    assert len(answers) > 1
    for before, after in itertools.pairwise(answers):
        assert after["text"].startswith(before["text"]) and len(after["output_ids"]) > len(before["output_ids"])
        assert before["meta_info"]["finish_reason"] is None
    assert "index" not in answers[0]


def test_a_stream_of_several_prompts_says_which(engine: Engine) -> None:
    last: dict[int, str] = {}
    for answer in engine.generate(input_ids=[[1], [2]], sampling_params={"max_new_tokens": 4}, stream=True):
        last[answer["index"]] = answer["text"]
    assert last == {0: text_of(4), 1: text_of(4)}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"input_ids": []}, "input_ids"),
        ({}, "text"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"input_ids": [1], "sampling_params": {"no_such": 1}}, "sampling_params.no_such"),
        ({"input_ids": [1], "no_such": 1}, "no_such"),
        ({"input_ids": [1], "text": "a"}, "text"),
        ({"prompt": "text needs a tokenizer"}, "text"),
        ({"prompt": "\ud800"}, "text"),
        ({"prompt": b"abc"}, "text"),
        ({"prompt": ["a", b"abc"]}, "text[1]"),
        ({"input_ids": [1], "rid": b"abc"}, "rid"),
        ({"input_ids": [1], "sampling_params": {"stop": [b"abc"]}}, "sampling_params.stop[0]"),
        (
            {"input_ids": [1], "sampling_params": {"json_schema": {"const": b"abc"}}},
            "sampling_params.json_schema.const",
        ),
        ({"input_ids": [5000]}, "input_ids"),
        ({"input_ids": [10**5000]}, "input_ids"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_refused_when_it_is_made(
    engine: Engine, arguments: dict[str, object], field: str, stream: bool
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.generate(**arguments, stream=stream)
    assert caught.value.param == field


@pytest.mark.parametrize("path", ["", "a\0b", "a\udcff"])
def test_a_path_that_no_file_or_no_message_has_is_refused_by_name(engine: Engine, path: str) -> None:
    """Without a character, it would be the working directory."""
    for call, param in (
        (engine.update_weights_from_disk, "model_path"),
        (lambda path: engine.load_lora_adapter("a", path), "lora_path"),
        (engine.start_profile, "output_dir"),
    ):
        with pytest.raises(InvalidRequest, match=f"^{param} must be a path of .*, got ") as raised:
            call(path)
        assert raised.value.param == param


def test_sampling_parameters_that_contain_themselves_are_refused(engine: Engine) -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(InvalidRequest, match="contains itself"):
        engine.generate("a", endless)  # type: ignore[arg-type]


def test_what_is_not_there_is_refused_by_name(engine: Engine) -> None:
    with pytest.raises(UnsupportedField, match="input_embeds"):
        engine.generate(input_ids=[1], input_embeds=[[1.0]])
    with pytest.raises(InvalidRequest, match="lora_path needs a server with --enable-lora"):
        engine.generate(input_ids=[1], lora_path="adapter")
    with pytest.raises(InvalidRequest, match="JSON"):
        engine.generate(input_ids=[1], sampling_params={"stop": object()})


def test_one_bad_prompt_of_a_list_ends_the_others(engine: Engine) -> None:
    with pytest.raises(InvalidRequest):
        engine.generate(input_ids=[[1], [2], [5000]], sampling_params=LONG)
    assert _becomes_idle(engine)


def test_coroutines_of_another_loop(engine: Engine) -> None:
    async def scenario() -> None:
        calls = [engine.async_generate(input_ids=[1], sampling_params={"max_new_tokens": n}) for n in (2, 4)]
        assert [answer["text"] for answer in await asyncio.gather(*calls)] == [text_of(2), text_of(4)]
        stream = engine.async_generate(input_ids=[1], sampling_params={"max_new_tokens": 3}, stream=True)
        assert [answer["text"] async for answer in stream][-1] == text_of(3)
        awaited = await engine.async_generate(input_ids=[1], sampling_params={"max_new_tokens": 3}, stream=True)
        assert [answer["text"] async for answer in awaited][-1] == text_of(3)
        # As in a notebook: a blocking call while a loop runs in this very thread.
        assert engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 2})["text"] == text_of(2)

    asyncio.run(scenario())


def test_a_coroutine_keeps_its_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        answer = ToyEngine(server_args=toy_args(tmp_path)).async_generate(input_ids=[1], sampling_params=SHORT)
        gc.collect()
        assert (await answer)["text"] == text_of(2)

    asyncio.run(scenario())


def test_cancelling_a_coroutine_aborts_its_request(engine: Engine) -> None:
    async def scenario() -> None:
        waiting = asyncio.ensure_future(engine.async_generate(input_ids=[1], sampling_params=LONG))
        while not await asyncio.to_thread(_num_running, engine):
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        stream = engine.async_generate(input_ids=[1], sampling_params=LONG, stream=True)
        await anext(stream)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(scenario())
    assert _becomes_idle(engine)


def test_a_stream_that_could_not_be_opened_has_ended(engine: Engine) -> None:
    async def scenario() -> None:
        stream = engine.async_generate(input_ids=[5000], stream=True)
        with pytest.raises(InvalidRequest):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(scenario())


def test_a_list_longer_than_http_takes(engine: Engine) -> None:
    sampling = {"max_new_tokens": 1, "n": 2}
    assert len(engine.generate(input_ids=[[1]] * 3000, sampling_params=sampling)) == 6000


def test_a_stream_that_is_left_is_aborted(engine: Engine) -> None:
    stream = engine.generate(input_ids=[1], sampling_params=LONG, stream=True)
    next(stream)
    stream.close()
    assert list(stream) == []
    assert _becomes_idle(engine)
    next(engine.generate(input_ids=[1], sampling_params=LONG, stream=True))  # garbage at once
    gc.collect()
    assert _becomes_idle(engine)
    engine.generate(input_ids=[1], sampling_params=LONG, stream=True)  # not even begun
    gc.collect()
    assert _becomes_idle(engine)


def test_abort_by_name_from_another_thread(engine: Engine) -> None:
    def abort_soon(rid: str) -> None:
        while not engine.abort(rid):
            time.sleep(0.01)

    for prompts in ([1], [[1], [2]]):
        aborter = threading.Thread(target=abort_soon, args=("mine",))
        aborter.start()
        answers = engine.generate(input_ids=prompts, sampling_params=LONG, rid="mine")
        aborter.join()
        for answer in answers if isinstance(answers, list) else [answers]:
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert not engine.abort("mine")
    assert _becomes_idle(engine)


def test_ctrl_c_aborts_what_it_interrupts(engine: Engine) -> None:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.generate(input_ids=[[1]] * 4, sampling_params=LONG)
    finally:
        timer.cancel()  # an interrupt that comes too late would end the test run
    assert _becomes_idle(engine)
    assert engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})["text"] == text_of(1)


def test_flushing_needs_an_idle_engine(engine: Engine) -> None:
    engine.flush_cache()
    stream = engine.generate(input_ids=[1], sampling_params=LONG, stream=True)
    next(stream)
    with pytest.raises(EngineBusy, match="1 requests"):
        engine.flush_cache()
    stream.close()
    engine.flush_cache(timeout_s=5)


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
def test_flushing_needs_a_time_to_wait(engine: Engine, timeout_s: float) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s must be 0 or more"):
        engine.flush_cache(timeout_s)


def test_an_engine_says_that_it_cannot_be_copied(engine: Engine) -> None:
    stream = engine.generate(input_ids=[1], sampling_params=SHORT, stream=True)
    for value in (engine, [engine], stream):
        with pytest.raises(TypeError, match="neither pickled nor copied"):
            copy.deepcopy(value)


def test_a_pause_holds_new_requests_until_generation_continues(engine: Engine) -> None:
    engine.pause_generation("in_place")
    answers: list[dict[str, object]] = []
    waiting = threading.Thread(target=lambda: answers.append(engine.generate(input_ids=[1], sampling_params=SHORT)))
    waiting.start()
    while not _num_running(engine):
        time.sleep(0.01)
    assert engine.get_server_info()["status"] == "paused" and not answers
    engine.continue_generation()
    waiting.join(20)
    assert answers[0]["text"] == text_of(2)
    stream = engine.generate(input_ids=[1], sampling_params=LONG, stream=True)
    next(stream)
    engine.pause_generation()
    last = list(stream)[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    engine.continue_generation()


def test_an_unknown_mode_of_a_pause_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="sleep") as caught:
        engine.pause_generation("sleep")
    assert caught.value.param == "mode"
    assert engine.generate(input_ids=[1], sampling_params=SHORT)["text"] == text_of(2)


def test_server_info_tells_settings_and_limits(engine: Engine) -> None:
    info = engine.get_server_info()
    assert info["max_total_num_tokens"] == fake_child.FACTS.max_total_num_tokens
    assert info["model_path"] == engine.server_args.model_path
    assert "api_key" not in info
    assert info["random_seed"] == engine.server_args.random_seed is not None


def test_a_progress_bar_where_it_is_asked_for(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.generate(input_ids=[[1]] * 20, sampling_params={"max_new_tokens": 1})
    assert "20" not in capsys.readouterr().err  # not a terminal
    engine.generate(input_ids=[[1]] * 3, sampling_params={"max_new_tokens": 1}, progress=True)
    assert "3/3" in capsys.readouterr().err
    for generate in (engine.generate, engine.async_generate):
        with pytest.raises(InvalidRequest, match="a stream has no progress bar"):
            generate(input_ids=[1], stream=True, progress=True)

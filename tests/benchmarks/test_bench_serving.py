"""The serving benchmark from the command line to its last line, against the real HTTP app."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from fake_http import text_of
from live_site import LiveSite, live_site
from patience import PATIENCE_S
from scripted_http import Exchange, scripted_server
from serving_bench import SMALL, Bench

from tercet.benchmarks import plots
from tercet.benchmarks.bench_serving import main

BACKENDS = ["tercet", "sglang", "sglang-oai", "sglang-oai-chat", "vllm", "vllm-chat"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("streaming", [[], ["--disable-stream"]])
def test_every_backend_against_our_own_server(site: LiveSite, bench: Bench, backend: str, streaming: list[str]) -> None:
    result = bench(site.url, "--backend", backend, *streaming)
    assert (result["completed"], result["failed"]) == (6, 0)
    received = site.scheduler.received[1:]  # after the warm-up
    asked = [one.options.sampling.max_new_tokens for one in received]
    assert result["total_output_tokens"] == sum(n for n in asked if n) == sum(asked)  # type: ignore[arg-type]
    prompts = site.scheduler.prompts()[1:]
    assert result["total_input_tokens"] == sum(len(ids) for ids in prompts)
    assert 0 < result["client_cpu_seconds"] < 60
    assert result["output_tokens_told_by_server"] == 6 and result["completed_with_other_length"] == 0
    assert all(one.options.sampling.ignore_eos and one.options.sampling.temperature == 0 for one in received)
    chat = backend.endswith("chat")
    by_client = result["total_input_tokens_by_client"]
    assert by_client < result["total_input_tokens"] if chat else by_client == result["total_input_tokens"]
    if streaming:
        assert result["mean_ttft_ms"] is None and result["mean_e2e_latency_ms"] > 0
    else:
        assert 0 < result["mean_ttft_ms"] <= result["mean_e2e_latency_ms"]
    assert "Successful requests:                     6" in bench.out


def test_texts_and_details_are_those_of_the_server(site: LiveSite, bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    for backend in ("tercet", "vllm"):
        bench(site.url, "--backend", backend, "--output-file", str(file), "--output-details", "--tag", backend)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["tag"] for line in lines] == ["tercet", "vllm"]
    for line in lines:
        assert line["generated_texts"] == [text_of(n) for n in line["output_lens"]]
        assert line["errors"] == [""] * 6
        assert all(0 < ttft <= latency for ttft, latency in zip(line["ttfts"], line["latencies"], strict=True))
        assert line["input_lens"] == lines[0]["input_lens"]
        assert line["total_output_tokens"] == sum(line["output_lens"])
        assert [line[name] for name in ("random_input_len", "random_output_len", "seed")] == [20, 9, 42]
        assert line["server_info"]["model_path"] == "/models/tiny-1" and "api_key" not in line["server_info"]
        assert line["command"].startswith("tercet bench serving --base-url")
        # The server may put several tokens into the first chunk.
        assert all(len(itls) < n for itls, n in zip(line["itls"], line["output_lens"], strict=True))


def test_a_file_without_details_and_the_last_line_are_the_same(site: LiveSite, bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    result = bench(site.url, "--output-file", str(file))
    assert json.loads(file.read_text()) == result
    assert "generated_texts" not in result


def test_several_tokens_a_chunk_are_counted(site: LiveSite, bench: Bench) -> None:
    site.scheduler.step = 4
    native = bench(site.url, "--random-range-ratio", "1")
    assert native["total_output_tokens"] == 54
    assert native["tokens_per_chunk"] >= 3  # 9 tokens as 4, 4, 1, or fewer chunks yet
    openai = bench(site.url, "--random-range-ratio", "1", "--backend", "vllm")
    assert openai["total_output_tokens"] == 54 and openai["tokens_per_chunk"] >= 3


def test_the_same_seed_asks_the_same_and_warm_ups_ask_something_else(site: LiveSite, bench: Bench) -> None:
    for seed in ("1", "1", "2"):
        bench(site.url, "--seed", seed, "--warmup-requests", "2")
    prompts = site.scheduler.prompt_texts()
    runs = [prompts[i : i + 8] for i in (0, 8, 16)]
    assert sorted(runs[0]) == sorted(runs[1]) != sorted(runs[2])
    assert not set(runs[0][:2]) & set(runs[0][2:])


def test_ids_are_sent_as_ids(site: LiveSite, bench: Bench) -> None:
    for backend in ("tercet", "vllm"):
        for dataset in ("random-ids", "random"):
            result = bench(site.url, "--tokenize-prompt", "--dataset-name", dataset, "--backend", backend)
            assert result["completed"] == 6 and result["total_input_tokens"] == result["total_input_tokens_by_client"]


def test_early_ends_are_allowed_and_told(site: LiveSite, bench: Bench) -> None:
    site.scheduler.stop_after = 2
    result = bench(site.url, "--random-range-ratio", "1")
    assert result["completed_with_other_length"] == 6
    assert "Answers of unexpected length:            6" in bench.out
    result = bench(site.url, "--random-range-ratio", "1", "--disable-ignore-eos")
    assert result["ignore_eos"] is False and not site.scheduler.received[-1].options.sampling.ignore_eos
    assert "another length" not in bench.out


def test_further_fields_reach_the_server(site: LiveSite, bench: Bench) -> None:
    bench(site.url, "--extra-request-body", '{"sampling_params": {"top_k": 7}}', "--temperature", "0.5")
    sampling = site.scheduler.received[-1].options.sampling
    assert (sampling.top_k, sampling.temperature, sampling.ignore_eos) == (7, 0.5, True)
    assert "the warm-up failed: 400 Bad Request" in bench.fails(site.url, "--extra-request-body", '{"nonsense": 1}')


def test_headers_and_the_key_are_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_site(api_key="secret") as site:
        assert "401" in bench.fails(site.url)
        result = bench(site.url, "--header", "Authorization=Bearer secret", "X-A=b")
        assert result["completed"] == 6 and "secret" not in bench.out
        assert "--header Authorization=... X-A=..." in result["command"]
        monkeypatch.setenv("TERCET_API_KEY", "secret")
        result = bench(site.url)
    assert result["completed"] == 6 and "secret" not in bench.out


def test_the_cache_is_flushed_before_the_clock_starts(bench: Bench) -> None:
    paths: list[str] = []
    tells_secrets = False

    async def script(exchange: Exchange) -> None:
        paths.append(exchange.path)
        if exchange.path == "/generate":
            meta = {"prompt_tokens": 1, "completion_tokens": 1, "finish_reason": {"type": "length"}}
            await exchange.stream([{"text": "x", "meta_info": meta}])
        elif exchange.path == "/v1/models" or exchange.path.startswith("/flush_cache"):
            await exchange.answer({"data": [{"id": "m"}]})
        elif exchange.path == "/server_info" and tells_secrets:
            await exchange.answer({"api_key": "secret", "version": "1"})
        else:
            await exchange.answer({"error": "no such page"}, "404 Not Found")

    with scripted_server(script) as server:
        result = bench(server.url, "--flush-cache", "--warmup-requests", "2", "--random-output-len", "1")
        assert result["server_info"] is None
        tells_secrets = True
        assert bench(server.url)["server_info"] == {"version": "1"}
        message = bench.fails(server.url, "--flush-cache", "--backend", "vllm", "--warmup-requests", "0")
    flushed = paths.index("/flush_cache?timeout=30")
    assert paths[:flushed].count("/generate") == 2 and paths[flushed:].count("/generate") == 6 + 7
    assert "--flush-cache: 404 Not Found: no such page" in message and "/reset_prefix_cache" in paths


def test_concurrency_is_limited(bench: Bench) -> None:
    running, most = 0, 0
    allowed = 2

    async def script(exchange: Exchange) -> None:
        nonlocal running, most
        if exchange.path != "/v1/completions":
            await exchange.answer({})
            return
        running += 1
        most = max(most, running)
        while most < allowed:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)  # one too many would come now
        running -= 1
        await exchange.stream([{"choices": [{"text": "a", "finish_reason": "length"}]}])

    common = ["--backend", "vllm", "--num-prompts", "10", "--warmup-requests", "0"]
    with scripted_server(script) as server:
        result = bench(server.url, *common, "--max-concurrency", "2")
        assert (most, result["max_concurrent_requests"]) == (2, 2)
        allowed = 10
        result = bench(server.url, *common)
        assert (most, result["max_concurrent_requests"]) == (10, 10)
    assert "Max request concurrency:                 not set" in bench.out
    assert "The server reported no token counts" in bench.out


def test_requests_come_at_their_rate(site: LiveSite, bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    for burstiness in ([], ["--burstiness", "100"]):
        bench(site.url, "--request-rate", "50", *burstiness, "--output-file", str(file), "--output-details")
    poisson, regular = (json.loads(line)["start_times"] for line in file.read_text().splitlines())
    # A busy machine may send later, never earlier.
    assert all(start >= 0.8 * 0.02 * i for i, start in enumerate(regular))
    assert poisson != regular
    assert json.loads(file.read_text().splitlines()[0])["request_rate"] == 50


def test_a_trace_is_replayed(site: LiveSite, bench: Bench, tmp_path: Path) -> None:
    trace, file = tmp_path / "trace.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"timestamp": 1000 + 100 * i, "input_length": 10 + i, "output_length": 3, "hash_ids": [1]} for i in range(4)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = ["--output-file", str(file), "--output-details"]
    argv = ["--dataset-name", "mooncake", "--dataset-path", str(trace), "--use-trace-timestamps", *out]
    plain = [one for one in SMALL if not one.startswith("--random") and one not in ("20", "9")]
    code = main(
        ["--base-url", site.url, "--tokenizer", bench.tokenizer, *plain, *argv, "--mooncake-slowdown-factor", "1.5"]
    )
    assert code == 0, bench.read()
    line = json.loads(file.read_text())
    assert line["request_rate"] == "trace" and line["completed"] == 4
    assert all(start >= 0.14 * i for i, start in enumerate(line["start_times"]))
    prompts = sorted(site.scheduler.prompt_texts()[1:], key=len)
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(prompts))


@pytest.mark.parametrize("backend", ["tercet", "vllm-chat"])
def test_custom_prompts_and_shared_prefixes(site: LiveSite, bench: Bench, tmp_path: Path, backend: str) -> None:
    file = tmp_path / "custom.jsonl"
    file.write_text('{"prompt": "first", "output_len": 2}\n{"prompt": "second", "output_len": 3}\n')
    common = ["--base-url", site.url, "--tokenizer", bench.tokenizer, "--backend", backend, "--disable-tqdm"]
    assert main([*common, "--dataset-name", "custom", "--dataset-path", str(file), "--warmup-requests", "0"]) == 0
    asked = " ".join(site.scheduler.prompt_texts())
    assert "first" in asked and "second" in asked
    bench.read()
    assert json.loads(bench.out.splitlines()[-1])["num_prompts"] == 2 and "has only 2 usable requests" in bench.err
    groups = ["--gsp-num-groups", "2", "--gsp-prompts-per-group", "3"]
    sizes = ["--gsp-system-prompt-len", "20", "--gsp-question-len", "5", "--gsp-output-len", "2"]
    assert main([*common, "--dataset-name", "generated-shared-prefix", *groups, *sizes]) == 0
    bench.read()
    result = json.loads(bench.out.splitlines()[-1])
    assert (result["num_prompts"], result["completed"], result["gsp_num_groups"]) == (6, 6, 2)
    assert "random_input_len" not in result
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"prompt": [1, 2], "output_len": 2}\n')
    code = main([*common, "--dataset-name", "custom", "--dataset-path", str(ids)])
    assert code == (1 if "chat" in backend else 0)
    assert ("accepts text only" in bench.read()) == ("chat" in backend)


def test_another_text_or_a_sharegpt_file_for_random(site: LiveSite, bench: Bench, tmp_path: Path) -> None:
    text, share = tmp_path / "a.txt", tmp_path / "a.json"
    text.write_text("xyz" * 100)
    turns = [{"value": "uvw" * 100}, {"value": "answer"}]
    share.write_text(json.dumps([{"conversations": turns}]))
    for path, letters in ((text, "xyz"), (share, "uvw")):
        before = len(site.scheduler.received)
        bench(site.url, "--dataset-path", str(path))
        assert {char for prompt in site.scheduler.prompt_texts()[before + 1 :] for char in prompt} == set(letters)


def test_goodput_and_terminal_plots(site: LiveSite, bench: Bench) -> None:
    result = bench(site.url, "--goodput", "ttft:100000", "e2el:0.001", "--plot")
    assert result["slo_attainment_by_metric"] == {"ttft": 1, "e2el": 0} and result["slo_attainment"] == 0
    for words in (
        "Request goodput (req/s):",
        "TTFT (ms), share of 6",
        "Output tokens per second",
        "Concurrent requests",
    ):
        assert words in bench.out
    bench(site.url, "--plot-throughput")
    assert "Output tokens per second" in bench.out and "share of" not in bench.out


def test_a_png_needs_matplotlib_and_says_so_first(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "has_matplotlib", lambda: False)
    assert "pip install 'tercet[plot]'" in bench.refused("--plot", "a.png")


def test_a_progress_bar(site: LiveSite, bench: Bench) -> None:
    argv = [one for one in SMALL if one != "--disable-tqdm"]
    assert main(["--base-url", site.url, "--tokenizer", bench.tokenizer, *argv]) == 0
    bench.read()
    assert re.search(r"100%.*6/6", bench.err)


def test_a_file_that_cannot_be_written_does_not_lose_the_result(site: LiveSite, bench: Bench) -> None:
    common = ["--base-url", site.url, "--tokenizer", bench.tokenizer, *SMALL]
    assert main([*common, "--output-file", "/dev/full"]) == 1
    bench.read()
    assert "Successful requests:" in bench.out and "No space left" in bench.err
    assert json.loads(bench.out.splitlines()[-1])["completed"] == 6
    unreadable = bench.fails(site.url, "--dataset-path", sys.executable)
    assert f"cannot read {sys.executable}: 'utf-8' codec" in unreadable


def test_it_loads_no_torch_and_no_transformers(site: LiveSite, tokenizer_dir: str) -> None:
    code = """
import sys
from tercet.benchmarks.bench_serving import main
from tercet.srt.io_struct import AbortFinish
code = main(sys.argv[1:])
heavy = [name for name in ("torch", "transformers", "matplotlib", "zmq", "starlette") if name in sys.modules]
sys.exit(code or (str(heavy) if heavy else 0))
"""
    argv = ["--base-url", site.url, "--tokenizer", tokenizer_dir, *SMALL, "--plot"]
    ran = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stderr) == (0, "")

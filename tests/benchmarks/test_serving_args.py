"""The command line of the serving benchmark: defaults, refusals, and the tokenizer that it implies."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_http import Exchange, scripted_server
from serving_bench import SMALL, Bench

from tercet.benchmarks import serving_args
from tercet.benchmarks.bench_serving import main


def test_the_tokenizer_is_the_servers_unless_one_is_named(bench: Bench, tokenizer_dir: str, tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        cards = [{"id": "nice-name", "root": tokenizer_dir}]
        if exchange.path == "/v1/models":
            await exchange.answer({"data": cards})
        elif exchange.path == "/v1/completions":
            assert exchange.json["model"] == names.pop(0)
            await exchange.stream([{"choices": [{"text": "a", "finish_reason": "length"}]}])
        else:
            await exchange.answer({}, "404 Not Found")

    with scripted_server(script) as server:
        common = ["--base-url", server.url, "--backend", "vllm", *SMALL, "--num-prompts", "1", "--warmup-requests", "0"]
        names = ["nice-name"]
        assert main(common) == 0
        names = ["mine"]
        assert main([*common, "--model", "mine"]) == 0
        names = ["served"]
        assert main([*common, "--model", tokenizer_dir, "--served-model-name", "served"]) == 0
        (tmp_path / "tokenizer.json").write_text("{}")
        assert main([*common, "--tokenizer", str(tmp_path)]) == 1
        assert "--tokenizer names a directory" in bench.read()
        missing = str(tmp_path / "missing")
        assert main([*common, "--tokenizer", missing]) == 1
        assert bench.read().endswith(
            f"no tokenizer is called {missing!r}, and there is no such path here; --tokenizer names a directory or a "
            "GGUF file\n"
        )


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--backend", "llama"], "invalid choice"),
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (
            ["--dataset-name", "custom", "--dataset-path", "x", "--random-input-len", "5"],
            "--random-input-len is allowed",
        ),
        (
            ["--dataset-name", "custom", "--dataset-path", "x", "--random-range-ratio", "0"],
            "--random-range-ratio is allowed only with datasets random, random-ids, got custom",
        ),
        (["--gsp-ordered"], "--gsp-ordered is allowed only with datasets generated-shared-prefix, got random"),
        (["--sharegpt-output-len", "3"], "is allowed only with datasets sharegpt, custom"),
        (["--dataset-name", "random-ids", "--dataset-path", "x"], "--dataset-path is allowed only with"),
        (["--dataset-name", "generated-shared-prefix", "--num-prompts", "1025"], "must be at most 1024"),
        (["--backend", "vllm-chat", "--tokenize-prompt"], "a chat accepts text only"),
        (["--burstiness", "2"], "needs --request-rate"),
        (["--request-rate", "0"], "must be above 0"),
        (["--request-rate", "nan"], "must be above 0"),
        (["--num-prompts", "0"], "must be at least 1"),
        (["--random-range-ratio", "1.5"], "must be in [0, 1]"),
        (["--base-url", "http://x", "--port", "3"], "exclude each other"),
        (["--base-url", "http://x/v1/"], "--base-url must not end in /v1, which is added to it"),
        (["--output-details"], "needs --output-file"),
        (["--goodput", "tps:3"], "must be NAME:MS"),
        (["--goodput", "ttft:3", "ttft:4"], "names an objective twice"),
        (["--goodput", "ttft:3", "--disable-stream"], "need streaming"),
        (["--extra-request-body", "[]"], "must be a JSON object"),
        (["--extra-request-body", "{"], "not JSON"),
        (["--extra-request-body", "[" * 50_000], "not JSON"),
        (["--extra-request-body", '{"n": 2}'], "n must be 1"),
        (["--extra-request-body", '{"sampling_params": {"n": 2}}'], "n must be 1"),
        (["--extra-request-body", '{"stream": true}'], "--disable-stream"),
        (["--plot", "a.pdf"], "must name a .png file"),
        (["--plot", "nowhere/a.png"], "--plot must name a file in a folder that exists, got 'nowhere/a.png'"),
        (["--output-file", "nowhere/a"], "--output-file must name a file in a folder that exists, got 'nowhere/a'"),
        (["--output-file", "/"], "--output-file must name a file in a folder that exists, got '/'"),
        (["--header", "X"], "must be NAME=VALUE"),
        (["--mooncake-slowdown-factor", "2"], "is allowed only with datasets mooncake"),
        (["--unknown"], "unrecognized arguments"),
    ],
)
def test_a_command_line_that_makes_no_sense(bench: Bench, argv: list[str], message: str) -> None:
    assert message in bench.refused(*argv)


@pytest.mark.parametrize(
    "argv, url",
    [
        ([], "http://127.0.0.1:30000"),
        (["--backend", "sglang-oai"], "http://127.0.0.1:30000"),
        (["--backend", "vllm"], "http://127.0.0.1:8000"),
        (["--host", "h", "--port", "7", "--backend", "vllm"], "http://h:7"),
        (["--host", "::1"], "http://[::1]:30000"),
    ],
)
def test_where_the_server_is_by_default(argv: list[str], url: str) -> None:
    assert serving_args.parse("x", argv).base_url == url

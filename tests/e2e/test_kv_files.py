"""The real server with KV files: an evicted prefix is found after a restart of it or its engine, with the same bits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from patience import PATIENCE_S
from toy_engine import REAL_SERVER, ServerProcess, write_toy_config

pytestmark = pytest.mark.e2e

LENGTH = 1000
POOL = 1536
"""Tokens of the KV pool: too few for two prompts."""


class Answer(NamedTuple):
    ids: list[int]
    logprobs: list[Any]
    cached: int
    details: dict[str, int]


def flags(model: Path, folder: Path) -> list[str]:
    found = ["--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init", "--random-seed", "1"]
    found += ["--port", "0", "--max-total-tokens", str(POOL), "--max-running-requests", "4"]
    return [*found, "--enable-hierarchical-cache", "--hicache-size", "0.01", "--hicache-storage-dir", str(folder)]


def ask(server: ServerProcess, ids: list[int]) -> Answer:
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    with server.client() as client:
        answer = client.post("/generate", json=body).raise_for_status().json()
    meta = answer["meta_info"]
    logprobs = meta["output_token_logprobs"]
    return Answer(answer["output_ids"], logprobs, meta["cached_tokens"], meta["cached_tokens_details"])


def test_a_prefix_survives_eviction_and_restarts(tmp_path: Path) -> None:
    model = write_toy_config(tmp_path, max_position_embeddings=2048, hidden_size=64, num_hidden_layers=2)
    vocab_size = json.loads(model.read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    prompt, other = (rng.integers(0, vocab_size, LENGTH).tolist() for _ in range(2))
    folder = tmp_path / "kv"
    whole = LENGTH // 64 * 64
    with ServerProcess(tmp_path, flags(model, folder), module=REAL_SERVER) as server:
        server.ready()
        first = ask(server, prompt)
        assert first.cached == 0 and first.details == {"device": 0, "host": 0}
        ask(server, other)
        again = ask(server, prompt)
        assert again[:2] == first[:2] and again.cached >= whole and again.details["host"] >= LENGTH + 16 - POOL // 2
        deadline = time.monotonic() + PATIENCE_S
        while len(list(folder.glob("*.kv"))) < 2 * ((LENGTH + 15) // 64):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.signal(signal.SIGTERM)
        assert server.exit_code(PATIENCE_S) == 0, server.log
    with ServerProcess(tmp_path, flags(model, folder), module=REAL_SERVER) as server:
        server.ready()
        assert_in_files(server, prompt, first)
        os.kill(server.children["scheduler"], signal.SIGKILL)
        assert server.logged("The engine runs again", PATIENCE_S)
        assert_in_files(server, prompt, first)


def assert_in_files(server: ServerProcess, prompt: list[int], first: Answer) -> None:
    """The engine has just started, so all whole blocks of the prompt come from files."""
    whole = LENGTH // 64 * 64
    restored = ask(server, prompt)
    deadline = time.monotonic() + PATIENCE_S
    while restored.cached < whole:  # a machine that could not read the files within the limit of a wait
        assert time.monotonic() < deadline and restored[:2] == first[:2]
        with server.client() as client:
            client.post("/flush_cache").raise_for_status()
        restored = ask(server, prompt)
    assert restored[:2] == first[:2]
    assert restored.cached == whole and restored.details == {"device": 0, "host": 0, "storage": whole}


def test_a_folder_that_cannot_be_used_at_a_restart_costs_only_its_files(tmp_path: Path) -> None:
    """A disk that has failed is often mounted again for reading only."""
    model = write_toy_config(tmp_path, max_position_embeddings=2048, hidden_size=64, num_hidden_layers=2)
    folder = tmp_path / "kv"
    with ServerProcess(tmp_path, flags(model, folder), module=REAL_SERVER) as server:
        first = ask(server.ready(), [1] * 100)
        shutil.rmtree(folder)
        folder.touch()
        os.kill(server.children["scheduler"], signal.SIGKILL)
        assert server.logged("The engine runs again", PATIENCE_S)
        assert ask(server, [1] * 100)[:2] == first[:2]
        assert "The engine runs without KV files: --hicache-storage-dir" in server.log


def test_a_size_that_no_file_fits_into_is_refused_before_anything_is_removed(tmp_path: Path) -> None:
    model = write_toy_config(tmp_path, max_position_embeddings=2048, hidden_size=64, num_hidden_layers=2)
    folder = tmp_path / "kv"
    folder.mkdir()
    other = folder / f"tercet-kv-{'ab' * 32}.kv"
    other.write_bytes(bytes(20_000))
    argv = [*flags(model, folder), "--hicache-storage-size", "0.00001"]
    with ServerProcess(tmp_path, argv, module=REAL_SERVER) as server:
        assert server.exit_code(PATIENCE_S) == 1
        assert "--hicache-storage-size 1e-05 is less than one file of 64 tokens" in server.log
    assert other.exists()

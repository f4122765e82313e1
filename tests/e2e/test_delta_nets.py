"""Models with Gated DeltaNets in the whole engine: the states of rows, and saved states of shared prefixes."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from patience import PATIENCE_S
from tiny_models import make_model, save
from toy_engine import ServerProcess

import tercet

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
NEW_TOKENS = 20
SETTINGS: list[dict[str, Any]] = [
    {"chunked_prefill_size": 32, "page_size": 1},
    {"chunked_prefill_size": 32, "page_size": 8, "max_saved_states": 2},
    {"max_running_requests": 3, "page_size": 16, "enable_mixed_chunk": True},
    {"attention_backend": "torch", "chunked_prefill_size": 48, "max_saved_states": 3},
]


def prompts_with_common_beginnings() -> list[list[int]]:
    rng = np.random.default_rng(5)
    beginnings = [rng.integers(3, 131, 66).tolist() for _ in range(2)]
    tails = [rng.integers(3, 131, 1 + 5 * index % 21).tolist() for index in range(12)]
    return [[*beginnings[index % 3], *tail] if index % 3 < 2 else tail for index, tail in enumerate(tails)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_are_those_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    """The pool is too small for all requests at once, so some lose their states. Then answers continue the prompts."""
    model = make_model("qwen3_5")
    prompts = prompts_with_common_beginnings()
    with torch.inference_mode():
        expected = [
            model.generate(torch.tensor([prompt]), max_new_tokens=2 * NEW_TOKENS, do_sample=False, eos_token_id=None)
            for prompt in prompts
        ]
    options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_total_tokens": 400}
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    with tercet.Engine(save(model, tmp_path), **options, **settings) as engine:
        num_cached = []
        for known in (0, 0, NEW_TOKENS):
            inputs = [
                generated[0, : len(prompt) + known].tolist()
                for prompt, generated in zip(prompts, expected, strict=True)
            ]
            answers = engine.generate(input_ids=inputs, sampling_params=sampling)
            for ids, answer, generated in zip(inputs, answers, expected, strict=True):
                assert answer["output_ids"] == generated[0, len(ids) : len(ids) + NEW_TOKENS].tolist()
            num_cached.append(sum(answer["meta_info"]["cached_tokens"] for answer in answers))
    assert all(num_cached)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"speculative_algorithm": "NGRAM"}, "cannot take back a draft"),
        ({"fuse_small_steps": True}, "--fuse-small-steps is not supported"),
    ],
)
def test_what_recurrent_layers_do_not_have_is_refused(setting: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save(make_model("qwen3_5"), tmp_path)
    with pytest.raises(ValueError, match=message):
        tercet.LocalEngine(folder, device="cpu", skip_tokenizer_init=True, **setting)


@pytest.mark.parametrize("num_http_processes", [1, 2])
def test_a_server_shares_prefixes_and_takes_retention(num_http_processes: int, tmp_path: Path) -> None:
    folder = save(make_model("qwen3_5"), tmp_path / "model")
    (tmp_path / "r").mkdir()
    flags = ["--port", "0", "--model-path", str(folder), "--device", "cpu", "--dtype", "float32"]
    flags += ["--skip-tokenizer-init", "--max-total-tokens", "300", "--enable-metrics"]
    flags += ["--tokenizer-worker-num", str(num_http_processes)]
    sampling = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}
    body = {"input_ids": list(range(3, 103)), "sampling_params": sampling, "retention_seconds": 50}
    with ServerProcess(tmp_path / "r", flags, module=("tercet", "serve")) as server:
        url = f"{server.ready().url}/generate"
        first, second = (httpx.post(url, json=body, timeout=60).json() for _ in range(2))
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(r"^tercet:saved_states\S* 1\.0$", httpx.get(f"{server.ready().url}/metrics").text, re.M):
            assert time.monotonic() < deadline, "no heartbeat brings the number of states"
            time.sleep(0.1)
    assert first["output_ids"] == second["output_ids"]
    assert [answer["meta_info"]["cached_tokens"] for answer in (first, second)] == [0, 84]

"""Models with Gated DeltaNets in the whole engine: the states of rows, without shared prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tiny_models import make_model, save
from toy_engine import ServerProcess

import tercet

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
NEW_TOKENS = 25
SETTINGS: list[dict[str, Any]] = [
    {"chunked_prefill_size": 8, "page_size": 1},
    {"max_running_requests": 3, "page_size": 16, "enable_mixed_chunk": True},
    {"attention_backend": "torch", "chunked_prefill_size": 16},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_are_those_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    """The pool is too small for all requests at once, so some lose their states and begin again."""
    model = make_model("qwen3_5")
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 131, 1 + 5 * index % 41).tolist() for index in range(12)]
    with torch.inference_mode():
        expected = [
            model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
            for prompt in prompts
        ]
    options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_total_tokens": 160}
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    with tercet.Engine(save(model, tmp_path), **options, **settings) as engine:
        for _ in range(2):
            answers = engine.generate(input_ids=prompts, sampling_params=sampling)
            for prompt, answer, generated in zip(prompts, answers, expected, strict=True):
                assert answer["output_ids"] == generated[0, len(prompt) :].tolist()
                assert not answer["meta_info"]["cached_tokens"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"speculative_algorithm": "NGRAM"}, "cannot take back a draft"),
        ({"radix_eviction_policy": "lfu"}, "share no prefixes.* --radix-eviction-policy"),
    ],
)
def test_what_needs_earlier_states_is_refused(setting: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save(make_model("qwen3_5"), tmp_path)
    with pytest.raises(ValueError, match=message):
        tercet.LocalEngine(folder, device="cpu", skip_tokenizer_init=True, **setting)


@pytest.mark.parametrize("num_http_processes", [1, 2])
def test_a_server_refuses_retention(num_http_processes: int, tmp_path: Path) -> None:
    folder = save(make_model("qwen3_5"), tmp_path / "model")
    (tmp_path / "r").mkdir()
    flags = ["--port", "0", "--model-path", str(folder), "--device", "cpu", "--dtype", "float32"]
    flags += ["--skip-tokenizer-init", "--max-total-tokens", "160"]
    flags += ["--tokenizer-worker-num", str(num_http_processes)]
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    with ServerProcess(tmp_path / "r", flags, module=("tercet", "serve")) as server:
        url = f"{server.ready().url}/generate"
        assert len(httpx.post(url, json=body, timeout=60).json()["output_ids"]) == 4
        refused = httpx.post(url, json=body | {"retention_seconds": 5}, timeout=60)
    assert refused.status_code == 400 and "retention_seconds needs a server with a prefix cache" in refused.text

"""Models with Gated DeltaNets in the whole engine: the states of rows, without shared prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_model, save

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

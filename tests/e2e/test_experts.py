"""An engine with a mixture of experts: all processes together give the tokens of `transformers`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import make_model, save

import tercet

pytestmark = pytest.mark.e2e

NEW_TOKENS = 12


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",
        "mixtral",
        "gpt_oss",
        "olmoe",
        "granitemoe",
        "qwen2_moe",
        "granitemoeshared",
        "glm4_moe",
        "dots1",
        "ernie4_5_moe",
        "lfm2_moe",
        "qwen3_5_moe",
        "qwen3_next",
    ],
)
def test_greedy_tokens_of_requests_at_the_same_time(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 131, length).tolist() for length in (1, 7, 30, 50)]
    with tercet.Engine(
        save(model, tmp_path), device="cpu", dtype="float32", skip_tokenizer_init=True, max_total_tokens=1024
    ) as engine:
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
    for prompt, answer in zip(prompts, answers, strict=True):
        generated = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )
        assert answer["output_ids"] == generated[0, len(prompt) :].tolist()

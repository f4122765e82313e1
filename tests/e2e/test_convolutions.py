"""Models with short convolutions in the whole engine: what a token reads from the pool may be from anywhere."""

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
KINDS_OF_PREFIXES: list[dict[str, Any]] = [
    {"chunked_prefill_size": 8, "page_size": 1},
    {"speculative_algorithm": "NGRAM", "page_size": 16},
    {"enable_hierarchical_cache": True, "hicache_size": 1, "page_size": 8},
]


@pytest.mark.parametrize("settings", KINDS_OF_PREFIXES, ids=str)
def test_tokens_are_those_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    """The pool is too small for all requests at once, and they share prefixes."""
    model = make_model("lfm2_bias")
    rng = np.random.default_rng(5)
    shared = [rng.integers(3, 131, length).tolist() for length in (1, 2, 40)]
    prompts = [[*shared[index % 3], *rng.integers(3, 131, index).tolist()] for index in range(12)]
    with torch.inference_mode():
        expected = [
            model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
            for prompt in prompts
        ]
    options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_total_tokens": 256}
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    with tercet.Engine(save(model, tmp_path), **options, **settings) as engine:
        for _ in range(2):
            answers = engine.generate(input_ids=prompts, sampling_params=sampling)
            for prompt, answer, generated in zip(prompts, answers, expected, strict=True):
                assert answer["output_ids"] == generated[0, len(prompt) :].tolist()
    assert sum(answer["meta_info"]["cached_tokens"] for answer in answers) > 40

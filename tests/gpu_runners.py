"""Runners on a GPU for tests, and random steps for them."""

from __future__ import annotations

import numpy as np
import runners

from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.sampling_params import SamplingParams

LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=4099,
    context_len=2048,
)


def make_runner(config, device="cuda", **options):
    """page_size None: that of a server."""
    options = {"dtype": "bfloat16", "max_running_requests": 40, "max_total_tokens": 20_000, "page_size": None} | options
    return runners.make_runner(config, device=device, max_prefill_tokens=2048, **options)


def play(driver, seed=0, num_steps=40):
    """Random prefills, chunks beside decodes, and decodes, greedy and sampled; tokens of every step."""
    rng = np.random.default_rng(seed)
    kinds = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1))
    tokens = []
    for _ in range(num_steps):
        idle = [row for row in range(1, driver.runner.settings.max_running_requests + 1) if row not in driver.lens]
        if idle and rng.random() < 0.3:
            rows = rng.permutation(idle)[: rng.integers(1, 6)].tolist()
            chunks = {row: rng.integers(0, 4099, rng.integers(1, 300)) for row in rows}
            new = [driver.add(row, kinds[row % 2]) for row in rows]
            if tokens and rng.random() < 0.5:
                chunks |= {row: None for row in driver.lens if row not in rows}
            tokens.append(driver.extend(chunks, new_rows=new).tolist())
        elif driver.lens:
            rows = rng.permutation(sorted(driver.lens))[: rng.integers(1, len(driver.lens) + 1)].tolist()
            tokens.append(driver.decode(rows).tolist())
    return tokens

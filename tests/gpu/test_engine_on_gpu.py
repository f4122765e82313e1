"""A whole engine on a real GPU: three processes, of which the scheduler has the device."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from gpu_runners import LLAMA

import tercet

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

DEVICE = "cuda"
SETTINGS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_running_requests": 40,
    "max_total_tokens": 20_032,
    "max_prefill_tokens": 2048,
    "enable_hierarchical_cache": True,
    "hicache_size": 0.1,
}
"""Those of gpu_runners.py, so that most kernels are compiled already."""
GREEDY = {"temperature": 0, "ignore_eos": True}
SAMPLINGS = (
    GREEDY,
    {"temperature": 0.8, "top_p": 0.9, "ignore_eos": True},
    {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.2, "logit_bias": {"7": 2.0}, "ignore_eos": True},
)


def write_config(folder: Path) -> Path:
    path = folder / "config.json"
    shape = {
        "architectures": [LLAMA.architecture], "model_type": "llama", "hidden_size": LLAMA.hidden_size,
        "intermediate_size": LLAMA.intermediate_size, "num_hidden_layers": LLAMA.num_layers,
        "num_attention_heads": LLAMA.num_heads, "num_key_value_heads": LLAMA.num_kv_heads, "head_dim": LLAMA.head_dim,
        "vocab_size": LLAMA.vocab_size, "max_position_embeddings": LLAMA.context_len,
    }  # fmt: skip
    path.write_text(json.dumps(shape))
    return path


def test_an_engine_answers_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    prompts = [[3 + i % 4000 for i in range(length)] for length in (1, 2, 40, 300, 1500) for _ in SAMPLINGS]
    with tercet.Engine(write_config(tmp_path), device=DEVICE, **SETTINGS) as engine:
        sampling = [{**SAMPLINGS[i % len(SAMPLINGS)], "max_new_tokens": 20} for i in range(len(prompts))]
        for wanted in ({}, {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}):
            for answer in engine.generate(input_ids=prompts, sampling_params=sampling, **wanted):
                assert len(answer["output_ids"]) == 20
        stream = engine.generate(input_ids=prompts[-1], sampling_params=GREEDY | {"max_new_tokens": 400}, stream=True)
        begun = next(stream)["output_ids"]
        os.kill(engine._thread.core.child_pids["scheduler"], signal.SIGKILL)
        *_, last = stream
        assert len(last["output_ids"]) == 400 and last["output_ids"][: len(begun)] == begun
        info = engine.get_server_info()
        assert info["device"] == DEVICE and info["num_engine_restarts"] == last["meta_info"]["num_recoveries"] == 1

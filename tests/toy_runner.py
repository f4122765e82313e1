"""The toy model of the runner's tests, and its runner: random float32 weights, and room for a few requests."""

from __future__ import annotations

import dataclasses

from runners import make_runner

from tercet.model_executor.runner.model_runner import ModelRunner
from tercet.srt.model_files.model_config import ModelConfig

TOY = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=99,
    context_len=64,
    tie_word_embeddings=True,
)
TOY_QWEN = dataclasses.replace(TOY, architecture="Qwen3ForCausalLM", qk_norm="heads", tie_word_embeddings=False)


def make_toy_runner(config: ModelConfig = TOY, **settings) -> ModelRunner:
    """Make a runner of the toy model. `settings`: fields of ServerArgs."""
    defaults = {"dtype": "float32", "max_running_requests": 4, "max_total_tokens": 128}
    return make_runner(config, **{**defaults, **settings})

"""A small model for tests of the compiled CPU operations, in all their configurations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from runners import make_settings

from tercet.model_executor import cpu_extension
from tercet.model_executor.cpu_calibration import ChosenTuning, default_tuning
from tercet.model_executor.layers.linear import can_pack
from tercet.model_executor.runner.load import load_runner
from tercet.srt.model_files.model_config import ModelConfig

# The context is longer than a split of attention, and the vocabulary is not a multiple of the panel width.
CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    hidden_size=96,
    intermediate_size=160,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=301,
    context_len=320,
    qk_norm="heads",
    tie_word_embeddings=True,
    sliding_windows=(None, 70),
    load_format="dummy",
)
VARIANTS = [
    # dtype, quantization, kind of products or of weights, page size
    ("float32", None, 1),
    ("bfloat16", None, 1),
    ("float32", "int8", 1),
    ("bfloat16", "int4", 1),
    ("float32", None, 32),
    ("bfloat16", None, 32),
    ("float32", "onednn", 1),
    ("bfloat16", "onednn", 1),
    ("bfloat16", "widened", 32),
    ("bfloat16", "compact", 32),
]


def make_cpu_runner(variant=VARIANTS[0], config=CONFIG, lora=None, **options):
    """Makes a runner. `variant`: one of VARIANTS; `lora`: a LoraSize; `options`: options of ModelRunner.

    Skips the test if this variant leaves the products to torch.
    """
    dtype, products, page_size = variant
    if not cpu_extension.multiplies(getattr(torch, dtype)) and products is None:
        pytest.skip("torch multiplies this type here")
    if products in ("widened", "compact") and not (cpu_extension.load() and torch.ops.tercet_cpu.multiplies_bfloat16()):
        pytest.skip("this build does not multiply bfloat16")
    onednn = products == "onednn"
    if onednn and not can_pack(torch.empty(1, 1, dtype=getattr(torch, dtype))):
        pytest.skip("oneDNN does not multiply this type here")
    settings = {
        "max_running_requests": 64,
        "max_total_tokens": 8000,
        "dtype": dtype,
        "quantization": products if products in ("int8", "int4") else None,
        "attention_backend": "cpu",
        "page_size": page_size,
        **options,
    }
    if page_size > 1 and config.latent is None:
        config = replace(config, head_dim=32)  # with pages, the head dimension must fill whole panels
    resolved = replace(make_settings(config, **settings), onednn=onednn, lora=lora)
    if products == "widened":
        tuning = default_tuning()._replace(bfloat16="widened")
        resolved = replace(resolved, cpu_kernels=ChosenTuning(tuning, "test"))
    if products == "compact":
        resolved = replace(resolved, compact=True)
    return load_runner(resolved, config)

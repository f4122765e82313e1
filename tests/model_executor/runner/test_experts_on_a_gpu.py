"""A mixture of experts with Triton attention: fp8 weights are refused before anything is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny_models import checkpoint

from tercet.model_executor.runner.settings import resolve_weights
from tercet.srt.model_files.quantization_config import Fp8Config


def test_fp8_weights_are_refused(tmp_path: Path) -> None:
    config = checkpoint(tmp_path / "model", "qwen3_moe")
    assert not resolve_weights(torch.bfloat16, config, "triton", None, None).forms
    stored = dataclasses.replace(config, quantization=Fp8Config(by_block=False))
    for given, quantization in ((config, "fp8"), (stored, None)):
        with pytest.raises(ValueError, match="16 or 32 bits, but the weights are fp8"):
            resolve_weights(torch.bfloat16, given, "triton", quantization, None)

"""Weights of a GGUF file are dequantised on the GPU, with the bits of a CPU."""

from __future__ import annotations

import pytest
import torch
from gguf_models import FACTORS, write_gguf
from tiny_models import make_wide_model

from tercet.model_executor.weights.ggml_types import Kind
from tercet.model_executor.weights.loader import load_parameters
from tercet.srt.model_files.load_config import load_model_config

pytestmark = pytest.mark.gpu

TYPES = (*FACTORS, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.MXFP4, Kind.F16)


@pytest.mark.parametrize("kind", TYPES, ids=[kind.name for kind in TYPES])
def test_parameters_have_the_bits_of_a_cpu(tmp_path, kind):
    config = load_model_config(write_gguf(tmp_path / "m.gguf", make_wide_model(tied=False), "llama", kind=kind))
    for dtype in (torch.float32, torch.bfloat16):
        found, expected = (load_parameters(config, dtype, torch.device(device)) for device in ("cuda", "cpu"))
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert tensor.is_cuda and torch.equal(tensor.cpu(), expected[name]), name

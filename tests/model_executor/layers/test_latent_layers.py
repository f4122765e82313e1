"""The memory that layers of latent attention hold."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tercet.model_executor import cpu_extension
from tercet.model_executor.layers.cpu_latent import CpuLatentAttention
from tercet.model_executor.layers.latent_attention import LatentAttention, LatentLayers, same_angles
from tercet.model_executor.layers.layernorm import RMSNorm
from tercet.srt.model_files.latent_config import LatentConfig

SIZES = LatentConfig(latent_dim=64, nope_dim=32, rope_dim=32, value_dim=32)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_layers_that_pack_a_weight_do_not_keep_it(is_compiled: bool) -> None:
    if is_compiled and not cpu_extension.load():
        pytest.skip("no build of csrc/cpu for this processor")
    memory = np.ones((4, 64, 64), np.float32)
    layers = LatentLayers(RMSNorm(torch.ones(64), 1e-6), None, None, torch.from_numpy(memory))
    backend = SimpleNamespace(num_heads=4, kv_pool=SimpleNamespace(k_buffer=[None], v_buffer=[None]))
    made = (
        CpuLatentAttention(0, backend, SIZES, layers)
        if is_compiled
        else LatentAttention(0, backend, SIZES, layers, same_angles)
    )
    kept = weakref.ref(memory)
    del memory, layers
    assert made and kept() is None

"""The number of launches of a decode step on a GPU, for each layer and besides them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from launches import counted_launches
from meta_runner import make_meta_runner
from toy_runner import TOY

from tercet.model_executor.runner.decode_runner import DecodeInputs

BESIDES_LAYERS = 10
"""Positions and slots, tokens and their embedding, angles, attention work, the last norm, logits."""


@pytest.fixture(autouse=True)
def gpus_do_not_pack(monkeypatch):
    monkeypatch.setattr("tercet.model_executor.layers.linear.can_pack", lambda weight: False)


def decode_launches(monkeypatch, num_layers: int, batch_size: int, *, fused: bool) -> list[str]:
    config = dataclasses.replace(TOY, num_layers=num_layers, head_dim=16, sliding_windows=(None,) * num_layers)
    with counted_launches():
        runner, _ = make_meta_runner(
            monkeypatch, config, attention=None, attention_backend="triton", disable_cuda_graph=True,
            max_running_requests=40, fuse_small_steps=fused,
        )  # fmt: skip
    rows = torch.empty(batch_size, dtype=torch.int64, device="meta")
    out = torch.empty((batch_size, config.vocab_size), device="meta")
    with counted_launches() as counted, torch.inference_mode():
        runner.decode(DecodeInputs(rows, rows, rows), np.full(batch_size, 40, np.int32), out)
    return counted.names


@pytest.mark.parametrize(
    ("batch_size", "fused", "in_a_layer"), [(1, False, 10), (1, True, 5), (8, True, 5), (9, True, 10)]
)
def test_launches_of_a_decode_step(batch_size: int, fused: bool, in_a_layer: int, monkeypatch) -> None:
    two, three = (decode_launches(monkeypatch, n, batch_size, fused=fused) for n in (2, 3))
    assert len(three) - len(two) == in_a_layer
    assert three.count("_skinny_linear_kernel") == (13 if in_a_layer == 5 else 0)
    assert three.count("_fused_decode_kernel") == (3 if in_a_layer == 5 else 0)
    assert len(two) - 2 * in_a_layer == BESIDES_LAYERS, two

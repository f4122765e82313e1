"""`launch` takes no value from the device and sends all from pinned memory, whatever the step and the sampling."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from launches import counted_launches
from meta_runner import NoWaiting, WaitingForTheDeviceError, every_kind_of_step, launch_all, make_meta_runner
from toy_runner import TOY_QWEN

from tercet.model_executor.layers.lora_layers import LoraSize
from tercet.model_executor.step import KVCopies


@pytest.mark.parametrize("with_masks", [False, True])
@pytest.mark.parametrize("disable_cuda_graph", [False, True])
def test_no_kind_of_step_waits(disable_cuda_graph, with_masks, monkeypatch):
    runner, accelerator = make_meta_runner(monkeypatch, TOY_QWEN, disable_cuda_graph=disable_cuda_graph)
    launch_all(runner, accelerator, with_masks=with_masks)
    assert accelerator.num_replays == (0 if disable_cuda_graph else 3)


@pytest.mark.parametrize("disable_cuda_graph", [False, True])
def test_steps_with_adapters_do_not_wait(disable_cuda_graph, monkeypatch):
    monkeypatch.setattr("tercet.model_executor.layers.linear.can_pack", lambda weight: False)
    with counted_launches() as counted:  # no kernel runs
        runner, accelerator = make_meta_runner(
            monkeypatch, TOY_QWEN, attention_backend="triton", lora=LoraSize(2, 4),
            disable_cuda_graph=disable_cuda_graph,
        )  # fmt: skip
        launch_all(runner, accelerator, with_masks=False)
    assert counted.names.count("_expand_kernel") > 4 * TOY_QWEN.num_layers
    assert accelerator.num_replays == (0 if disable_cuda_graph else 3)


def test_a_decode_step_is_one_upload_when_all_are_greedy(monkeypatch):
    runner, accelerator = make_meta_runner(monkeypatch, TOY_QWEN)
    *_, step = every_kind_of_step()  # one row, whose owner nobody named: greedy
    runner.launch(step).sample()
    with NoWaiting(accelerator) as watched:
        runner.launch(step).sample()
    assert watched.num_uploads == 1


def test_copies_of_kv_wait_for_nothing(monkeypatch):
    tiers = {"enable_hierarchical_cache": True, "hicache_size": 0.0005}
    runner, accelerator = make_meta_runner(monkeypatch, TOY_QWEN, **tiers)
    *_, step = every_kind_of_step()
    pages = np.arange(1, 9, dtype=np.int32)
    for copies in (KVCopies(pages, pages, pages + 20, pages + 40), KVCopies(pages, pages, pages[:0], pages[:0])):
        waits = accelerator.num_waits
        with NoWaiting(accelerator) as watched:
            launched = runner.launch(dataclasses.replace(step, kv_copies=copies))
            launched.sample()
        assert watched.num_uploads > 1 and accelerator.num_waits == waits
        launched.wait()
        assert accelerator.num_waits > waits, "the host's pages are valid when the step has ended"


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: 1 if x[0] > 0 else 2,
        lambda x: torch.from_numpy(np.ones(3)).to(x.device),
        lambda x: torch.tensor([1, 2, 3], device=x.device),
        lambda x: x.copy_(torch.ones(3), non_blocking=True),
        lambda x: x.masked_select(x > 0),
    ],
)
def test_what_would_wait_is_noticed(waits, monkeypatch):
    _, accelerator = make_meta_runner(monkeypatch, TOY_QWEN)
    x = torch.empty(3, device="meta")
    with pytest.raises((WaitingForTheDeviceError, RuntimeError, TypeError)), NoWaiting(accelerator):
        waits(x)

"""The sampler on a GPU queues a handful of launches, whatever the batch, the vocabulary and the parameters.

They include the store of the tokens for the next step.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from launches import counted_launches
from meta_runner import MetaAccelerator
from sampling_reference import new_row
from triton_aot import recorded

from tercet.model_executor.device.device_buffers import Uploads
from tercet.model_executor.runner.warmup import all_allowed
from tercet.model_executor.sampling.newest_tokens import NewestTokens
from tercet.model_executor.sampling.sampler import Sampler

EVERYTHING = (
    {"temperature": 0.0, "repetition_penalty": 1.3, "min_new_tokens": 9},
    {"temperature": 1.0, "logit_bias": {"3": 2.0}},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "presence_penalty": 0.5, "sampling_seed": 4},
    {"temperature": 1.0, "top_p": 0.95, "frequency_penalty": 0.2},
    {"temperature": 2.0, "min_p": 0.05},
)
EDITS = ["_edit_kernel"]
OPEN = [*EDITS, "_weigh_kernel"]
RANKED = [*OPEN, "_limit_kernel", "_gather_kernel"]


def launches(num_rows: int, vocab: int, kinds, *, masked: bool = False, new_rows: bool = False) -> list[str]:
    meta = torch.device("meta")
    sampler = Sampler(num_rows, vocab, meta, Uploads(meta, MetaAccelerator()), use_kernels=True)
    rows = np.arange(1, num_rows + 1, dtype=np.int32)
    logits = torch.empty((num_rows, vocab), dtype=torch.float32, device=meta)
    on_device = torch.empty(num_rows, dtype=torch.int64, device=meta)
    masks = all_allowed(num_rows, vocab) if masked else None
    newest = NewestTokens(torch.empty(num_rows + 1, dtype=torch.int64, device=meta), on_device)
    with recorded():
        for row in rows:
            sampler.set_row(new_row(int(row), stops=(0, 2), **kinds[row % len(kinds)]))
        if not new_rows:
            sampler.sample(logits, rows, rows + 5)
    with counted_launches() as counted:
        sampler.sample(logits, rows, rows + 5, masks, newest)
    return counted.names


@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 151_936), (256, 151_936)])
def test_all_parameters_at_once(num_rows: int, vocab: int) -> None:
    kinds = EVERYTHING if num_rows > 1 else EVERYTHING[2:3]
    names = launches(num_rows, vocab, kinds, masked=True)
    assert names == [*RANKED, "_choose_kernel", "copy_"]
    assert len(launches(num_rows, vocab, kinds, masked=True, new_rows=True)) <= 8


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ({"temperature": 0.0}, ["_argmax_chunk_kernel", "_argmax_merge_kernel"]),
        ({"temperature": 0.0, "presence_penalty": 1.0}, [*EDITS, "_choose_kernel", "copy_"]),
        ({"temperature": 1.0, "min_p": 0.1}, [*OPEN, "_choose_kernel", "copy_"]),
        ({"temperature": 1.0, "top_p": 0.9}, [*RANKED, "_choose_kernel", "copy_"]),
    ],
)
def test_what_no_row_needs_is_not_launched(kind, expected) -> None:
    assert launches(256, 32_000, [kind]) == expected

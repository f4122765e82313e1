"""A ModelRunner on torch's meta device, to prove that no step waits for the device.

Tensors on the meta device have shapes but no values. So `.item()`, `.tolist()`, `nonzero`, a boolean index, a branch on
a tensor and every copy to the host raise an error. `NoWaiting` refuses the remaining waits: copies from the host that
are blocking or do not start in pinned memory.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import numpy as np
import torch
from fake_accelerator import FakeAccelerator, FakeEvent
from runners import make_runner
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tercet.model_executor.attention.base import AttentionBackend
from tercet.model_executor.device.memory import Memory
from tercet.model_executor.models.parameters import decoder_parameters
from tercet.model_executor.runner import load, settings
from tercet.model_executor.runner.warmup import all_allowed
from tercet.model_executor.step import (
    FROM_DEVICE,
    ForwardMode,
    HiddenRange,
    HiddenSum,
    NewRow,
    PromptScore,
    StepInputs,
    TableUpdate,
)
from tercet.srt.logprobs import LogprobOptions
from tercet.srt.sampling_params import SamplingParams

EVERY_SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={"3": 2.0}, min_new_tokens=5),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=1.0, top_k=5, presence_penalty=0.5),
    SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.5),
)


class WaitingForTheDeviceError(AssertionError):
    pass


def _refuse(*args, **kwargs):
    raise WaitingForTheDeviceError("a tensor made from Python numbers is copied from pageable memory")


class NoWaiting(TorchDispatchMode):
    def __init__(self, accelerator: MetaAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self.num_uploads = 0
        self._patches = ExitStack()

    def __enter__(self):
        # These functions copy Python numbers to the device without the dispatcher, so they are replaced.
        for name in ("tensor", "as_tensor", "asarray"):
            self._patches.enter_context(mock.patch.object(torch, name, _refuse))
        return super().__enter__()

    def __exit__(self, *exception):
        self._patches.close()
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        if on_host and len(on_host) < len(tensors):
            pinned = {buffer.untyped_storage().data_ptr() for buffer in self._accelerator.all_pinned}
            from_pinned = all(tensor.untyped_storage().data_ptr() in pinned for tensor in on_host)
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            if func is not torch.ops.aten.copy_.default or not from_pinned or not non_blocking:
                raise WaitingForTheDeviceError(f"{func} mixes pageable host memory with the device's")
            self.num_uploads += 1
        return out


class MetaAccelerator(FakeAccelerator):
    """A fake accelerator for meta tensors. Copies to the host give zeros, and a replay runs nothing."""

    def __init__(self) -> None:
        super().__init__(lag=20, memory=Memory(total=1 << 37, available=1 << 36))
        self.all_pinned: list[torch.Tensor] = []

    def pinned(self, num_bytes):
        self.all_pinned.append(super().pinned(num_bytes))
        return self.all_pinned[-1]

    def fetch(self, source, target):
        assert source.device.type == "meta" and source.shape == target.shape and source.dtype == target.dtype
        return FakeEvent(self, lambda: target.numpy().fill(0))

    def bring(self, sources, after=None):
        self.tick()
        parts = [torch.empty(source.shape, dtype=source.dtype, device="meta") for source in sources]
        return torch.cat([part.copy_(source, non_blocking=True) for part, source in zip(parts, sources, strict=True)])

    def record(self, work):
        with NoWaiting(self) as watched:
            work()
        assert watched.num_uploads == 0, "a graph would replay this upload from memory that has changed since"
        return self

    def replay(self) -> None:
        self.num_replays += 1


class MetaAttention(AttentionBackend):
    name = "meta"

    def num_splits(self, seq_lens):
        return int(seq_lens.sum())

    def plan(self, batch):
        for tensor in (batch.rows, batch.seq_lens, batch.input_ids, batch.positions, batch.out_cache_loc):
            assert tensor.device.type == "meta" and tensor.dtype == torch.int64

    def attend(self, q, layer_id, batch, sinks=None):
        self._check_sinks(layer_id, sinks)
        return q.new_empty(q.shape[0], self.num_heads * self.head_dim)


def make_meta_runner(monkeypatch, config, attention=MetaAttention, **options):
    accelerator = MetaAccelerator()
    meta = torch.device("meta")
    monkeypatch.setattr(load, "make_accelerator", lambda device: accelerator)
    monkeypatch.setattr(settings, "resolve_device", lambda name: meta)
    monkeypatch.setattr(
        load,
        "load_parameters",
        lambda config, dtype, device, *_, **types: {
            parameter.name: torch.empty(parameter.shape, dtype=dtype, device=device)
            for parameter in decoder_parameters(config)
        },
    )
    if attention is not None:
        monkeypatch.setattr(load, "create_attention_backend", lambda name, specs, pool: attention(specs, pool))
    options = {"dtype": "bfloat16", "max_running_requests": 8, "max_total_tokens": 256} | options
    return make_runner(config, **options), accelerator


def every_kind_of_step():
    """Steps of every kind: prefills, chunks, decodes and mixed steps, with and without sampled rows and updates.

    One returns log probabilities of prompt tokens, sums of hidden states, and hidden states.
    """
    rows = np.arange(1, len(EVERY_SAMPLING) + 1, dtype=np.int32)
    n = len(rows)
    none = np.empty(0, np.int32)
    prompt = np.array([4, 5, 6], np.int32)
    wishes = (None, LogprobOptions(), LogprobOptions(top_logprobs_num=3, token_ids_logprob=[4, 5, 6]))
    new = [
        NewRow(int(row), params, 7, prompt, prompt[:1], (2,), wishes[row % 3])
        for row, params in zip(rows, EVERY_SAMPLING, strict=True)
    ]

    def extend(lens, extend_lens, ids, sampled, updates, new_rows=(), scores=(), sums=(), states=()):
        total = int(np.sum(extend_lens))
        return StepInputs(
            ForwardMode.EXTEND,
            rows,
            np.array(lens, np.int32),
            np.arange(1, total + 1, dtype=np.int32),
            list(new_rows),
            updates,
            np.array(extend_lens, np.int32),
            np.array(ids, np.int32),
            np.array(sampled),
            list(scores),
            list(sums),
            list(states),
        )

    def decode(count, length, updates=()):
        slots = np.arange(1, count + 1, dtype=np.int32)
        return StepInputs(ForwardMode.DECODE, rows[:count], np.full(count, length, np.int32), slots, [], list(updates))

    updates = [TableUpdate(int(row), 0, prompt) for row in rows]
    scores = [PromptScore(1, 1, prompt[:2]), PromptScore(2, 3, prompt)]
    sums, states = [HiddenSum(0, 3)], [HiddenRange(3, 2), HiddenRange(6, 3)]
    yield extend([3] * n, [3] * n, [5] * 3 * n, [False] * n, updates, new, scores, sums, states)
    yield extend([4] * n, [1] * n, [5] * n, [True] * n, [TableUpdate(1, 3, prompt[:1])])
    mixed = [FROM_DEVICE] * 2 + [5] * (2 * (n - 2))
    yield extend([5, 5] + [6] * (n - 2), [1, 1] + [2] * (n - 2), mixed, [True] * n, updates)
    yield decode(n, 7)
    yield decode(3, 8, [TableUpdate(2, 0, prompt)])
    yield decode(1, 9)
    assert len(none) == 0


def launch_all(runner, accelerator, *, with_masks=False):
    """Launches steps of every kind without reading a token in between. Then reads all tokens."""
    waits = accelerator.num_waits
    results = []
    for step in every_kind_of_step():
        with NoWaiting(accelerator) as watched:
            results.append((runner.launch(step), step.num_sampled))
            results[-1][0].sample(all_allowed(step.num_sampled, runner.config.vocab_size) if with_masks else None)
        assert watched.num_uploads > 0
    assert accelerator.num_waits == waits, "a launch waited for an event"
    for result, count in results:
        assert len(result.wait().tokens) == count

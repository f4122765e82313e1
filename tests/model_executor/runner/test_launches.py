"""The number of launches of a decode step on a GPU, with its inputs and its greedy tokens."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from launches import counted_launches
from meta_runner import make_meta_runner
from toy_runner import TOY
from triton_aot import recorded

from tercet.model_executor.layers.lora_layers import LoraSize
from tercet.model_executor.step import ForwardMode, NewRow, StepInputs
from tercet.srt.sampling_params import SamplingParams

BESIDES_LAYERS = Counter(
    ["copy_", "_decode_start_kernel", "_work_map_kernel", "_argmax_chunk_kernel", "_argmax_merge_kernel"]
)
"""The upload of the inputs, the start of the step, the attention work, the choice of tokens."""
HEAD = Counter(["_rmsnorm_kernel", "mm"])
FUSED_HEAD = Counter(["_skinny_linear_kernel"])


@pytest.fixture(autouse=True)
def gpus_do_not_pack(monkeypatch):
    monkeypatch.setattr("tercet.model_executor.layers.linear.can_pack", lambda weight: False)


def decode_launches(
    monkeypatch, num_layers: int, batch_size: int, *, fused: bool = False, lora: LoraSize | None = None, **changes
) -> Counter[str]:
    """What the second decode step of greedy requests queues. The first one sends their parameters, too."""
    changes = {"num_layers": num_layers, "head_dim": 16, "sliding_windows": (None,) * num_layers} | changes
    config = dataclasses.replace(TOY, **changes)
    rows = np.arange(1, batch_size + 1, dtype=np.int32)
    none = np.empty(0, np.int32)
    new = [NewRow(int(row), SamplingParams(temperature=0.0), 0, none, none, ()) for row in rows]
    with recorded():
        runner, _ = make_meta_runner(
            monkeypatch, config, attention=None, attention_backend="triton", disable_cuda_graph=True,
            max_running_requests=40, fuse_small_steps=fused, lora=lora,
        )  # fmt: skip
        runner.launch(StepInputs(ForwardMode.DECODE, rows, rows + 40, rows, new)).sample()
    with counted_launches() as counted:
        runner.launch(StepInputs(ForwardMode.DECODE, rows, rows + 41, rows)).sample()
    return Counter(counted.names)


@pytest.mark.parametrize(
    ("batch_size", "fused", "in_a_layer", "besides"),
    [(1, False, 10, 7), (1, True, 5, 6), (8, True, 5, 6), (9, True, 10, 7)],
)
def test_launches_of_a_decode_step(
    batch_size: int, fused: bool, in_a_layer: int, besides: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, three = (decode_launches(monkeypatch, n, batch_size, fused=fused) for n in (2, 3))
    layer = three - two
    assert layer.total() == in_a_layer
    if in_a_layer == 5:
        assert layer == Counter({"_skinny_linear_kernel": 4, "_fused_decode_kernel": 1})
    rest = two - layer - layer
    assert rest == BESIDES_LAYERS + (FUSED_HEAD if in_a_layer == 5 else HEAD) and rest.total() == besides


@pytest.mark.parametrize("fused", [False, True])
def test_a_norm_of_an_output_also_sums(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that normalises its outputs has no launch for sums, nor one for norms of its inputs if it has none."""

    def of_a_layer(**changes) -> Counter[str]:
        two, three = (decode_launches(monkeypatch, n, 4, fused=fused, **changes) for n in (2, 3))
        return three - two

    usual = of_a_layer()
    both, outputs = of_a_layer(output_norms=True), of_a_layer(output_norms=True, input_norms=False)
    assert both["_add_rmsnorm_kernel"] == outputs["_add_rmsnorm_kernel"] == 2
    assert both.total() == usual.total() + 2
    assert outputs["_rmsnorm_kernel"] == 0
    if not fused:
        assert outputs.total() == usual.total()
    rows = of_a_layer(qk_norm="rows")
    assert rows["_qk_rmsnorm_kernel"] == 1 and rows.total() == usual.total() + 1


@pytest.mark.parametrize("batch_size", [1, 9])
def test_adapters_add_two_launches_to_each_linear_layer(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [decode_launches(monkeypatch, n, batch_size) for n in (2, 3)]
    adapted = [decode_launches(monkeypatch, n, batch_size, lora=LoraSize(3, 8)) for n in (2, 3)]
    added = [with_adapters - without for with_adapters, without in zip(adapted, plain, strict=True)]
    assert added[1] - added[0] == Counter({"_shrink_kernel": 4, "_expand_kernel": 4})
    assert sum((added[0] - Counter({"_shrink_kernel": 8, "_expand_kernel": 8})).values()) == 1, "each row's adapter"

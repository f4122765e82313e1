"""Dependent launches: their machine code, and which launches of a decode step are dependent."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
from compiled_dependent import CASES, assert_waits_first
from meta_runner import make_meta_runner
from toy_runner import TOY
from triton_aot import Resources, assert_fits, compile_each, recorded

from tercet.model_executor.runner import kernel_flags
from tercet.model_executor.step import ForwardMode, NewRow, StepInputs
from tercet.srt.sampling_params import SamplingParams

pytestmark = pytest.mark.timeout(600)  # the first test compiles all cases

IN_A_CHAIN = {"_skinny_linear_kernel", "_fused_decode_kernel"}


@cache
def compiled() -> dict[str, list[Resources]]:
    """The kernels of all cases. They are disassembled at once, because the disassembler starts slowly."""
    return compile_each({case: launches() for case, launches in CASES.items()}, "sm_90")


@pytest.mark.parametrize("case", CASES)
def test_dependent_kernels_wait_before_they_read(case: str) -> None:
    for resources in compiled()[case]:
        assert_fits(resources, "sm_90")
        assert_waits_first(resources)


def without_waiting(resources: Resources) -> Resources:
    return resources.with_counts(before_wait=None)


def reading_too_early(resources: Resources) -> Resources:
    assert resources.counts is not None and resources.counts.before_wait is not None
    return resources.with_counts(before_wait=[*resources.counts.before_wait, "LDG.E"])


def starting_the_next_too_early(resources: Resources) -> Resources:
    return resources.with_counts(copies_after_start=1)


@pytest.mark.parametrize("broken", [without_waiting, reading_too_early, starting_the_next_too_early])
def test_a_broken_chain_is_seen(broken) -> None:
    resources = compiled()["dependent linear-2048x8192-gated"][0]
    with pytest.raises(AssertionError):
        assert_waits_first(broken(resources))


@pytest.mark.parametrize(("batch_size", "setting"), [(1, True), (8, True), (9, True), (1, False)])
def test_all_fused_kernels_of_a_step_are_dependent(
    batch_size: int, setting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tercet.model_executor.layers.linear.can_pack", lambda weight: False)
    monkeypatch.setattr(kernel_flags, "_nvidia_capability", lambda device: (9, 0))
    config = dataclasses.replace(TOY, head_dim=16)
    rows = np.arange(1, batch_size + 1, dtype=np.int32)
    none = np.empty(0, np.int32)
    new = [NewRow(int(row), SamplingParams(temperature=0.0), 0, none, none, ()) for row in rows]
    with recorded():
        runner, _ = make_meta_runner(
            monkeypatch, config, attention=None, attention_backend="triton", disable_cuda_graph=True,
            max_running_requests=40, fuse_small_steps=True, dependent_launch=setting,
        )  # fmt: skip
    with recorded() as launches:
        runner.launch(StepInputs(ForwardMode.DECODE, rows, rows + 40, rows, new)).sample()
    found = {launch.kernel.fn.__name__ for launch in launches if launch.kwargs.get("launch_pdl")}
    constants = {launch.kernel.fn.__name__ for launch in launches if launch.kwargs.get("DEPENDENT")}
    assert found == constants == (IN_A_CHAIN if setting and batch_size <= 8 else set())

"""Bound launches against Triton's own, where Triton calls C. Nothing is compiled but one kernel.

The tests run under the environment's Triton, and in processes of their own under those of `scripts/setup --tritons`.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import fake_gpu_driver
import launch_times
import pytest
import torch
import triton
import triton.language as tl
from fake_accelerator import FakeAccelerator, use_fake
from fake_gpu_driver import REGISTERS, FakeDriver, fake_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_driver import RunnerDriver
from runners import make_runner
from triton import knobs
from triton.runtime import _allocation
from triton.runtime.jit import JITFunction
from triton_interpreter import examples
from tritons import OTHERS, run_tests_with

from tercet.model_executor.attention.hopper_backend import HopperAttentionBackend
from tercet.model_executor.kernels import bound as module
from tercet.model_executor.kernels.bound import Bound
from tercet.model_executor.kernels.hopper_extend import hopper_extend_attention
from tercet.model_executor.kernels.rmsnorm import _rmsnorm_kernel, rmsnorm
from tercet.model_executor.kernels.tuning import HOPPER_TILE
from tercet.model_executor.kernels.work_map import WorkMap
from tercet.srt.model_files.model_config import ModelConfig

pytestmark = pytest.mark.timeout(300)

LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=128,
    context_len=96,
    sliding_windows=(None, None),
)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["loose_ptr"])
def _kernel(x_ptr, loose_ptr, y_ptr, stride, other, count, eps, HAS_Y: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK) * stride, eps)


def kernel() -> JITFunction:
    """A copy of the kernel that has not been launched."""
    return triton.jit(_kernel.fn, do_not_specialize=["count"], do_not_specialize_on_alignment=["loose_ptr"])


def view(dtype: torch.dtype, offset: int) -> torch.Tensor:
    """A tensor that starts `offset` elements after an address that is a multiple of 16."""
    return torch.zeros(17, dtype=dtype)[offset:]


TENSORS = [view(dtype, offset) for dtype in (torch.float32, torch.bfloat16, torch.int64) for offset in (0, 1, 16)]
ODD = [None, True, False, 1.0]
INTEGERS = [0, 1, 2, 15, 16, 32, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, 2**63, *ODD]
CHOICES: dict[str, list[Any]] = {
    "x_ptr": [*TENSORS, *ODD],
    "loose_ptr": [*TENSORS, None],
    "y_ptr": [*TENSORS, None],
    "stride": INTEGERS,
    "other": INTEGERS,
    "count": INTEGERS,
    "eps": [0.0, 1.0, 1e-5, 1, None],
    "HAS_Y": [True, False],
    "BLOCK": [16, 32],
    "num_warps": [4, 8],
    "num_stages": [1, 2],
    "enable_fp_fusion": [True, False],
    "launch_pdl": [False, True],
    "grid": [(3,), (3, 2), (3, 2, 5), (0,), lambda arguments: (arguments["BLOCK"],)],
    "device": [0, 1],
    "stream": [0, 1],
}
"""All that a launch depends on."""
USUAL = {name: choices[0] for name, choices in CHOICES.items()} | {"stride": 32, "other": 32, "count": 32}
changes = st.sampled_from([{name: choice} for name, choices in CHOICES.items() for choice in choices])


@st.composite
def launches(draw) -> list[dict[str, Any]]:
    """What several launches depend on: they differ in one or two choices each, and each is repeated at the end."""
    base = USUAL | draw(changes) | draw(changes)
    different = [base | draw(changes) | draw(changes) for _ in range(draw(st.integers(5, 25)))]
    return different + different


def launched(driver: FakeDriver, launch: Any, choices: dict[str, Any]) -> tuple[Any, Any] | str:
    """What C got for a launch, and the compiled kernel; or the error's type."""
    keywords = dict(choices)
    driver.device, driver.stream, grid = (keywords.pop(name) for name in ("device", "stream", "grid"))
    # As kernels are called: constants and options by name.
    args = [keywords.pop(name) for name in _kernel.arg_names if name.islower()]
    before = len(driver.launches)
    try:
        compiled = launch[grid](*args, **keywords)
    except Exception as error:
        assert len(driver.launches) == before
        return type(error).__name__
    (found,) = driver.launches[before:]
    return found, compiled


@settings(max_examples=examples(40))
@given(launches())
def test_bound_launches_are_those_of_triton(drawn: list[dict[str, Any]]) -> None:
    tried = kernel()
    bound = Bound(tried)
    with fake_gpu() as driver:
        for choices in drawn:
            assert launched(driver, bound, choices) == launched(driver, tried, choices)


def test_a_launch_enters_triton_once() -> None:
    """Later launches call two Python functions, and C."""
    x, weight = torch.ones(3, 64), torch.ones(64)
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        files = [each.f_code.co_filename for each in (frame, frame.f_back) if each]
        if event == "call" and fake_gpu_driver.__file__ not in files:
            called.append(frame.f_code.co_name)

    def launch(eps: float) -> Any:
        constants = {"WIDTH": 64, "HAS_RESIDUAL": False, "BLOCK": 64}
        return _rmsnorm_kernel[(3,)](x, x, weight, x, 64, eps, **constants, num_warps=1)

    with fake_gpu() as driver:
        compiled = launch(1e-6)
        assert compiled.n_regs == REGISTERS
        with patch.object(JITFunction, "run", None):
            sys.setprofile(note)
            again = launch(0.5)
            sys.setprofile(None)
    assert again is compiled
    assert called == ["launch", "__getitem__", "launch"]
    assert [launched.args[5] for launched in driver.launches] == [1e-6, 0.5]


def test_descriptors_are_passed_as_triton_passes_them() -> None:
    """Of two pools and two page sizes, each launched twice. Boxes are part of the key."""

    def launch(pool: torch.Tensor, page_size: int) -> None:
        q, index = torch.zeros(3, 4, 64, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
        work = WorkMap(torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), HOPPER_TILE.block_m)
        hopper_extend_attention(
            q, pool, pool, torch.zeros(1, 8, dtype=torch.int32), index[:1], index, index[:1], work, torch.zeros_like(q),
            sm_scale=0.1, page_size=page_size,
        )  # fmt: skip

    pools = [torch.zeros(256, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
    found: dict[bool, list[tuple[Any, ...]]] = {}
    ways = {True: Bound.__getitem__, False: lambda kernel, grid: kernel.jit[grid]}
    for is_bound, way in ways.items():
        with fake_gpu() as driver, patch.object(Bound, "__getitem__", way):
            run = JITFunction.run
            for use_of_triton in (run, None if is_bound else run):
                with patch.object(JITFunction, "run", use_of_triton):
                    for pool in pools:
                        for page_size in (64, 128):
                            launch(pool, page_size)
            # The addresses of tensors that a call makes differ.
            found[is_bound] = [
                (each.grid, each.function, each.types, [arg for arg in each.args if arg in bases(pools) or small(arg)])
                for each in driver.launches
            ]
    assert found[True] == found[False] and len(found[True]) == 8
    assert len({function for _, function, *_ in found[True]}) == 2, "a kernel for each size of a box"


def bases(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def small(arg: Any) -> bool:
    """Whether an argument is no address."""
    return not isinstance(arg, int) or abs(arg) < 1 << 20


def num_calls(call: Callable[[], object]) -> int:
    """The functions that a call calls, of Python and of C, without those that the fake driver calls.

    Unlike a time, the number is the same in each run.
    """
    count = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        if frame.f_code.co_filename != fake_gpu_driver.__file__:
            count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


def test_a_bound_launch_takes_at_most_half_of_tritons_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each wrapper of a prefill layer, without what the wrapper calls. tests/launch_times.py prints times."""
    for called in (launch_times.extend_attention, launch_times.fp8_linear):
        monkeypatch.setattr(called, "arch_of", lambda device: "sm_90")
    ways = {
        "Triton": lambda kernel, grid: kernel.jit[grid],
        "bound": Bound.__getitem__,
        "none": lambda kernel, grid: lambda *args, **kwargs: None,
    }
    with fake_gpu():
        for name, call in launch_times.layer().items():
            calls: dict[str, int] = {}
            for way, launch in ways.items():
                with patch.object(Bound, "__getitem__", launch):
                    call()
                    call()  # the second launch of a key is bound
                    calls[way] = num_calls(call)
            of_launch = calls["bound"] - calls["none"]
            assert 0 < of_launch <= (calls["Triton"] - calls["none"]) / 2, (name, calls)


@pytest.mark.parametrize("hopper_prefill", [False, True])
def test_steps_enter_triton_once_for_each_kernel(hopper_prefill: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, both kinds of row in one step, and decode: every launch is Triton's, and later steps do without it."""
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr("tercet.model_executor.runner.kernel_flags._is_hopper", lambda device: True)
    use_fake(monkeypatch, FakeAccelerator(), attention=None)
    bind = Bound.__getitem__

    def bound_then_triton(kernel: Bound, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Any:
            compiled = bind(kernel, grid)(*args, **kwargs)
            assert kernel.jit[grid](*args, **kwargs) is compiled
            return compiled

        return launch

    with fake_gpu() as driver:
        runner = make_runner(
            dataclasses.replace(LLAMA, head_dim=64), attention_backend="triton", dtype="bfloat16", page_size=64,
            disable_cuda_graph=True, max_running_requests=4, max_total_tokens=256, max_prefill_tokens=64,
            hopper_prefill=hopper_prefill,
        )  # fmt: skip
        steps = RunnerDriver(runner)
        new_rows = [steps.add(row) for row in (1, 2)]

        def serve() -> None:
            steps.extend({1: [5] * 7, 2: [6] * 4}, new_rows=new_rows)
            steps.extend({1: None, 2: [5] * 3})
            steps.decode([1, 2])

        serve()
        driver.launches.clear()
        with patch.object(Bound, "__getitem__", bound_then_triton):
            serve()
        assert driver.launches[::2] == driver.launches[1::2]
        assert len({launch.function for launch in driver.launches}) > 10
        assert isinstance(runner.attention, HopperAttentionBackend) == hopper_prefill
        with patch.object(JITFunction, "run", None):
            serve()


def test_machine_code_is_launched_as_it_was_compiled() -> None:
    x, weight = torch.ones(3, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    with fake_gpu(compiles=True) as driver:
        for _ in range(2):
            rmsnorm(x, weight, 1e-6)
        first, second = driver.launches
    assert first._replace(args=()) == second._replace(args=())
    assert first.packed_metadata[:2] == (1, 1) and first.types[:6] == ("*bf16",) * 4 + ("i32", "fp32")


def test_a_profiler_sees_bound_launches() -> None:
    x, weight = torch.ones(3, 64), torch.ones(64)
    seen: list[str] = []
    hook = lambda about: seen.append(about.get()["name"])  # noqa: E731
    with fake_gpu() as driver:
        rmsnorm(x, weight, 1e-6)
        for hooks in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
            hooks.add(hook)
            rmsnorm(x, weight, 1e-6)
            hooks.remove(hook)
        with patch.object(JITFunction, "run", None):
            rmsnorm(x, weight, 1e-6)
        with patch.object(knobs.runtime, "launch_enter_hook", hook):
            rmsnorm(x, weight, 1e-6)
        assert len(driver.launches) == 5
    assert seen == ["_rmsnorm_kernel"] * 3


@pytest.mark.parametrize(
    "said", [{"global_scratch_size": 128}, {"profile_scratch_size": 8}, {"launch_cooperative_grid": True}]
)
def test_kernels_that_need_more_are_launched_by_triton(said: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[int] = []

    def allocate(size: int, alignment: int, stream: int) -> str:
        allocated.append(size)
        return "scratch"

    allocator = SimpleNamespace(get=lambda: allocate)
    monkeypatch.setattr(_allocation, "_allocator", allocator)
    monkeypatch.setattr(_allocation, "_profile_allocator", allocator)
    with fake_gpu(**said) as driver:
        for _ in range(3):
            rmsnorm(torch.ones(3, 64), torch.ones(64), 1e-6)
        assert len(driver.launches) == 3 and driver.launches[-1].cooperative == ("launch_cooperative_grid" in said)
        assert not _rmsnorm_kernel._launches
    assert len(allocated) == (3 if "launch_cooperative_grid" not in said else 0)


def test_an_unknown_triton_launches_itself(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(triton, "__version__", "3.6.0.post1")
    with fake_gpu() as driver, caplog.at_level(logging.WARNING, module.__name__):
        for _ in range(3):
            rmsnorm(torch.ones(3, 64), torch.ones(64), 1e-6)
        assert len(driver.launches) == 3 and not _rmsnorm_kernel._launches
    (message,) = caplog.messages
    assert "Triton 3.6.0.post1 on this device (CudaLauncher) has no bound launches" in message


@pytest.mark.parametrize("version", OTHERS)
def test_the_same_under_another_triton(version: str) -> None:
    run_tests_with(version, "-k", "not under_another_triton", __file__)

"""The runner compiles every kernel before it serves: no step waits for the compiler.

Launches are noted and not run, so what they would have written are zeros.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from fake_accelerator import FakeAccelerator, use_fake
from meta_runner import EVERY_SAMPLING
from runner_driver import RunnerDriver
from runners import make_runner
from triton_aot import TARGETS, Launch, recorded, what_is_compiled

from tercet.model_executor.kernels import extend_attention
from tercet.model_executor.kernels.tuning import extend_tile
from tercet.model_executor.layers.lora_layers import LoraSize
from tercet.model_executor.runner.warmup import LONG_TOKENS, _prefill
from tercet.model_executor.step import TokenMasks, num_mask_words
from tercet.srt.logprobs import LogprobOptions
from tercet.srt.model_files.delta_net_config import DeltaNetConfig
from tercet.srt.model_files.experts_config import ExpertsConfig
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.short_convolutions import ShortConvolutions
from tercet.srt.sampling_params import SamplingParams

pytestmark = pytest.mark.timeout(300)

TWO_KINDS_OF_LAYER = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=32,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=9000,
    context_len=96,
    sliding_windows=(None, 8),
    load_format="dummy",
)


def some_allowed(rng: np.random.Generator, num_rows: int) -> TokenMasks | None:
    """Masks for some of the sampled rows."""
    lines = np.flatnonzero(rng.random(num_rows) < 0.5).astype(np.int32)
    bits = np.full((len(lines), num_mask_words(TWO_KINDS_OF_LAYER.vocab_size)), 5, np.int32)
    return TokenMasks(lines, bits) if len(lines) else None


def serve(runner, rng: np.random.Generator) -> None:
    """Prompts, both kinds of row in one step, and decodes; some rows sampled and some not, alike or each its own."""
    masks = (lambda n: some_allowed(rng, n)) if rng.random() < 0.5 else None
    driver = RunnerDriver(runner, masks=masks)
    rows = rng.permutation(np.arange(1, runner.settings.max_running_requests + 1))[
        : rng.integers(1, runner.settings.max_running_requests + 1)
    ].tolist()
    sampling = rng.choice(len(EVERY_SAMPLING), len(rows) if rng.random() < 0.5 else 1)
    kinds = [EVERY_SAMPLING[k] for k in np.resize(sampling, len(rows))]
    new_rows = [driver.add(row, kind) for row, kind in zip(rows, kinds, strict=True)]
    driver.extend({row: [5] * int(rng.integers(1, 10)) for row in rows}, rng.random(len(rows)) < 0.8, new_rows=new_rows)
    some = rows[: rng.integers(1, len(rows) + 1)]
    driver.extend({row: [5] * 3 if i % 2 else None for i, row in enumerate(some)})
    driver.decode(some)
    driver.decode(rows[-1:])


def test_the_long_requests_of_warming_up_have_several_splits() -> None:
    for arch in TARGETS:
        for width in (64, 128, 256):
            assert extend_tile(arch, width).split < LONG_TOKENS
            assert extend_tile(arch, width, fp32=True).split < LONG_TOKENS


@pytest.mark.parametrize(
    ("num_rows", "disable_cuda_graph", "options"),
    [
        *((n, disabled, {}) for n in (1, 37, 1100) for disabled in (False, True)),
        (37, False, {"fuse_small_steps": True}),
        (37, True, {"fuse_small_steps": True, "cuda_graph_max_bs": 16}),
        (37, True, {"quantization": "fp8"}),
    ],
)
def test_no_step_waits_for_the_compiler(
    num_rows: int, disable_cuda_graph: bool, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty", torch.zeros)
    accelerator = FakeAccelerator()
    use_fake(monkeypatch, accelerator, attention=None)
    # Few query tiles then share the device by splits of their KV, and many do not.
    monkeypatch.setattr(extend_attention, "num_multiprocessors", lambda device: 8)
    with recorded() as launches:
        runner = make_runner(
            TWO_KINDS_OF_LAYER, dtype="bfloat16", attention_backend="triton", max_running_requests=num_rows,
            max_total_tokens=20 * num_rows, max_prefill_tokens=64, disable_cuda_graph=disable_cuda_graph,
            **{"cuda_graph_max_bs": 5} | options,
        )  # fmt: skip
        assert accelerator.measured_to_record is not disable_cuda_graph
        before = len(launches)
        rng = np.random.default_rng(1)
        for _ in range(3 if num_rows > 100 else 30):
            serve(runner, rng)
    splits = {launch.kwargs["SPLITS"] for launch in launches if "SPLITS" in launch.kwargs}
    assert len(splits) == 3, "no step of this test has one split, splits in turn or splits as units"
    for arch in TARGETS:
        keys = [what_is_compiled(launch, arch) for launch in launches]
        assert set(keys[before:]) <= set(keys[:before])


def test_log_probabilities_of_a_short_prompt_do_not_wait_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of few tokens has a kernel without the norm, which warming up with many long prompts does not launch."""
    monkeypatch.setattr(torch, "empty", torch.zeros)
    use_fake(monkeypatch, FakeAccelerator(), attention=None)
    with recorded() as launches:
        runner = make_runner(
            TWO_KINDS_OF_LAYER, dtype="bfloat16", attention_backend="triton", max_running_requests=10,
            max_total_tokens=400, max_prefill_tokens=160, fuse_small_steps=True, cuda_graph_max_bs=1,
        )  # fmt: skip
        before = len(launches)
        runner.launch(_prefill(np.array([3], np.int32), SamplingParams(temperature=0.0), LogprobOptions())).sample()
    assert_nothing_waits(launches, before)


def launches_of(config: ModelConfig, *lora: LoraSize, **options: Any) -> tuple[list[Launch], int]:
    """The launches of a start and of some steps after it, and the number of those of the start."""
    with recorded() as launches:
        runner = make_runner(
            config, *lora, dtype="bfloat16", attention_backend="triton", max_running_requests=37, max_total_tokens=740,
            cuda_graph_max_bs=5, **{"max_prefill_tokens": 64} | options,
        )  # fmt: skip
        before = len(launches)
        rng = np.random.default_rng(1)
        for _ in range(8):
            serve(runner, rng)
    return launches, before


def assert_nothing_waits(launches: list[Launch], before: int) -> None:
    """Checks that the launches from index `before` on have machine code that those before them have."""
    keys = [what_is_compiled(launch, "sm_90") for launch in launches]
    assert keys[before:] and set(keys[before:]) <= set(keys[:before])


@pytest.mark.parametrize(("max_prefill_tokens", "quantization"), [(36, None), (64, None), (36, "fp8")])
def test_no_step_with_adapters_waits_for_the_compiler(
    max_prefill_tokens: int, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of prompts and decodes together may be the first with the kernels of many rows."""
    monkeypatch.setattr(torch, "empty", torch.zeros)
    use_fake(monkeypatch, FakeAccelerator(), attention=None)
    launches, before = launches_of(
        TWO_KINDS_OF_LAYER, LoraSize(2, 8), quantization=quantization, max_prefill_tokens=max_prefill_tokens
    )
    served = [launch for launch in launches[before:] if launch.kernel.fn.__name__ == "_shrink_kernel"]
    assert {launch.kwargs["APART"] for launch in served} == {True, False}
    assert_nothing_waits(launches, before)


def test_no_step_with_experts_waits_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of prompts and decodes together may be the first with the higher tile."""
    monkeypatch.setattr(torch, "empty", torch.zeros)
    use_fake(monkeypatch, FakeAccelerator(), attention=None)
    experts = ExpertsConfig(num_experts=5, num_experts_per_token=2, intermediate_size=32, normalized=True)
    config = dataclasses.replace(TWO_KINDS_OF_LAYER, architecture="Qwen3MoeForCausalLM", experts=experts)
    launches, before = launches_of(config)
    tiles = {launch.kwargs["BLOCK_M"] for launch in launches[before:] if "GATED" in launch.kwargs}
    assert tiles == {16, 32}
    assert_nothing_waits(launches, before)


def test_no_step_with_convolutions_waits_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", torch.zeros)
    use_fake(monkeypatch, FakeAccelerator(), attention=None)
    convolutions = ShortConvolutions((0,), TWO_KINDS_OF_LAYER.hidden_size, 3)
    changes = {"architecture": "Lfm2ForCausalLM", "sliding_windows": (), "convolutions": convolutions}
    launches, before = launches_of(dataclasses.replace(TWO_KINDS_OF_LAYER, **changes))
    served = [launch for launch in launches[before:] if launch.kernel.fn.__name__ == "_short_convolution_kernel"]
    assert {launch.kwargs["HAS_STARTS"] for launch in served} == {True, False}
    assert_nothing_waits(launches, before)


def test_no_step_with_states_waits_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", torch.zeros)
    use_fake(monkeypatch, FakeAccelerator(), attention=None)
    changes = {"architecture": "Qwen3_5ForCausalLM", "sliding_windows": (), "attention_gates": "components"}
    delta_net = DeltaNetConfig((0,), 2, 4, 16, 16, 4)
    launches, before = launches_of(dataclasses.replace(TWO_KINDS_OF_LAYER, delta_net=delta_net, **changes))
    served = [launch for launch in launches[before:] if launch.kernel.fn.__name__ == "_delta_net_recurrence_kernel"]
    assert {launch.kwargs["HAS_STARTS"] for launch in served} == {True, False}
    assert_nothing_waits(launches, before)

"""The launches of a mixture of experts, for the shapes of serving, and checks of their machine code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from serving_shapes import meta
from triton_aot import SHARED_OF_ALL, Launch, Resources, recorded

from tercet.model_executor.kernels import expert_choice, experts
from tercet.model_executor.kernels.fp8_layout import FP8_BLOCK
from tercet.model_executor.kernels.tuning import cdiv, programs_that_fit
from tercet.srt.model_files.experts_config import ClampedGate

MODELS = {
    "qwen3-30b": (2048, 768, 128, 8, True),
    "mixtral-8x7b": (4096, 14336, 8, 2, True),
    "gpt-oss-20b": (2880, 2880, 32, 4, True),
    "glm-4.5-air": (4096, 1408, 128, 8, True),
    "deepseek-v2": (5120, 1536, 160, 6, False),
    "deepseek-v3": (7168, 2048, 256, 8, True),
}
"""Width of the hidden state, width of an expert, experts, experts of a token, and whether weights are normalised."""
GATES = {"gpt-oss-20b": ClampedGate(1.702, 7.0)}
"""Of the models whose experts have biases"""
SCALES = {"glm-4.5-air": 1.0, "deepseek-v3": 2.5}
"""Of the models whose routers have sigmoids"""
GROUPS = {"deepseek-v2": (8, 3), "deepseek-v3": (8, 4)}
"""The groups of experts, and those of a token"""
TOKENS = {"few": 4, "some": 100, "many": 4096}
"""Numbers of tokens that have other kernels: one program chooses, more do, and tiles are higher."""


def expert_launches(
    model: str, tokens: str, arch: str, dtype: torch.dtype = torch.bfloat16, *, fp8: bool = False
) -> list[Launch]:
    """The launches of one layer. `fp8`: whether its weights are fp8, with scales of blocks."""
    hidden, inter, num_experts, top_k, normalized = MODELS[model]
    shapes, stored = ((2 * inter, hidden), (hidden, inter)), torch.float8_e4m3fn if fp8 else dtype
    weights = [[meta(*shape, dtype=stored)] * num_experts for shape in shapes]
    of_blocks = [[meta(cdiv(k, FP8_BLOCK), n, dtype=torch.float32)] * num_experts for n, k in shapes]
    scales = dict(zip(("gate_up_scales", "down_scales"), of_blocks, strict=True)) if fp8 else {}
    gate, biases, router_bias = GATES.get(model), (), None
    if gate is not None:
        router_bias = meta(num_experts, dtype=dtype)
        biases = [meta(2 * inter, dtype=dtype)] * num_experts, [meta(hidden, dtype=dtype)] * num_experts
    num_groups, groups_per_token = GROUPS.get(model, (1, 1))
    of_target = {"arch_of": lambda device: arch}
    with patch.multiple(expert_choice, **of_target), patch.multiple(experts, **of_target), recorded() as launches:
        experts.experts_forward(
            meta(TOKENS[tokens], hidden, dtype=dtype), meta(num_experts, hidden, dtype=dtype),
            experts.expert_weight_tables(*weights, *biases, **scales), top_k, normalized=normalized,
            router_bias=router_bias, gate=gate, sigmoids=model in SCALES, least_sum=1e-20, scale=SCALES.get(model, 1.0),
            corrections=meta(num_experts, dtype=torch.float32) if model in SCALES else None, num_groups=num_groups,
            groups_per_token=groups_per_token,
        )  # fmt: skip
    return launches


def fp8_launches(model: str, tokens: str, arch: str, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    """The two products of a layer with fp8 weights. Its other launches are those of any layer."""
    launches = expert_launches(model, tokens, arch, dtype, fp8=True)
    found = [launch for launch in launches if launch.kernel.fn.__name__ == "_expert_product_kernel"]
    assert len(found) == 2
    return found


CASES: dict[str, Callable[[], list[Launch]]] = {
    f"experts-{model}, {tokens}": partial(expert_launches, model, tokens, "sm_90")
    for model, tokens in (("qwen3-30b", "few"), ("qwen3-30b", "many"), ("gpt-oss-20b", "many"))
}
"""What each Triton compiles for sm_90."""
FP8_CASES: dict[str, Callable[[], list[Launch]]] = {
    f"fp8 experts-qwen3-30b, {tokens}": partial(fp8_launches, "qwen3-30b", tokens, "sm_90")
    for tokens in ("few", "many")
}
"""The same with fp8 weights."""


def assert_multiplies_grouped_rows(resources: Resources) -> None:
    """Checks that products for sm_90 are asynchronous and not serialised, on tiles that are copied ahead by 16 bytes a
    thread although the addresses of weights come from a table. Two programs fit on a multiprocessor."""
    counts = resources.counts
    assert counts is not None
    if resources.kernel in ("_router_kernel", "_expert_product_kernel"):
        # A batch for each factor of a gated product. A wait in the loop, and one after it.
        assert counts.wgmma in (4 * counts.wgmma_batches, 8 * counts.wgmma_batches) and counts.mma == 0, resources
        assert counts.wgmma_batches <= counts.wgmma_waits == 2, resources
        assert counts.copies == counts.wide_copies > 0, resources
        _assert_two_programs_fit(resources)
    if resources.kernel == "_expert_sum_kernel":
        assert counts.wide_loads > 0, resources


def assert_widens_fp8(resources: Resources) -> None:
    """Checks that products with fp8 weights for sm_90 are not serialised, on tiles that are copied ahead. Narrow copies
    are those of scales. Each batch waits, because the next one has to write its weights to shared memory."""
    counts = resources.counts
    assert counts is not None
    assert counts.wgmma == 4 * counts.wgmma_batches == 4 * counts.wgmma_waits > 0 and counts.mma == 0, resources
    assert counts.byte_loads == 0 and counts.copies < 2 * counts.wide_copies, resources
    _assert_two_programs_fit(resources)


def _assert_two_programs_fit(resources: Resources) -> None:
    assert programs_that_fit(2, resources.registers, resources.threads) == 2, resources
    assert 2 * (resources.shared + 1024) <= SHARED_OF_ALL, resources

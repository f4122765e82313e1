"""The kernels of a mixture of experts, compiled for GPUs that need not be here."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import pytest
import torch
from compiled_experts import (
    GROUPS,
    TOKENS,
    assert_multiplies_grouped_rows,
    assert_widens_fp8,
    expert_launches,
    fp8_launches,
)
from some_cases import crossed
from triton_aot import Launch, Resources, assert_fits, compile_all, compile_each, compile_launch, what_is_compiled

pytestmark = pytest.mark.timeout(900)  # the first test of a GPU compiles all of its cases

_ARITHMETIC = re.compile(r"\b((?:wgmma\.mma_async|mma|fma|mul|add)\.\S*f(?:32|16)\S*)")
MANY_LAUNCHES = [
    "_router_kernel", "_choose_kernel", "_place_kernel", "_expert_product_kernel", "_expert_product_kernel",
    "_expert_sum_kernel",
]  # fmt: skip


LAYERS = [
    ("sm_90", "few", "qwen3-30b"),
    ("sm_90", "many", "qwen3-30b"),
    ("sm_80", "many", "qwen3-30b"),
    ("gfx942", "many", "qwen3-30b"),
    ("sm_90", "few", "gpt-oss-20b"),
    ("sm_90", "many", "gpt-oss-20b"),
    ("gfx942", "many", "gpt-oss-20b"),
    ("sm_90", "few", "glm-4.5-air"),
    ("sm_90", "many", "glm-4.5-air"),
]
FP8_LAYERS = [("sm_90", "few"), ("sm_90", "many"), *crossed(["gfx942", "sm_80"], ["many", "few"], each=1)]


@cache
def _compiled_for(arch: str) -> dict[tuple[str, str], list[Resources]]:
    """The kernels of all layers. They are disassembled at once, because the disassembler starts slowly."""
    layers = [(tokens, model) for target, tokens, model in LAYERS if target == arch]
    fp8_layers = [tokens for target, tokens in FP8_LAYERS if target == arch]
    return compile_each(
        {(tokens, model): expert_launches(model, tokens, arch) for tokens, model in layers}
        | {(tokens, "fp8"): fp8_launches("qwen3-30b", tokens, arch) for tokens in fp8_layers},
        arch,
    )


def compiled(tokens: str, arch: str, model: str = "qwen3-30b") -> list[Resources]:
    """The kernels of a layer, in the order of the launches."""
    return _compiled_for(arch)[tokens, model]


def fp8_compiled(tokens: str, arch: str) -> list[Resources]:
    """The two products with fp8 weights."""
    return _compiled_for(arch)[tokens, "fp8"]


def products(model: str, tokens: str, dtype: torch.dtype) -> list[Launch]:
    found = [
        launch for launch in expert_launches(model, tokens, "sm_90", dtype) if "product" in launch.kernel.fn.__name__
    ]
    assert len(found) == 2
    return found


@pytest.mark.parametrize(("arch", "tokens", "model"), LAYERS)
def test_compiles_and_fits(arch: str, tokens: str, model: str) -> None:
    for resources in compiled(tokens, arch, model):
        assert_fits(resources, arch)
        if arch == "sm_90":
            assert_multiplies_grouped_rows(resources)


@pytest.mark.parametrize(("arch", "model"), [*(("sm_90", model) for model in GROUPS), ("gfx942", "deepseek-v3")])
def test_a_choice_of_groups_compiles_and_fits(arch: str, model: str) -> None:
    """By one program, and by several."""
    launches = [launch for tokens in ("few", "many") for launch in expert_launches(model, tokens, arch)]
    choices = [launch for launch in launches if launch.kernel.fn.__name__ == "_choose_kernel"]
    assert len(choices) == 2
    for resources in compile_all(choices, arch):
        assert_fits(resources, arch)


def test_products_of_float32_compile_and_fit() -> None:
    for launch in products("qwen3-30b", "few", torch.float32):
        assert_fits(compile_launch(launch, "sm_90"), "sm_90")


def test_products_of_float16_with_large_experts_compile_and_fit() -> None:
    for resources in compile_all(products("mixtral-8x7b", "many", torch.float16), "sm_90"):
        assert_fits(resources, "sm_90")
        assert_multiplies_grouped_rows(resources)


@pytest.mark.parametrize(("arch", "tokens"), FP8_LAYERS)
def test_products_with_fp8_weights_compile_and_fit(arch: str, tokens: str) -> None:
    for resources in fp8_compiled(tokens, arch):
        assert_fits(resources, arch)
        assert ("e4m3" in resources.assembly) == (arch == "sm_90")
        if arch == "sm_90":
            assert_widens_fp8(resources)


def test_both_tiles_multiply_widened_weights_with_the_same_instructions() -> None:
    """They widen as many weights with more threads, so the counts of `mul` differ."""
    for low, high in zip(fp8_compiled("few", "sm_90"), fp8_compiled("many", "sm_90"), strict=True):
        counts = [Counter(_ARITHMETIC.findall(resources.assembly)) for resources in (low, high)]
        widened = counts[0].pop("mul.f32") - counts[1].pop("mul.f32")
        assert widened == 64 * 128 // low.threads - 64 * 128 // high.threads
        assert counts[0] == counts[1] and any(name.startswith("wgmma") for name in counts[0])


@pytest.mark.parametrize("model", ["qwen3-30b", "gpt-oss-20b"])
def test_both_tiles_compute_an_output_with_the_same_instructions(model: str) -> None:
    """A thread of either tile has as many outputs. So equal counts of each operation mean equal sums for a row."""
    for place in (-3, -2):
        low, high = (compiled(tokens, "sm_90", model)[place] for tokens in ("few", "many"))
        counts = [Counter(_ARITHMETIC.findall(resources.assembly)) for resources in (low, high)]
        assert counts[0] == counts[1] and any(name.startswith("wgmma") for name in counts[0])
        assert low.threads * 2 == high.threads


def test_chances_are_added_in_one_order_by_one_program_and_by_several() -> None:
    layouts = [_summed_in(compiled(tokens, "sm_90")[1].layouts) for tokens in ("few", "many")]
    assert layouts[0] == layouts[1] and len(layouts[0]) == 1


def _summed_in(layouts: str) -> set[str]:
    """How the chances of a row are divided among threads where they are added."""
    blocked = dict(re.findall(r"(#\w+) = (#ttg\.blocked<\{.*\}>)", layouts))
    return {blocked[name] for name in re.findall(r"\(tensor<\d+x\d+xf32, (#\w+)>\) -> tensor<\d+xf32", layouts)}


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_layer_has_few_launches(tokens: str) -> None:
    names = [launch.kernel.fn.__name__ for launch in expert_launches("qwen3-30b", tokens, "sm_90")]
    assert names == [name for name in MANY_LAUNCHES if name != "_place_kernel" or tokens != "few"]


def test_one_token_has_a_tile_for_each_of_its_experts() -> None:
    grids = [launch.grid for launch in _launches(1) if launch.kernel.fn.__name__ == "_expert_product_kernel"]
    assert grids == [(12, 8), (16, 8)]


def _launches(tokens: int) -> list[Launch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TOKENS, "few", tokens)
        return expert_launches("qwen3-30b", "few", "sm_90")


def test_numbers_of_tokens_share_kernels() -> None:
    """Any two of which the same programs choose, with the same tiles."""
    for some in ((1, 17, 32), (33, 48, 2047), (2048, 5000)):
        keys = {frozenset(what_is_compiled(launch, "sm_90") for launch in _launches(n)) for n in some}
        assert len(keys) == 1, some

"""Conversions of GGML's block types give the bits of the gguf package, for every pattern of bits."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tercet.model_executor.layers.quantized_weight import GROUP, SUPER_BLOCK
from tercet.model_executor.weights import ggml_types
from tercet.model_executor.weights.ggml_types import Blocks, Kind

CPU = torch.device("cpu")
K_TYPES = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
TYPES = [*K_TYPES, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4]
BITS = {"int4": 4, "int8": 8, "e2m1": 4, "q4_k": 4, "q6_k": 6, "mixed_k": 6, "mixed": 8}
HALF_GROUPS = ("q6_k", "mixed_k", "mixed")
MINIMA = ("int4", "q4_k", "mixed_k", "mixed")
FORMS = [(kind, form) for kind in TYPES for form in BITS if ggml_types.has_form(kind, form)]


def random_blocks(kind: Kind, rows: int, row_blocks: int, seed: int = 0) -> Blocks:
    """Blocks of any bytes, so with any values and scales, some of them infinite, NaN or subnormal."""
    num_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    return Blocks(kind, np.random.default_rng(seed).integers(0, 256, (rows, row_blocks, num_bytes), dtype=np.uint8))


def expected_values(blocks: Blocks) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return gguf.dequantize(blocks.raw.reshape(len(blocks.raw), -1), blocks.kind).astype(np.float32)


def have_equal_bits(values: torch.Tensor, expected: npt.NDArray[np.float32]) -> bool:
    """Whether the bits are equal, except those of NaN."""
    found = values.numpy()
    is_nan = np.isnan(expected)
    equal = found.view(np.uint32) == expected.view(np.uint32)
    return found.shape == expected.shape and bool(np.where(is_nan, np.isnan(found), equal).all())


@pytest.mark.parametrize("kind", TYPES)
@given(rows=st.integers(1, 9), row_blocks=st.integers(1, 5), seed=st.integers(0, 2**20))
def test_dequantised_values_have_the_bits_of_gguf(kind: Kind, rows: int, row_blocks: int, seed: int) -> None:
    blocks = random_blocks(kind, rows, row_blocks, seed)
    assert have_equal_bits(ggml_types.dequantized(blocks, CPU), expected_values(blocks))


@pytest.mark.parametrize("kind", TYPES)
def test_nothing_but_the_blocks_comes_from_the_host(kind: Kind) -> None:
    """The device "meta" stands for a GPU: an operation that also gets a tensor of a CPU fails."""
    converted = ggml_types._TYPES[kind].convert(torch.from_numpy(random_blocks(kind, 3, 2).raw).to("meta"))
    assert converted.dequantize().is_meta
    assert ggml_types.dequantized(random_blocks(kind, 3, 2), torch.device("meta")).is_meta


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_forms_have_the_values_of_a_type(kind: Kind, form: str) -> None:
    blocks = random_blocks(kind, 50, 4)
    if form == "int4":
        # The scales of weights are small. In Q4_0, -8 times a scale above 8,190 is infinite.
        blocks.raw[..., 1] &= 0xBF
    if kind == Kind.MXFP4 and form != "mixed":
        blocks.raw[..., 0] = 104 + blocks.raw[..., 0] % 40  # scales that float16 has
    weight = ggml_types.quantized(blocks, form)
    assert weight is not None
    n, k = weight.shape
    assert weight.bits == BITS[form] and weight.values.is_contiguous()
    assert weight.scales.shape == (n, k // GROUP * (2 if form in HALF_GROUPS else 1))
    halves = dict.fromkeys(("int4", "int8", "e2m1"), torch.float16)
    assert weight.scales.dtype == (halves | {"mixed": torch.float32}).get(form, torch.int8)
    assert (weight.minima is not None) == (form in MINIMA)
    if weight.minima is not None:
        assert weight.minima.shape == weight.scales.shape and weight.minima.dtype == weight.scales.dtype
    if form.endswith("_k"):
        assert weight.factors is not None and weight.factors.dtype == torch.float16
        assert weight.factors.shape == (n, k // SUPER_BLOCK, 2 if form in MINIMA else 1)
        assert form == "q4_k" or (weight.values.amin() >= -32 and weight.values.amax() < 32)
    else:
        assert weight.factors is None
    np.testing.assert_array_equal(weight.dequantize().numpy(), expected_values(blocks))


@pytest.mark.parametrize(("exponent", "fits"), [(103, False), (104, True), (143, True), (144, False), (255, False)])
def test_scales_that_float16_lacks(exponent: int, fits: bool) -> None:
    """Only "mixed" has the values of a matrix with such a scale."""
    raw = np.random.default_rng(0).integers(0, 256, (8, 3, 17), dtype=np.uint8)
    raw[..., 0] = 120
    raw[2, 1, 0] = exponent
    blocks = Blocks(Kind.MXFP4, raw)
    widened = ggml_types.dequantized(blocks, CPU)
    for form in ("e2m1", "int8"):
        weight = ggml_types.quantized(blocks, form)
        assert (weight is not None) == fits
        assert weight is None or torch.equal(weight.dequantize(), widened)
    mixed = ggml_types.quantized(blocks, "mixed")
    assert mixed is not None and torch.equal(mixed.dequantize(), widened)
    raw[2, 1, 1:] = 0x80  # zeros of both signs
    for form in ("e2m1", "int8"):
        weight = ggml_types.quantized(blocks, form)
        assert weight is not None and not weight.dequantize()[2, 32:64].any()


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_no_tensor_takes_more_than_4_bytes_a_value(kind: Kind, form: str) -> None:
    """A matrix is converted whole, and an embedding may have half a billion values."""
    blocks = random_blocks(kind, 64, 8192 // gguf.GGML_QUANT_SIZES[kind][0])
    if kind == Kind.MXFP4:
        blocks.raw[..., 0] = 120
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        ggml_types.quantized(blocks, form)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 1 <= largest / (64 * 8192) <= 4


def test_all_these_types_share_a_form_and_no_others_have_one() -> None:
    assert {kind for kind in Kind if ggml_types.has_form(kind, "mixed")} == set(TYPES)
    assert {kind for kind in Kind if ggml_types.has_form(kind, "mixed_k")} == set(K_TYPES)
    assert not any(ggml_types.has_form(kind, form) for kind in {*Kind, 999} - set(TYPES) for form in BITS)
    # Q4_0 and MXFP4 have two more, and four types have only the mixed forms.
    assert len(FORMS) == len(TYPES) + len(K_TYPES) + 11


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.IQ4_NL])
@pytest.mark.parametrize("values_at_once", [1, 600, 4096])
def test_long_matrices_are_dequantised_in_parts(
    kind: Kind, values_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ggml_types, "_VALUES_AT_ONCE_ON_A_CPU", values_at_once)
    blocks = random_blocks(kind, 7, 1)
    assert have_equal_bits(ggml_types.dequantized(blocks, CPU), expected_values(blocks))


@pytest.mark.parametrize("kind", [Kind.TQ2_0, Kind.IQ3_S, Kind.IQ2_XXS])
def test_other_types_are_left_to_gguf(kind: Kind) -> None:
    blocks = random_blocks(kind, 3, 2)
    assert have_equal_bits(ggml_types.dequantized(blocks, CPU), expected_values(blocks))


def test_a_type_that_gguf_cannot_dequantise_is_refused() -> None:
    with pytest.raises(NotImplementedError):
        ggml_types.dequantized(random_blocks(Kind.Q8_K, 1, 1), CPU)

"""Rounding weights to 8 and 4 bits, taking them from files as they are, and models that run on them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_models import Kind, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from quantized_weights import FORMS, drawn_weight, group_of
from runner_driver import RunnerDriver, relative_error
from runners import make_runner
from server_flags import parse_flags
from tiny_models import make_model, make_wide_model, save

from tercet.model_executor import cpu_extension
from tercet.model_executor.layers.packing import panels_of
from tercet.model_executor.layers.quantized_weight import GROUP, QuantizedWeight, quantize
from tercet.model_executor.weights.gguf_checkpoint import GGUFCheckpoint
from tercet.model_executor.weights.loader import load_parameters
from tercet.model_executor.weights.quantization import (
    STORED_BITS_PER_WEIGHT,
    check_quantization,
    parameter_bytes,
    quantized_forms,
)
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.server_args import ServerArgs

CPU = torch.device("cpu")
needs_a_build = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")


def same(a: QuantizedWeight, b: QuantizedWeight) -> bool:
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("form", "low", "high"), [("int8", -127, 127), ("int4", 0, 15)])
def test_every_weight_is_at_most_half_a_step_off(form: str, low: int, high: int) -> None:
    weight = torch.randn(5000, 96) * torch.logspace(-3, 1, 5000)[:, None]
    weight[7, :GROUP], weight[8, GROUP:] = 0, 0.25
    made = quantize(weight, form)
    assert made.values.amin() == low and made.values.amax() == high and made.shape == weight.shape
    # float16 scales and minima are off by 2**-11 of themselves
    most = weight.unflatten(1, (-1, GROUP)).abs().amax(2)
    allowed = 0.5 * made.scales.float() + most * 2**-10
    error = (made.dequantize() - weight).abs().unflatten(1, (-1, GROUP)).amax(2)
    assert (error <= allowed).all()
    assert same(quantize(weight.bfloat16(), form), quantize(weight.bfloat16().float(), form))


@pytest.mark.parametrize("form", ["int8", "int4"])
@given(exponent=st.integers(-40, 10), seed=st.integers(0, 99))
def test_small_groups_are_as_exact_as_float16_allows(form: str, exponent: int, seed: int) -> None:
    """Scales of groups below 1e-2 are subnormal float16, which lie 2**-24 apart."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(8, 2 * GROUP, generator=generator).mul(2).sub(1) * 2.0**exponent
    made = quantize(weight, form)
    most_steps = 127 if form == "int8" else 15 / 2
    error = (made.dequantize() - weight).abs().amax()
    assert error <= weight.abs().amax() * (0.5 / most_steps + 2**-10) + 2**-24


def test_a_group_near_1e_5_keeps_its_magnitude() -> None:
    made = quantize(torch.full((1, GROUP), 1e-5), "int8")
    assert made.dequantize().tolist()[0] == pytest.approx([1e-5] * GROUP, rel=5e-3)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_what_is_quantized_already_stays_as_it_is(form: str) -> None:
    made = quantize(torch.randn(300, 128), form)
    assert same(quantize(made.dequantize(), form), made)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory):
    """A model, and a function that stores it as GGUF: Kind -> config."""
    model = make_model("llama")
    folder = tmp_path_factory.mktemp("gguf")
    return model, lambda kind: load_model_config(write_gguf(folder / f"{kind.name}.gguf", model, "llama", kind=kind))


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *((kind, "int8") for kind in (Kind.Q8_0, Kind.Q5_0, Kind.Q4_0, Kind.IQ4_NL)),
        *((kind, "int4") for kind in (Kind.Q4_0, Kind.Q4_1)),
        *((kind, "mixed") for kind in (Kind.Q5_1, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1)),
    ],
)
def test_numbers_of_a_file_are_taken_as_they_are(llama, kind: Kind, form: str) -> None:
    _, stored_as = llama
    checkpoint = GGUFCheckpoint(stored_as(kind))
    for name in ("model.embed_tokens.weight", *(f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkvo")):
        taken = checkpoint.quantized(name, form)
        assert taken is not None and (taken.minima is None) == (form == "int8")
        assert torch.equal(taken.dequantize(), checkpoint.tensor(name))


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (Kind.Q4_K, "q4_k"),
        *((kind, "q6_k") for kind in (Kind.Q6_K, Kind.Q3_K)),
        *((kind, "mixed_k") for kind in (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)),
        *((kind, "mixed") for kind in (Kind.IQ4_XS, Kind.Q4_K)),
    ],
)
def test_blocks_of_256_are_taken_as_they_are(tmp_path: Path, kind: Kind, form: str) -> None:
    checkpoint = GGUFCheckpoint(
        load_model_config(write_gguf(tmp_path / "m.gguf", make_wide_model(tied=False), "llama", kind=kind))
    )
    assert not checkpoint.has_form("model.embed_tokens.weight", "int8")
    for name in (
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ):
        taken = checkpoint.quantized(name, form)
        assert taken is not None and taken.bits == {"q4_k": 4, "mixed": 8}.get(form, 6)
        assert torch.equal(taken.dequantize(), checkpoint.tensor(name))
    name = "model.layers.1.mlp.down_proj.weight"
    region = slice(3, 20), slice(256, 512)  # of two blocks
    part = checkpoint.quantized(name, form, region)
    assert part is not None and torch.equal(part.dequantize(), checkpoint.tensor(name)[region])


@pytest.mark.parametrize("form", FORMS)
def test_columns_are_whole_groups(form: str) -> None:
    """A part of a group would get the scale of another one."""
    width = group_of(form)
    weight = drawn_weight(form, 3, 4, seed=0)
    columns = slice(width, 3 * width)
    np.testing.assert_array_equal(weight.with_columns(columns).dequantize(), weight.dequantize()[:, columns])
    for start, stop in ((8, 2 * width), (0, width - 8)):
        with pytest.raises(AssertionError):
            weight.with_columns(slice(start, stop))


@pytest.mark.parametrize(
    ("kind", "form"),
    [(Kind.Q8_0, "int4"), (Kind.Q4_1, "int8"), (Kind.F16, "int8"), (Kind.F32, "int4"), (Kind.Q5_1, "int8")],
)
def test_other_types_are_rounded(llama, kind: Kind, form: str) -> None:
    _, stored_as = llama
    config = stored_as(kind)
    checkpoint = GGUFCheckpoint(config)
    name = "model.layers.1.mlp.down_proj.weight"
    assert checkpoint.quantized(name, form) is None
    made = load_parameters(config, torch.bfloat16, CPU, forms={"layers.1.down_proj.weight": form})
    assert same(made["layers.1.down_proj.weight"], quantize(checkpoint.tensor(name), form))


def test_rounding_the_numbers_of_q4_1_finds_them_again(llama) -> None:
    _, stored_as = llama
    checkpoint = GGUFCheckpoint(stored_as(Kind.Q4_1))
    name = "model.layers.0.mlp.up_proj.weight"
    assert same(checkpoint.quantized(name, "int4"), quantize(checkpoint.tensor(name), "int4"))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_parameters_are_quantized_part_by_part(llama, tmp_path, quantization: str) -> None:
    model, stored_as = llama
    plain = load_model_config(save(model, tmp_path / "plain"))
    for config in (plain, stored_as(Kind.Q4_0)):
        floats = load_parameters(config, torch.float32, CPU)
        found = load_parameters(config, torch.bfloat16, CPU, forms=quantized_forms(config, quantization))
        assert set(found) == set(floats)
        for name, tensor in floats.items():
            if tensor.dim() == 1 or name == "embed_tokens.weight":
                assert torch.equal(found[name], tensor.bfloat16())
                continue
            form = "int8" if name == "lm_head.weight" else quantization
            assert found[name].bits == int(form[3:]) and found[name].shape == tensor.shape
            if config is plain:
                assert same(found[name], quantize(tensor, form))
            else:
                assert torch.equal(found[name].dequantize(), tensor)


def test_dummy_weights_are_quantized(tmp_path) -> None:
    config = load_model_config(save(make_model("qwen2_tied"), tmp_path), "dummy")
    plain = load_parameters(config, torch.float32, CPU, seed=3)
    made = load_parameters(config, torch.float32, CPU, seed=3, forms=quantized_forms(config, "int4"))
    assert same(made["layers.2.o_proj.weight"], quantize(plain["layers.2.o_proj.weight"], "int4"))
    assert same(made["embed_tokens.weight"], quantize(plain["embed_tokens.weight"], "int8"))


def run(config, ids, chunks, **options) -> torch.Tensor:
    """Logits of the last token of every chunk and of every token after them."""
    runner = make_runner(config, max_running_requests=2, max_total_tokens=100, **options)
    return torch.stack(list(RunnerDriver(runner).logits_along(1, ids, chunks).values()))


IDS = np.random.default_rng(1).integers(0, 131, 45)


@needs_a_build
@pytest.mark.parametrize("name", ["llama", "llama_biases", "qwen2_tied", "qwen3"])
def test_logits_are_near_those_of_the_same_weights_in_float32(name: str, tmp_path) -> None:
    """Of a file of 4 bits, so that only the rounding of activations and of the head is between the two."""
    arch = name.split("_")[0]
    config = load_model_config(write_gguf(tmp_path / "m.gguf", make_model(name), arch, kind=Kind.Q4_0))
    expected = run(config, IDS, [30, 10], dtype="float32")
    for quantization in ("int8", "int4"):
        for dtype in ("float32", "bfloat16", "float16"):
            logits = run(config, IDS, [30, 10], dtype=dtype, quantization=quantization)
            assert 1e-3 < relative_error(logits, expected) < 0.2, (quantization, dtype)


@needs_a_build
def test_a_token_has_the_same_logits_in_any_chunk(llama) -> None:
    _, stored_as = llama
    config = stored_as(Kind.Q4_1)
    for quantization in ("int8", "int4"):
        one, other = (run(config, IDS, chunks, quantization=quantization) for chunks in ([20], [7, 13]))
        assert torch.equal(one, other[1:])


@needs_a_build
def test_weights_take_what_is_announced(llama) -> None:
    _, stored_as = llama
    config = stored_as(Kind.F32)
    for quantization in (None, "int8", "int4"):
        runner = make_runner(config, max_running_requests=1, max_total_tokens=9, quantization=quantization)
        itemsize = runner.settings.dtype.itemsize
        forms = quantized_forms(config, quantization)
        announced = parameter_bytes(config, itemsize, matrix_bytes=itemsize, forms=forms)
        assert runner.num_bytes.weights == sum(announced.values())
        if quantization is not None:  # 64 columns are whole panels, on every processor
            assert runner.model.layers[0].o_proj.packed.nbytes == announced["layers.0.o_proj.weight"]


@needs_a_build
@pytest.mark.parametrize("form", FORMS)
def test_packed_weights_take_the_announced_bits(form: str) -> None:
    weight = drawn_weight(form, 4 * cpu_extension.lanes(), 3, seed=0)  # two whole panels
    assert 8 * panels_of(weight).nbytes == weight.values.numel() * STORED_BITS_PER_WEIGHT[form]


def test_where_nothing_computes_with_such_weights_it_is_refused(llama, tmp_path, monkeypatch) -> None:
    _, stored_as = llama
    config = stored_as(Kind.F32)
    with pytest.raises(ValueError, match=r"needs a CPU .* but the device is cpu and the attention backend is torch"):
        make_runner(config, max_running_requests=1, quantization="int8", attention_backend="torch")
    with pytest.raises(ValueError, match="device is cuda and the attention backend is triton"):
        check_quantization("int4", "triton", torch.device("cuda"))
    with pytest.raises(ValueError, match="must be int8, int4, fp8 or none, got 'int3'"):
        check_quantization("int3", "cpu", CPU)
    monkeypatch.setattr(cpu_extension, "load", lambda: None)
    with pytest.raises(ValueError, match=r"compiled C\+\+ kernels"):
        make_runner(config, max_running_requests=1, quantization="int8")
    check_quantization(None, "torch", CPU)


def test_rows_that_are_not_whole_groups_are_refused(llama) -> None:
    _, stored_as = llama
    config = dataclasses.replace(stored_as(Kind.F32), intermediate_size=80)
    with pytest.raises(ValueError, match=r"a multiple of 32 numbers, but rows of layers\.0\.down_proj\.weight have 80"):
        quantized_forms(config, "int8")
    assert quantized_forms(config, None) == {}


def test_the_flag() -> None:
    assert parse_flags(["--model-path", "m"]).quantization is None
    assert parse_flags(["--model-path", "m", "--quantization", "int4"]).quantization == "int4"
    with pytest.raises(ValueError, match="quantization"):
        ServerArgs.from_dict({"model_path": "m", "quantization": "int3"})

"""Quantized matrices that a CPU keeps as their file stores them and rounds to bfloat16: no bit of a result changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from gguf_models import Kind, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_weights import FORMS, drawn_weight, group_of
from runner_driver import short_logits
from runners import make_runner, make_settings
from tiny_models import checkpoint, make_model, make_wide_model

from tercet.model_executor import cpu_extension
from tercet.model_executor.cpu_calibration import ChosenTuning, default_tuning
from tercet.model_executor.layers.quantized_weight import quantize
from tercet.model_executor.runner.load import load_runner
from tercet.model_executor.runner.settings import WeightTypes, resolve_linears, resolve_weights, uses_compact
from tercet.srt.model_files.default_model import find_default_model
from tercet.srt.model_files.load_config import load_model_config

pytestmark = pytest.mark.skipif(
    cpu_extension.load() is None or not torch.ops.tercet_cpu.multiplies_bfloat16(),
    reason="no build of csrc/cpu for this processor multiplies bfloat16",
)

BFLOAT16 = torch.bfloat16


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    as_integers = torch.int32 if found.dtype == torch.float32 else torch.int16
    assert torch.equal(*(out.masked_fill(expected.isnan(), 0).view(as_integers) for out in (found, expected)))


@settings(max_examples=80, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    rows=st.one_of(st.integers(1, 40), st.integers(41, 300)),
    groups=st.one_of(st.integers(1, 6), st.integers(30, 70)),  # 32 groups are a chunk
    n=st.integers(1, 75),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_quantized_weight_gives_the_bits_of_the_one_in_bfloat16(
    form: str, rows: int, groups: int, n: int, biased: bool, seed: int
) -> None:
    from tercet.model_executor.layers.cpu_layers import CpuGatedLinear, CpuLinear  # needs the operations

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, group_of(form) * groups, generator=generator).to(BFLOAT16)
    weight = drawn_weight(form, 2 * n, groups, seed)
    plain = weight.dequantize().to(BFLOAT16)
    bias = torch.randn(2 * n, generator=generator) if biased else None
    for make in (CpuLinear, CpuGatedLinear):
        assert_same_bits(make(weight, bias)(x), make(plain, bias)(x))
    heads = [CpuLinear(kind, bias, to_float=True) for kind in (weight, plain)]
    assert heads[0].packed.dtype == torch.uint8 and heads[1].packed.dtype == BFLOAT16
    assert_same_bits(*(head(x) for head in heads))
    assert torch.equal(*(head.argmax(x) for head in heads))


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_a_row_has_the_same_bits_whatever_is_beside_it(form: str) -> None:
    from tercet.model_executor.layers.cpu_layers import CpuLinear  # needs the operations

    x = torch.randn(300, 576).to(BFLOAT16)
    linear = CpuLinear(quantize(torch.randn(100, 576), form))
    everything = linear(x)
    for rows in (*range(1, 30), 64, 255):
        assert torch.equal(linear(x[-rows:].contiguous()), everything[-rows:]), rows


def test_rows_of_another_type_are_refused() -> None:
    from tercet.model_executor.layers.cpu_layers import CpuLinear  # needs the operations

    linear = CpuLinear(quantize(torch.randn(32, 64), "int4"))
    with pytest.raises(RuntimeError, match="x of quantised weights must be float, or bfloat16"):
        linear(torch.randn(1, 64).half())
    default_tuning()._replace(bfloat16="widened").apply()
    try:
        with pytest.raises(RuntimeError, match="with products of bfloat16"):
            linear(torch.randn(1, 64).to(BFLOAT16))
    finally:
        default_tuning().apply()


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
@pytest.mark.parametrize("name", ["llama", "llama_31_tied"])
def test_a_quantized_file_is_kept_as_it_is_and_its_answers_are_those_of_bfloat16(
    tmp_path: Path, name: str, kind: Kind
) -> None:
    config = load_model_config(write_gguf(tmp_path / "m.gguf", make_model(name), "llama", kind=kind))
    kept = make_settings(config, dtype="bfloat16", cpu_kernels="fixed", max_total_tokens=256, max_running_requests=3)
    narrow, plain = (load_runner(each, config) for each in (kept, dataclasses.replace(kept, weight_forms={})))
    assert set(kept.weight_forms.values()) == {"int8" if kind is Kind.Q8_0 else "int4"}
    assert len(kept.weight_forms) == 4 * config.num_layers + 2 - config.tie_word_embeddings
    assert narrow.num_bytes.weights < 0.55 * plain.num_bytes.weights
    assert narrow.model.layers[1].down_proj.packed.dtype == torch.uint8
    assert plain.model.layers[1].down_proj.packed.dtype == BFLOAT16
    assert torch.equal(short_logits(narrow), short_logits(plain))


@pytest.mark.parametrize("tied", [False, True])
def test_a_file_of_q4_k_and_q6_k_is_kept_as_it_is(tmp_path: Path, tied: bool) -> None:
    kinds = {"model.embed_tokens.weight" if tied else "lm_head.weight": Kind.Q6_K}
    kinds |= {"model.layers.0.self_attn.v_proj.weight": Kind.Q6_K, "model.layers.0.mlp.down_proj.weight": Kind.IQ4_XS}
    if not tied:
        kinds["model.embed_tokens.weight"] = Kind.Q5_K
    model = make_wide_model(tied=tied)
    config = load_model_config(write_gguf(tmp_path / "m.gguf", model, "llama", kind=Kind.Q4_K, kinds=kinds))
    kept = make_settings(config, dtype="bfloat16", cpu_kernels="fixed", max_total_tokens=256, max_running_requests=3)
    assert kept.weight_forms["embed_tokens.weight" if tied else "lm_head.weight"] == "q6_k"
    assert kept.weight_forms["layers.1.gate_up_proj.weight"] == "q4_k"
    assert tied or kept.weight_forms["embed_tokens.weight"] == "mixed_k"
    assert kept.weight_forms["layers.0.qkv_proj.weight"] == "mixed_k"
    assert "layers.0.down_proj.weight" not in kept.weight_forms  # it would take as many bits as a compact weight
    narrow, plain = (load_runner(each, config) for each in (kept, dataclasses.replace(kept, weight_forms={})))
    assert torch.equal(short_logits(narrow), short_logits(plain))


@pytest.mark.parametrize(
    ("kind", "form"),
    [(Kind.Q5_K, "mixed_k"), (Kind.Q2_K, "mixed_k"), (Kind.Q3_K, "q6_k"), (Kind.IQ4_NL, "int8")],
)
def test_files_of_other_types_are_kept_as_they_are(tmp_path: Path, kind: Kind, form: str) -> None:
    model = make_wide_model(tied=False)
    config = load_model_config(write_gguf(tmp_path / "m.gguf", model, "llama", kind=kind))
    kept = make_settings(config, dtype="bfloat16", cpu_kernels="fixed", max_total_tokens=256, max_running_requests=3)
    assert set(kept.weight_forms.values()) == {form} and len(kept.weight_forms) == 10
    narrow, plain = (load_runner(each, config) for each in (kept, dataclasses.replace(kept, weight_forms={})))
    assert torch.equal(short_logits(narrow), short_logits(plain))


def test_matrices_without_a_form_are_compact(tmp_path: Path) -> None:
    kinds = {"lm_head.weight": Kind.F16}
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), "llama", kind=Kind.Q4_0, kinds=kinds)
    config = load_model_config(path)
    kept = make_settings(config, dtype="bfloat16", cpu_kernels="fixed", max_total_tokens=256, max_running_requests=3)
    assert kept.weight_forms and "lm_head.weight" not in kept.weight_forms and not kept.compact
    chosen = ChosenTuning(default_tuning()._replace(compact="always"), "default")
    linears = resolve_linears(chosen, BFLOAT16, WeightTypes(BFLOAT16, kept.weight_forms), config)
    assert linears == (False, True)
    compact = load_runner(dataclasses.replace(kept, compact=True), config)
    assert compact.model.layers[0].qkv_proj.packed.dim() == 3  # groups
    plain = load_runner(dataclasses.replace(kept, weight_forms={}), config)
    assert torch.equal(short_logits(compact), short_logits(plain))


def test_large_matrices_without_a_form_are_compact() -> None:
    path = find_default_model()
    if path is None:
        pytest.skip("the default model is not installed")
    config, chosen = load_model_config(str(path)), ChosenTuning(default_tuning(), "default")
    forms = resolve_weights(BFLOAT16, config, "cpu", None, chosen).forms
    layers = {name: form for name, form in forms.items() if name != "embed_tokens.weight"}
    head = {name: form for name, form in forms.items() if name not in layers}
    assert not uses_compact(chosen, BFLOAT16, WeightTypes(BFLOAT16, forms), config)
    assert not uses_compact(chosen, BFLOAT16, WeightTypes(BFLOAT16, layers), config)  # 57 MB
    assert uses_compact(chosen, BFLOAT16, WeightTypes(BFLOAT16, head), config)


def test_new_weights_are_kept_as_their_own_file_stores_them(tmp_path: Path) -> None:
    model = make_model("llama")
    files = {
        kind: write_gguf(tmp_path / f"{kind.name}.gguf", model, "llama", kind=kind) for kind in (Kind.Q8_0, Kind.BF16)
    }
    options = {"dtype": "bfloat16", "cpu_kernels": "fixed", "max_total_tokens": 256, "max_running_requests": 3}
    runners = {kind: make_runner(load_model_config(path), **options) for kind, path in files.items()}
    expected = {kind: short_logits(runner) for kind, runner in runners.items()}
    runner = runners[Kind.Q8_0]
    for kind, stored in ((Kind.BF16, BFLOAT16), (Kind.Q8_0, torch.uint8)):
        runner.weights.update(load_model_config(files[kind]))
        assert runner.model.layers[0].qkv_proj.packed.dtype == stored
        assert torch.equal(short_logits(runner), expected[kind])


def test_when_quantized_matrices_are_kept(tmp_path: Path) -> None:
    config = load_model_config(write_gguf(tmp_path / "m.gguf", make_model("llama"), "llama", kind=Kind.Q8_0))
    native = default_tuning()

    def kept(dtype: torch.dtype = BFLOAT16, quantization: str | None = None, **tuning: str) -> set[str]:
        chosen = ChosenTuning(native._replace(**tuning), "default")
        return set(resolve_weights(dtype, config, "cpu", quantization, chosen).forms.values())

    assert kept() == kept(torch.float32) == kept(onednn="float32") == {"int8"}
    assert kept(bfloat16="widened") == kept(onednn="bfloat16") == kept(torch.float16) == set()
    assert kept(quantization="int4") == {"int8", "int4"}  # rounded again; head and embedding have 8 bits
    assert resolve_weights(BFLOAT16, config, "torch", None, None).forms == {}
    stored = checkpoint(tmp_path / "bf16", dtype=BFLOAT16)
    assert resolve_weights(BFLOAT16, stored, "cpu", None, ChosenTuning(native, "default")) == (BFLOAT16, {})


def test_the_default_model_is_kept_as_it_is() -> None:
    path = find_default_model()
    if path is None:
        pytest.skip("the default model is not installed")
    kept = make_settings(load_model_config(str(path)), dtype="bfloat16", cpu_kernels="fixed")
    forms = dict(kept.weight_forms)
    assert forms.pop("embed_tokens.weight") == "int8"
    assert len(forms) == 4 * 30 and set(forms.values()) == {"int4"}
    assert not kept.compact

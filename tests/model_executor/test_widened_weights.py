"""Matrices that a CPU keeps as their file stores them and multiplies in float32: no bit of a result changes."""

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
from runners import make_settings
from safetensors.torch import load_file, save_file
from tiny_models import checkpoint, make_model, make_wide_model

from tercet.model_executor import cpu_extension
from tercet.model_executor.layers.experts import RouterWeights
from tercet.model_executor.layers.quantized_weight import quantize
from tercet.model_executor.runner.load import load_runner
from tercet.model_executor.runner.model_runner import ModelRunner
from tercet.model_executor.weights.cache_folder import CacheFolder
from tercet.model_executor.weights.loader import load_parameters, stored_forms, stored_matrix_dtype
from tercet.srt.model_files.default_model import find_default_model
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")

CPU, FLOAT32, BFLOAT16 = torch.device("cpu"), torch.float32, torch.bfloat16


def runner_of(config: ModelConfig, *, wide: bool = False) -> ModelRunner:
    """`wide`: with matrices of float32, whatever the file stores."""
    settings = make_settings(config, dtype="float32", max_total_tokens=256, max_running_requests=3)
    if wide:
        settings = dataclasses.replace(settings, weight_dtype=FLOAT32, weight_forms={})
    return load_runner(settings, config)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 90), st.integers(1, 75), st.booleans(), st.integers(0, 2**31))
def test_a_widened_weight_gives_the_bits_of_float32(rows: int, words: int, n: int, biased: bool, seed: int) -> None:
    """For every number that bfloat16 has: also zeros, subnormal numbers, infinities and NaN."""
    from tercet.model_executor.layers.cpu_layers import CpuGatedLinear, CpuLinear  # needs the operations

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2 * words, generator=generator)
    x[torch.rand(x.shape, generator=generator) < 0.1] = -0.0
    weight = torch.randn(2 * n, 2 * words, generator=generator).bfloat16()
    bits = torch.randint(-(2**15), 2**15, weight.shape, generator=generator, dtype=torch.int16)
    weight = torch.where(torch.rand(weight.shape, generator=generator) < 0.002, bits.view(BFLOAT16), weight)
    bias = torch.randn(2 * n, generator=generator) if biased else None
    for make in (CpuLinear, CpuGatedLinear):
        assert_same_bits(make(weight, bias)(x), make(weight.float(), bias)(x))


def assert_same_bits(widened: torch.Tensor, wide: torch.Tensor) -> None:
    assert widened.dtype == FLOAT32
    assert torch.equal(widened.isnan(), wide.isnan())
    assert torch.equal(*(out.masked_fill(wide.isnan(), 0).view(torch.int32) for out in (widened, wide)))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(FORMS),
    st.integers(1, 70),
    st.integers(1, 6),
    st.integers(1, 75),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_a_quantized_weight_gives_the_bits_of_the_dequantized_one(
    form: str, rows: int, groups: int, n: int, biased: bool, seed: int
) -> None:
    """For all values, scales and minima that a file can have, also infinite ones."""
    from tercet.model_executor.layers.cpu_layers import CpuGatedLinear, CpuLinear  # needs the operations

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, group_of(form) * groups, generator=generator)
    weight = drawn_weight(form, 2 * n, groups, seed)
    bias = torch.randn(2 * n, generator=generator) if biased else None
    for make in (CpuLinear, CpuGatedLinear):
        assert_same_bits(make(weight, bias)(x), make(weight.dequantize(), bias)(x))


def test_a_row_has_the_same_bits_whatever_is_beside_it() -> None:
    from tercet.model_executor.layers.cpu_layers import CpuLinear  # needs the operations

    x, weight = torch.randn(300, 576), torch.randn(100, 576)
    for form in ("int4", "int8"):
        linear = CpuLinear(quantize(weight, form))
        everything = linear(x)
        for rows in (*range(1, 30), 64, 255):
            assert torch.equal(linear(x[-rows:].contiguous()), everything[-rows:]), rows


@pytest.mark.parametrize("tied", [False, True])
def test_a_file_of_q4_k_and_q6_k_is_kept_as_it_is(tmp_path: Path, tied: bool) -> None:
    """As llama.cpp writes Q4_K_M: Q6_K for the head, and for some values and down projections."""
    kinds = {"model.layers.0.mlp.down_proj.weight": Kind.Q6_K, "model.layers.0.self_attn.v_proj.weight": Kind.Q6_K}
    kinds |= {"model.embed_tokens.weight" if tied else "lm_head.weight": Kind.Q6_K}
    model = make_wide_model(tied=tied)
    config = load_model_config(write_gguf(tmp_path / "m.gguf", model, "llama", kind=Kind.Q4_K, kinds=kinds))
    narrow, wide = runner_of(config), runner_of(config, wide=True)
    forms = narrow.settings.weight_forms
    assert forms["layers.0.down_proj.weight"] == forms["embed_tokens.weight" if tied else "lm_head.weight"] == "q6_k"
    assert tied or forms["embed_tokens.weight"] == "q4_k"
    assert forms["layers.1.down_proj.weight"] == forms["layers.1.qkv_proj.weight"] == "q4_k"
    assert forms["layers.0.qkv_proj.weight"] == "mixed_k"  # its parts have different types
    assert narrow.num_bytes.weights < 0.27 * wide.num_bytes.weights
    assert torch.equal(short_logits(narrow), short_logits(wide))


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (Kind.Q5_K, "mixed_k"),
        (Kind.Q2_K, "mixed_k"),
        (Kind.Q3_K, "q6_k"),
        (Kind.IQ4_XS, "mixed"),
        (Kind.IQ4_NL, "int8"),
    ],
)
def test_files_of_other_types_are_kept_as_they_are(tmp_path: Path, kind: Kind, form: str) -> None:
    model = make_wide_model(tied=False)
    config = load_model_config(write_gguf(tmp_path / "m.gguf", model, "llama", kind=kind))
    narrow, wide = runner_of(config), runner_of(config, wide=True)
    assert set(narrow.settings.weight_forms.values()) == {form} and len(narrow.settings.weight_forms) == 10
    assert narrow.model.layers[1].down_proj.packed.dtype == torch.uint8
    assert torch.equal(short_logits(narrow), short_logits(wide))


def test_parts_of_any_types_are_kept_together(tmp_path: Path) -> None:
    """As llama.cpp writes Q3_K_M and files of IQ4_NL: some values have a type of more bits."""
    kinds = {f"model.layers.{layer}.self_attn.v_proj.weight": kind for layer, kind in ((0, Kind.Q5_K), (1, Kind.Q8_0))}
    kinds["model.layers.1.mlp.up_proj.weight"] = Kind.IQ4_NL
    model = make_wide_model(tied=False)
    config = load_model_config(write_gguf(tmp_path / "m.gguf", model, "llama", kind=Kind.Q3_K, kinds=kinds))
    narrow, wide = runner_of(config), runner_of(config, wide=True)
    mixed = {name: form for name, form in narrow.settings.weight_forms.items() if form != "q6_k"}
    assert mixed == {
        "layers.0.qkv_proj.weight": "mixed_k",
        "layers.1.qkv_proj.weight": "mixed",
        "layers.1.gate_up_proj.weight": "mixed",
    }
    assert torch.equal(short_logits(narrow), short_logits(wide))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
@pytest.mark.parametrize("name", ["llama", "llama_31_tied"])
def test_a_quantized_file_is_kept_as_it_is_and_its_answers_are_those_of_float32(
    tmp_path: Path, name: str, kind: Kind
) -> None:
    config = load_model_config(write_gguf(tmp_path / "m.gguf", make_model(name), "llama", kind=kind))
    narrow, wide = runner_of(config), runner_of(config, wide=True)
    forms = narrow.settings.weight_forms
    expected = {Kind.Q5_0: "int8", Kind.Q5_1: "mixed", Kind.Q8_0: "int8"}.get(kind, "int4")
    assert set(forms.values()) == {expected} and len(forms) == 4 * config.num_layers + 2 - config.tie_word_embeddings
    assert narrow.num_bytes.weights < 0.41 * wide.num_bytes.weights
    assert narrow.model.layers[1].down_proj.packed.dtype == torch.uint8
    assert torch.equal(short_logits(narrow), short_logits(wide))


def test_a_matrix_of_another_kind_is_dequantized(tmp_path: Path) -> None:
    config = load_model_config(write_gguf(tmp_path / "m.gguf", make_model("llama"), "llama", kind=Kind.F16))
    assert stored_forms(config, FLOAT32) == {}
    settings = make_settings(config, dtype="float32")
    assert settings.weight_dtype == FLOAT32 and settings.weight_forms == {}
    kinds = {"lm_head.weight": Kind.F16, "model.layers.1.self_attn.v_proj.weight": Kind.F32}
    model = make_model("llama")
    mixed = load_model_config(write_gguf(tmp_path / "mixed.gguf", model, "llama", kind=Kind.Q4_0, kinds=kinds))
    narrow, wide = runner_of(mixed), runner_of(mixed, wide=True)
    forms = narrow.settings.weight_forms
    assert set(forms.values()) == {"int4"} and {"layers.0.qkv_proj.weight", "embed_tokens.weight"} <= forms.keys()
    assert forms.keys().isdisjoint({"lm_head.weight", "layers.1.qkv_proj.weight"})
    assert torch.equal(short_logits(narrow), short_logits(wide))


def test_the_default_model_is_kept_as_it_is() -> None:
    path = find_default_model()
    if path is None:
        pytest.skip("the default model is not installed")
    forms = make_settings(load_model_config(str(path)), dtype="float32").weight_forms
    assert forms.pop("embed_tokens.weight") == "int8"
    assert len(forms) == 4 * 30 and set(forms.values()) == {"int4"}


@pytest.mark.parametrize("name", ["llama_31_tied", "llama_biases", "qwen3"])
def test_a_model_stored_in_bfloat16_keeps_its_bits_and_half_its_bytes(tmp_path: Path, name: str) -> None:
    config = checkpoint(tmp_path / "m", name, dtype=BFLOAT16)
    narrow, wide = runner_of(config), runner_of(config, wide=True)
    assert narrow.settings.weight_dtype == BFLOAT16 and narrow.settings.kv_dtype == FLOAT32
    assert narrow.num_bytes.weights < 0.51 * wide.num_bytes.weights
    matrices = [layer.down_proj.packed for layer in narrow.model.layers]
    assert {matrix.dtype for matrix in matrices} == {BFLOAT16}
    assert torch.equal(short_logits(narrow), short_logits(wide))


def test_dummy_weights_have_the_values_of_a_stored_model(tmp_path: Path) -> None:
    config = dataclasses.replace(checkpoint(tmp_path / "m", dtype=BFLOAT16), load_format="dummy")
    narrow, wide = runner_of(config), runner_of(config, wide=True)
    assert narrow.settings.weight_dtype == BFLOAT16
    assert torch.equal(short_logits(narrow), short_logits(wide))


def test_the_type_of_matrices_follows_the_file_and_not_the_config(tmp_path: Path) -> None:
    stored = checkpoint(tmp_path / "bf16", dtype=BFLOAT16)
    assert make_settings(stored, dtype="float32").weight_dtype == BFLOAT16
    assert make_settings(stored, dtype="float16").weight_dtype == torch.float16
    assert make_settings(stored, dtype="float32", attention_backend="torch").weight_dtype == FLOAT32
    assert make_settings(stored, dtype="float32", quantization="int8").weight_dtype == FLOAT32
    wide = dataclasses.replace(checkpoint(tmp_path / "fp32"), dtype="bfloat16")
    assert make_settings(wide, dtype="float32").weight_dtype == FLOAT32
    # rows that are no whole words
    odd = dataclasses.replace(stored, intermediate_size=97, load_format="dummy")
    assert make_settings(odd, dtype="float32").weight_dtype == FLOAT32
    # one matrix is wider than the others
    path = tmp_path / "bf16" / "model.safetensors"
    tensors = dict(load_file(path))
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].float()
    path.unlink()
    save_file(tensors, path)
    assert stored_matrix_dtype(stored) is None and make_settings(stored, dtype="float32").weight_dtype == FLOAT32


def test_new_weights_are_kept_as_their_own_file_stores_them(tmp_path: Path) -> None:
    narrow, wide = checkpoint(tmp_path / "1", dtype=BFLOAT16), checkpoint(tmp_path / "2", seed=2)
    expected = {config.model_path: short_logits(runner_of(config)) for config in (narrow, wide)}
    runner = runner_of(narrow)
    for config, dtype in ((wide, FLOAT32), (narrow, BFLOAT16)):
        runner.weights.update(config)
        assert runner.model.layers[0].qkv_proj.packed.dtype == dtype
        assert torch.equal(short_logits(runner), expected[config.model_path])


def test_a_gguf_file_and_its_cached_weights(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    quantized = load_model_config(write_gguf(tmp_path / "q.gguf", make_model("llama"), "llama", kind=Kind.Q4_1))
    assert stored_matrix_dtype(quantized) is None
    config = load_model_config(write_gguf(tmp_path / "m.gguf", make_model("llama"), "llama", kind=Kind.BF16))
    assert stored_matrix_dtype(config) == BFLOAT16
    expected = load_parameters(config, FLOAT32, CPU)
    for _ in range(2):  # made, then mapped
        found = load_parameters(config, FLOAT32, CPU, cache=CacheFolder(folder), weight_dtype=BFLOAT16)
        for name, tensor in expected.items():
            assert found[name].dtype == (BFLOAT16 if tensor.dim() == 2 else FLOAT32)
            assert torch.equal(found[name].float(), tensor)
    (narrow,) = folder.iterdir()
    load_parameters(config, FLOAT32, CPU, cache=CacheFolder(folder))
    (wide,) = set(folder.iterdir()) - {narrow}
    assert narrow.stat().st_size < 0.6 * wide.stat().st_size


def test_a_router_of_float32_multiplies_rows_of_bfloat16_in_float32() -> None:
    from tercet.model_executor.layers.cpu_layers import router_of  # needs the operations

    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(40, 96, generator=generator), torch.randn(7, 96, generator=generator).bfloat16()
    layer, of_floats = (router_of(RouterWeights(weight), dtype) for dtype in (BFLOAT16, FLOAT32))
    found = layer(x)
    assert found.dtype == FLOAT32 and torch.equal(found, of_floats(x.float()))
    torch.testing.assert_close(found, x.float() @ weight.T)
    with pytest.raises(RuntimeError, match="x must be bfloat16, got Float"):
        torch.ops.tercet_cpu.widened(x.float())

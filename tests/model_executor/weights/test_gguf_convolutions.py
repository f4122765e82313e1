"""GGUF files of LFM2 and LFM2-MoE: names of tensors, quantised matrices, and tensors that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_models import Kind, split_gguf, write_gguf
from runner_driver import RunnerDriver, short_logits
from runners import make_runner
from tiny_convolution_configs import BASE
from tiny_models import initialised, make_model
from transformers import Lfm2Config, Lfm2MoeConfig
from transformers_parity import assert_logits_equal

from tercet.model_executor.models.convolution_parameters import convolution_name
from tercet.model_executor.models.parameters import is_expert
from tercet.model_executor.weights.gguf_checkpoint import GGUFCheckpoint
from tercet.model_executor.weights.loader import load_parameters, stored_forms
from tercet.srt.model_files.load_config import load_model_config

CPU = torch.device("cpu")
LAST_NORM = "model.embedding_norm.weight"
WIDE = BASE | {"hidden_size": 256, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
MODELS = {
    "lfm2": lambda: initialised(Lfm2Config(**WIDE, intermediate_size=512, block_auto_adjust_ff_dim=False), 0),
    "lfm2moe": lambda: initialised(
        Lfm2MoeConfig(
            **WIDE,
            intermediate_size=512,
            moe_intermediate_size=256,
            num_experts=3,
            num_experts_per_tok=2,
            num_dense_layers=1,
        ),
        0,
    ),
}
"""Models whose rows are whole blocks of all types."""


def read(path: Path, **options: Any) -> Any:
    return load_parameters(load_model_config(path), torch.float32, CPU, **options)


def assert_equals_transformers(path: Path, model: Any, **options: Any) -> None:
    options = {"dtype": "float32", "max_total_tokens": 400, "max_running_requests": 6} | options
    driver = RunnerDriver(make_runner(load_model_config(path), **options))
    assert_logits_equal(driver, model, np.random.default_rng(1).integers(0, 131, 50))


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("name", ["token_embd_norm.weight", "output_norm.weight"])
def test_both_names_of_the_last_norm(name: str, backend: str, tmp_path: Path) -> None:
    """And an output head of its own."""
    config = Lfm2Config(**BASE, intermediate_size=96, block_multiple_of=32, tie_word_embeddings=False)
    model = initialised(config, 0)
    beside = {name: model.state_dict()[LAST_NORM].numpy()}
    path = write_gguf(tmp_path / "m.gguf", model, "lfm2", drop=(LAST_NORM,), beside=beside)
    assert not load_model_config(path).tie_word_embeddings
    assert_equals_transformers(path, model, attention_backend=backend)


def test_a_split_file_of_experts(tmp_path: Path) -> None:
    model = make_model("lfm2_moe")
    paths = split_gguf(write_gguf(tmp_path / "m.gguf", model, "lfm2moe"), max_tensors=6)
    assert_equals_transformers(paths[0], model)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (Kind.Q8_0, "int8"), (Kind.Q4_0, "int4"), (Kind.Q4_1, "int4"), (Kind.Q4_K, "q4_k"), (Kind.Q6_K, "q6_k"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("arch", MODELS)
def test_matrices_keep_their_stored_values(arch: str, kind: Kind, form: str, tmp_path: Path) -> None:
    """Those of the linear layers around a convolution, too. Its weights and routers are never quantised."""
    model = MODELS[arch]()
    path = write_gguf(tmp_path / "m.gguf", model, arch, kind=kind)
    forms = stored_forms(load_model_config(path), torch.float32)
    names = [f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in ("qkv_proj", "o_proj")]
    names += ["layers.0.gate_up_proj.weight", "layers.0.down_proj.weight"]
    names += [name for name in forms if is_expert(name)] or ["layers.1.down_proj.weight"]
    assert {forms[name] for name in names} == {form}
    assert not [name for name in forms if "router" in name or "convolution" in name]
    wide, stored = read(path), read(path, forms=forms)
    for name in names:
        assert torch.equal(stored[name].dequantize(), wide[name])
    convolved = model.state_dict()["model.layers.0.conv.conv.weight"]
    assert torch.equal(stored[convolution_name(0)], convolved)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_K])
def test_a_quantised_file_has_the_logits_of_its_values(kind: Kind, tmp_path: Path) -> None:
    model = MODELS["lfm2"]()
    path = write_gguf(tmp_path / "m.gguf", model, "lfm2", kind=kind)
    checkpoint = GGUFCheckpoint(load_model_config(path))
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 2 and name in checkpoint.names:
            tensor.copy_(checkpoint.tensor(name))
    assert_equals_transformers(path, model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", MODELS)
def test_weights_from_the_cache(arch: str, dtype: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", MODELS[arch](), arch, kind=Kind.Q4_0)
    options: dict[str, Any] = {"dtype": dtype, "max_running_requests": 3, "max_total_tokens": 256}
    expected = short_logits(make_runner(load_model_config(path), weight_cache="off", **options))
    for _ in range(2):
        runner = make_runner(load_model_config(path), weight_cache=str(tmp_path / "cache"), **options)
        assert torch.equal(short_logits(runner), expected)


def test_weights_of_a_convolution_may_be_a_matrix_or_have_three_dimensions(tmp_path: Path) -> None:
    model = make_model("lfm2")
    names = {layer: f"model.layers.{layer}.conv.conv.weight" for layer in (0, 2, 3)}
    beside = {f"blk.{layer}.shortconv.conv.weight": model.state_dict()[name].numpy() for layer, name in names.items()}
    path = write_gguf(tmp_path / "m.gguf", model, "lfm2", drop=names.values(), beside=beside)
    parameters = read(path)
    for layer, name in names.items():
        assert torch.equal(parameters[convolution_name(layer)], model.state_dict()[name])


ONES = np.ones(64, np.float32)
QK_NORMS = tuple(f"model.layers.1.self_attn.{name}_layernorm.weight" for name in "qk")


@pytest.mark.parametrize(
    ("arch", "options", "message"),
    [
        ("lfm2", {"drop": (LAST_NORM,)}, r"tensors missing: model\.embedding_norm\.weight"),
        (
            "lfm2",
            {"beside": {"output_norm.weight": ONES}},
            r"'token_embd_norm\.weight' and 'output_norm\.weight' are both model\.embedding_norm\.weight",
        ),
        (
            "lfm2",
            {"drop": ("model.layers.2.conv.conv.weight",)},
            r"tensors missing: model\.layers\.2\.conv\.conv\.weight",
        ),
        ("lfm2", {"drop": QK_NORMS}, r"missing: model\.layers\.1\.self_attn\.k_layernorm\.weight, .*q_layernorm"),
        ("lfm2", {"keys": {"shortconv.l_cache": 4}}, r"conv\.conv\.weight' has shape \(64, 3\), .*implies \(64, 4\)"),
        ("lfm2", {"beside": {"blk.0.shortconv.conv.bias": ONES}}, r"unexpected: model\.layers\.0\.conv\.conv\.bias"),
        ("lfm2", {"beside": {"blk.0.shortconv.gate.weight": ONES}}, r"unexpected: blk\.0\.shortconv\.gate\.weight"),
        ("lfm2", {"beside": {"blk.0.ffn_gate.0.weight": ONES}}, r"unexpected: blk\.0\.ffn_gate\.0\.weight"),
        ("lfm2", {"beside": {"blk.0.attn_q.weight": ONES}}, r"unexpected: model\.layers\.0\.self_attn\.q_proj"),
        ("lfm2", {"beside": {"dense_2.weight": np.ones((8, 64), np.float32)}}, r"unexpected: dense_2\.weight"),
        (
            "lfm2moe",
            {"drop": ("model.layers.1.feed_forward.expert_bias",)},
            r"tensors missing: model\.layers\.1\.mlp\.gate\.e_score_correction_bias",
        ),
    ],
    ids=str,
)
def test_wrong_tensors_are_refused(arch: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = make_model("lfm2_moe" if arch == "lfm2moe" else arch)
    with pytest.raises(ValueError, match=message):
        read(write_gguf(tmp_path / "m.gguf", model, arch, **options))

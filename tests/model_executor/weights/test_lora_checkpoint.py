"""Reading LoRA adapters: the matrices of each layer, and what is refused."""

from __future__ import annotations

import json
import math
import struct

import pytest
import torch
from lora_adapters import make_tensors, modules_of, save_adapter, save_tensors
from tiny_models import make_model, save

from tercet.model_executor.weights.lora_checkpoint import lora_shapes, read_adapter
from tercet.model_executor.weights.safetensors_file import SafetensorsFile
from tercet.srt.model_files.load_config import load_model_config

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module", params=["llama"])
def model(request):
    return make_model(request.param)


@pytest.fixture(scope="module")
def config(model, tmp_path_factory):
    return load_model_config(save(model, tmp_path_factory.mktemp("model")))


@pytest.fixture
def tensors(model):
    return make_tensors(modules_of(model), 4)


def dense(weight, rows):
    """What an adapter adds to a stacked weight, [out, in]."""
    return torch.cat([b @ a for a, b in zip(weight.a, weight.b.split(rows), strict=True)])


def delta(tensors, name, scale):
    a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"].double() for side in "AB")
    return scale * (b @ a)


def test_matrices_of_stacked_layers(model, config, tensors, tmp_path):
    path = save_tensors(tmp_path, tensors, lora_alpha=6)
    adapter = read_adapter(path, config, max_rank=4)
    shapes = lora_shapes(config)
    assert adapter.weights.keys() == shapes.keys()
    for layer in range(3):
        qkv = f"layers.{layer}.qkv_proj.weight"
        assert shapes[qkv] == ((64, 32, 32), 64, False)
        names = [f"model.layers.{layer}.self_attn.{part}_proj" for part in "qkv"]
        expected = torch.cat([delta(tensors, name, 1.5) for name in names])
        assert (dense(adapter.weights[qkv], shapes[qkv].rows) - expected).abs().max() < 1e-5
        down = f"layers.{layer}.down_proj.weight"
        expected = delta(tensors, f"model.layers.{layer}.mlp.down_proj", 1.5)
        assert (dense(adapter.weights[down], shapes[down].rows) - expected).abs().max() < 1e-5


def test_ranks_and_scales_that_differ(model, config, tmp_path):
    modules = modules_of(model, ("q_proj", "v_proj"))
    ranks = {name: 2 if name.endswith("q_proj") else 5 for name in modules}
    tensors = make_tensors(modules, ranks)
    path = save_tensors(
        tmp_path, tensors, r=5, lora_alpha=10, rank_pattern={"q_proj": 2},
        alpha_pattern={"layers.1.self_attn.v_proj": 20},
    )  # fmt: skip
    weights = read_adapter(path, config, max_rank=8).weights
    assert set(weights) == {f"layers.{layer}.qkv_proj.weight" for layer in range(3)}
    for layer in range(3):
        prefix = f"model.layers.{layer}.self_attn."
        q, v = delta(tensors, f"{prefix}q_proj", 5), delta(tensors, f"{prefix}v_proj", 4 if layer == 1 else 2)
        expected = torch.cat([q, torch.zeros(32, 64), v])
        assert (dense(weights[f"layers.{layer}.qkv_proj.weight"], (64, 32, 32)) - expected).abs().max() < 1e-5


def renamed(tensors, change):
    return {change(name): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "change",
    [
        lambda name: name.removeprefix("base_model.model."),
        lambda name: name.replace("model.layers", "layers").replace("base_model.", "base_model.model."),
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: name.replace("model.layers", "model.language_model.layers"),
        lambda name: name.replace("model.layers", "language_model.model.layers"),
    ],
)
def test_names(change, config, tensors, tmp_path):
    expected = read_adapter(save_tensors(tmp_path / "plain", tensors), config, 4)
    found = read_adapter(save_tensors(tmp_path / "renamed", renamed(tensors, change)), config, 4)
    assert found.fingerprint == expected.fingerprint and found.weights.keys() == expected.weights.keys()


def test_matrices_of_parts_for_images_are_left_out(config, tensors, tmp_path):
    """PEFT adapts all modules whose names end with q_proj, also those for images."""
    model = make_model("gemma3_images")
    with_images = load_model_config(save(model, tmp_path / "model"))
    of_text = make_tensors(modules_of(model, ("q_proj",)))
    of_images = make_tensors(
        {name: module for name, module in model.named_modules() if "vision" in name and name.endswith(".q_proj")}
    )
    assert of_images
    expected = read_adapter(save_tensors(tmp_path / "text", of_text), with_images, 4)
    found = read_adapter(save_tensors(tmp_path / "both", of_text | of_images), with_images, 4)
    assert found.fingerprint == expected.fingerprint
    with pytest.raises(ValueError, match="has no matrices"):
        read_adapter(save_tensors(tmp_path / "images", of_images), with_images, 4)
    with pytest.raises(ValueError, match=r"tensor .*vision.* is not supported"):
        read_adapter(save_tensors(tmp_path / "other", tensors | of_images), config, 4)


@pytest.mark.parametrize("prefix", ["model.layers", "layers", "model.language_model.layers"])
def test_the_config_means_the_names_of_the_adapted_model(prefix, model, config, tmp_path):
    modules = modules_of(model, ("q_proj",))
    ranks = {name: 2 if ".1." in name else 4 for name in modules}
    tensors = make_tensors(modules, ranks)
    path = save_tensors(
        tmp_path,
        renamed(tensors, lambda name: name.replace("model.model.layers", f"model.{prefix}")),
        target_modules=[f"{prefix}.{layer}.self_attn.q_proj" for layer in range(3)],
        rank_pattern={rf"^{prefix}\.1\..*": 2},
        alpha_pattern={f"^{prefix}.2.self_attn.q_proj": 12},
    )
    weights = read_adapter(path, config, 4).weights
    for layer, scale in enumerate((1.5, 3, 3)):
        expected = delta(tensors, f"model.layers.{layer}.self_attn.q_proj", scale)
        found = dense(weights[f"layers.{layer}.qkv_proj.weight"], (64, 32, 32))[:64]
        assert (found - expected).abs().max() < 1e-5


def test_the_fingerprint_is_that_of_what_is_computed(model, config, tensors, tmp_path):
    def fingerprint(name, values=tensors, **changes):
        return read_adapter(save_tensors(tmp_path / name, values, **changes), config, 4).fingerprint

    first = fingerprint("first")
    assert first == fingerprint("again", lora_dropout=0.5, base_model_name_or_path="elsewhere")
    changed = {**tensors, f"{Q0}.lora_A.weight": tensors[f"{Q0}.lora_A.weight"] + 0.001}
    others = [fingerprint("scaled", lora_alpha=7), fingerprint("changed", changed)]
    fewer = {name: tensor for name, tensor in tensors.items() if "down_proj" not in name}
    assert len({first, *others, fingerprint("fewer", fewer)}) == 4
    assert len(first) == 32 and int(first, 16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_types_of_numbers(dtype, config, tensors, tmp_path):
    stored = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    found = read_adapter(save_tensors(tmp_path, stored, lora_alpha=4), config, 4)
    matrix = found.weights["layers.0.qkv_proj.weight"].a[0]
    assert matrix.dtype == torch.float32 and torch.equal(matrix, stored[f"{Q0}.lora_A.weight"].float())


def changed(name, value):
    return lambda tensors: {**tensors, name: value(tensors[name]) if callable(value) else value}


def without(ending):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}


def set_first(number):
    def edit(tensor):
        tensor = tensor.clone()
        tensor[0, 0] = number
        return tensor

    return edit


A, B = f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"


@pytest.mark.parametrize(
    ("edit", "settings", "named"),
    [
        (without("layers.0.self_attn.q_proj.lora_B.weight"), {}, "layers.0.self_attn.q_proj has no matrix B"),
        (without("layers.0.self_attn.q_proj.lora_A.weight"), {}, "layers.0.self_attn.q_proj has no matrix A"),
        (changed(A, lambda a: a[:, :-1].contiguous()), {}, r"matrix A of .* has shape \(4, 63\), .* imply \(4, 64\)"),
        (changed(B, lambda b: b[:-1].contiguous()), {}, r"matrix B of .* has shape \(63, 4\), .* imply \(64, 4\)"),
        (changed(A, lambda a: a[0].contiguous()), {}, r"matrix A of .* has shape \(64,\)"),
        (changed(A, set_first(float("nan"))), {}, "lora_A.weight' has numbers that are not finite"),
        (changed(B, set_first(float("-inf"))), {}, "lora_B.weight' has numbers that are not finite"),
        (changed(A, lambda a: a.to(torch.int8)), {}, "must have floating-point numbers"),
        (changed(f"{Q0}.lora_magnitude_vector", torch.ones(64)), {}, "lora_magnitude_vector' is not supported"),
        (changed(f"{Q0}.lora_B.bias", torch.ones(64)), {}, "lora_B.bias' is not supported"),
        (
            changed("base_model.model.lm_head.lora_A.weight", torch.ones(4, 64)),
            {},
            "lm_head.lora_A.weight' is not supported: an adapter can change only",
        ),
        (
            changed("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 64)),
            {},
            "lora_embedding_A' is not supported",
        ),
        (
            changed("base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight", torch.ones(4, 64)),
            {},
            "experts.1.up_proj.lora_A.weight' is not supported",
        ),
        (
            changed("base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight", torch.ones(4, 64)),
            {},
            "layers.3.self_attn.q_proj.lora_A.weight' is not supported",
        ),
        (changed(f"{Q0}.lora_A.default.weight", torch.ones(4, 64)), {}, "q_proj has two matrices A"),
        (lambda tensors: {}, {"target_modules": ["q_proj"]}, "has no matrices"),
        (without("layers.2.mlp.up_proj.lora_B.weight"), {}, "layers.2.mlp.up_proj has no matrix B"),
        (lambda tensors: tensors, {"target_modules": ["q_proj"]}, "is of a module that target_modules does not name"),
        (lambda tensors: tensors, {"layers_to_transform": [0, 1]}, "layers.2.* does not name"),
        (
            lambda tensors: {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up" not in name},
            {},
            "model.layers.1.mlp.up_proj has no matrices, but target_modules names it",
        ),
        (lambda tensors: tensors, {"r": 5}, "the rank is 5, but --max-lora-rank is 4"),
        (lambda tensors: tensors, {"r": 3}, r"matrix A of .* has shape \(4, 96\), .* imply \(3, 96\)"),
        (lambda tensors: tensors, {"use_dora": True}, "use_dora=True is not supported"),
    ],
)
def test_refusals(edit, settings, named, config, tensors, tmp_path):
    with pytest.raises(ValueError, match=named):
        read_adapter(save_tensors(tmp_path, edit(tensors), **settings), config, 4)


def test_a_tensor_of_another_shape_takes_no_memory(config, tensors, tmp_path, monkeypatch):
    path = save_tensors(tmp_path, changed(A, torch.ones(4, 65))(tensors))
    read = []
    tensor_of = SafetensorsFile.__getitem__
    monkeypatch.setattr(SafetensorsFile, "__getitem__", lambda file, name: read.append(name) or tensor_of(file, name))
    with pytest.raises(ValueError, match=r"matrix A of .* has shape \(4, 65\)"):
        read_adapter(path, config, 4)
    assert A not in read


@pytest.mark.parametrize("shape", [[1] * 100, [2**63, 0, 2**63], [0, 64], []])
def test_shapes_that_torch_cannot_make(shape, config, tensors, tmp_path):
    path = save_tensors(tmp_path, {A: torch.ones(4, 64), B: torch.ones(64, 4)}, layers_to_transform=0)
    num_bytes = 4 * math.prod(shape)
    entries = {A: (shape, num_bytes), B: ([64, 4], 1024)}
    header, end = {}, 0
    for name, (dimensions, size) in entries.items():
        header[name] = {"dtype": "F32", "shape": dimensions, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    (tmp_path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    with pytest.raises(ValueError, match=r"(matrix A of .*|lora_A\.weight') has shape"):
        read_adapter(path, config, 4)


def test_files_that_are_missing_or_damaged(config, tensors, tmp_path):
    path = save_tensors(tmp_path, tensors)
    file = tmp_path / "adapter_model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        read_adapter(path, config, 4)
    file.unlink()
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors"):
        read_adapter(path, config, 4)
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"only adapter_model\.bin, a pickle file"):
        read_adapter(path, config, 4)
    file.mkdir()
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors in .* cannot be read: Is a directory"):
        read_adapter(path, config, 4)
    file.rmdir()
    file.symlink_to("gone")
    with pytest.raises(ValueError, match=r"cannot be read: '.*\.safetensors' is a link to a missing file, 'gone'"):
        read_adapter(path, config, 4)


@pytest.mark.parametrize("name", ["phi3", "phi3_partial", "gemma3", "gpt_oss", "qwen3_moe", "mixtral", "glm4"])
def test_shapes_are_those_of_all_dense_layers(name, tmp_path):
    model = make_model(name)
    config = load_model_config(save(model, tmp_path / "model"))
    adapter = read_adapter(save_adapter(tmp_path / "adapter", model), config, 4)
    shapes = lora_shapes(config)
    assert adapter.weights.keys() == shapes.keys()
    for key, (a, b) in adapter.weights.items():
        assert a.shape == (len(shapes[key].rows), 4, shapes[key].columns) and len(b) == sum(shapes[key].rows)
    assert not any("experts" in key for key in shapes)

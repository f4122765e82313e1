from __future__ import annotations

import dataclasses
import json
import os
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runners import make_runner
from safetensors.torch import load_file, save_file
from tiny_models import make_model, save

from tercet.model_executor import cpu_extension
from tercet.model_executor.device.dtypes import cpu_multiplies_bfloat16, resolve_dtype
from tercet.model_executor.models.parameters import decoder_parameters
from tercet.model_executor.weights import loader as weights
from tercet.model_executor.weights.loader import checkpoint_dtype, load_parameters
from tercet.srt.model_files.load_config import load_model_config

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    save(make_model("llama"), tmp_path)
    return tmp_path


def edit(folder, change):
    """Rewrites the single file of a checkpoint after `change` had its way with the dict of tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def load(folder, dtype=torch.float32):
    return dict(load_parameters(load_model_config(folder), dtype, CPU))


def test_fused_parameters_are_the_parts_in_order(folder):
    stored = load_file(folder / "model.safetensors")
    loaded = load(folder)
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        qkv = torch.cat([stored[f"{prefix}.self_attn.{x}_proj.weight"] for x in "qkv"])
        assert torch.equal(loaded[f"layers.{layer}.qkv_proj.weight"], qkv)
        gate_up = torch.cat([stored[f"{prefix}.mlp.{x}_proj.weight"] for x in ("gate", "up")])
        assert torch.equal(loaded[f"layers.{layer}.gate_up_proj.weight"], gate_up)
    assert sum(t.numel() for t in loaded.values()) == sum(t.numel() for t in stored.values())
    half = load(folder, torch.bfloat16)
    assert all(torch.equal(half[name], tensor.to(torch.bfloat16)) for name, tensor in loaded.items())


def test_missing_and_unexpected_tensors_are_named(folder):
    def without(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]

    def beside(tensors):
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)

    original = (folder / "model.safetensors").read_bytes()
    edit(folder, without)
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)
    (folder / "model.safetensors").write_bytes(original)
    edit(folder, beside)
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(folder)


@pytest.mark.parametrize("name", ["qwen3_moe_all", "mixtral", "olmoe", "granitemoe_biases"])
def test_stacked_experts_are_refused(tmp_path, name):
    model = make_model(name)
    save(model, tmp_path)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"experts.down_proj' has the matrices of all experts"):
        load(tmp_path)


def test_wrong_shapes_and_dtypes_are_named(folder):
    def narrow(tensors):
        tensors["model.norm.weight"] = torch.ones(63)

    def quantized(tensors):
        tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)

    edit(folder, narrow)
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*\(63,\).*\(64,\)"):
        load(folder)
    edit(folder, quantized)
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*is int8"):
        load(folder)


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "num_attention_heads"])
def test_a_config_of_a_larger_model_is_noticed_before_its_memory_is(folder, name):
    """That such a model needs too much memory would hide the mistake."""
    config = json.loads((folder / "config.json").read_text()) | {name: 2**24}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"tensor 'model\..* has shape .*, the config implies .*16777216|268435456"):
        make_runner(load_model_config(folder), dtype="float32", max_running_requests=1, max_total_tokens=64)


def test_tensors_that_mean_nothing_are_ignored(folder):
    def old(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    edit(folder, old)
    assert "norm.weight" in load(folder)


def test_a_tied_head_may_be_stored_twice_but_not_differ(tmp_path):
    save(make_model("llama_31_tied"), tmp_path)

    def twice(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def other(tensors):
        tensors["lm_head.weight"][0] += 1

    assert "lm_head.weight" not in load(tmp_path)
    edit(tmp_path, twice)
    assert "lm_head.weight" not in load(tmp_path)
    edit(tmp_path, other)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        load(tmp_path)


def test_shards(tmp_path):
    model = make_model("llama")
    save(model, tmp_path / "one")
    save(model, tmp_path / "many", max_shard_size="60KB")
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    assert all(torch.equal(one[name], many[name]) for name in one | many)

    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    index_path = tmp_path / "many" / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["model.extra"] = shards[0].name
    index_path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index names: model\.extra"):
        load(tmp_path / "many")
    index_path.unlink()  # without an index, every file counts
    assert all(torch.equal(one[name], tensor) for name, tensor in load(tmp_path / "many").items())
    shards[1].rename(shards[1].with_suffix(".gone"))
    with pytest.raises(ValueError, match="missing"):
        load(tmp_path / "many")


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "60KB"}], ids=["file", "shards"])
def test_an_embedding_model_may_have_been_saved_without_its_output_head(tmp_path, options):
    """The names of its tensors lack `model.`, as those of Qwen3-Embedding do."""
    model = make_model("llama_31_tied")
    save(model, tmp_path / "whole")
    save(model.model, tmp_path / "base", **options)
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    assert checkpoint_dtype(dataclasses.replace(load_model_config(tmp_path / "base"), dtype=None)) == "float32"
    whole, base = load(tmp_path / "whole"), load(tmp_path / "base")
    assert all(torch.equal(whole[name], base[name]) for name in whole | base)


def test_an_output_head_beside_names_without_a_prefix(folder):
    expected = load(folder)

    def drop_prefix(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit(folder, drop_prefix)
    loaded = load(folder)
    assert all(torch.equal(expected[name], loaded[name]) for name in expected | loaded)


@pytest.mark.parametrize("form", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_beside_parts_for_images(tmp_path, form, tied):
    """In files of transformers 4 and of transformers 5."""
    save(make_model("llama_31_tied" if tied else "llama"), tmp_path)
    expected = load(tmp_path)
    parts, old = "model." if form.startswith("model.") else "", form.startswith("language_model.")

    def add_parts(tensors):
        for name in list(tensors):
            under = name.removeprefix("model.")
            tensors[form + under if under != name else ("language_model." if old else "") + name] = tensors.pop(name)
        tensors[f"{parts}vision_tower.encoder.weight"] = torch.ones(2)
        tensors[f"{parts}multi_modal_projector.weight"] = torch.ones(2)

    edit(tmp_path, add_parts)
    loaded = load(tmp_path)
    assert all(torch.equal(expected[name], loaded[name]) for name in expected | loaded)
    edit(tmp_path, lambda tensors: tensors.update({"audio_tower.weight": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"unexpected: audio_tower\.weight"):
        load(tmp_path)


def test_a_tensor_of_a_language_model_that_is_there_by_two_names(folder):
    other = "model.language_model.norm.weight"
    edit(folder, lambda tensors: tensors.update({other: torch.ones(64)}))
    with pytest.raises(
        ValueError, match=r"tensors 'model\..*norm\.weight' and 'model\..*' are both model\.norm\.weight"
    ):
        load(folder)


@pytest.mark.parametrize("name", ["ministral3_images", "ministral3"])
def test_the_log_names_weights_for_images_that_are_not_read(name, tmp_path, caplog):
    save(make_model(name), tmp_path)
    with caplog.at_level("INFO"):
        load(tmp_path)
    assert ("Only text is served: the weights for images in" in caplog.text) == (name == "ministral3_images")


def test_numbers_of_norms_are_computed_in_float32(tmp_path):
    save(make_model("gemma3"), tmp_path)
    stored, loaded = load_file(tmp_path / "model.safetensors"), load(tmp_path, torch.bfloat16)
    for name, source, factor in (
        ("input_norm", "input_layernorm", 1),
        ("attention_output_norm", "post_attention_layernorm", 1 / 8),
        ("post_attention_norm", "pre_feedforward_layernorm", 1),
        ("feed_forward_output_norm", "post_feedforward_layernorm", 1 / 8),
        ("q_norm", "self_attn.q_norm", 1),
    ):
        expected = (stored[f"model.layers.1.{source}.weight"] + 1) * factor
        assert torch.equal(loaded[f"layers.1.{name}.weight"], expected), name
    assert loaded["norm.weight"].dtype == torch.float32 and loaded["layers.1.o_proj.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "index", [{}, [], {"weight_map": []}, {"weight_map": {"a": None}}, {"weight_map": {"a": 5}}, 7]
)
def test_an_index_that_is_none_is_named(folder, index):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json.* must "):
        load(folder)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda some: st.lists(some, max_size=2) | st.dictionaries(st.text(max_size=2), some, max_size=2),
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=json_values | st.fixed_dictionaries({"weight_map": json_values}))
def test_any_index_is_read_or_refused(folder, index):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises((ValueError, OSError)):  # none of them names the model's tensors
        load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_named_pipe_is_not_waited_for(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=rf"{name}' must be a regular file, got a named pipe"):
        load(folder)


def test_an_index_that_is_a_link_to_a_missing_file_is_not_ignored(folder):
    (folder / "model.safetensors.index.json").symlink_to("../blobs/gone")
    with pytest.raises(FileNotFoundError, match=r"index\.json' is a link to a missing file, '../blobs/gone'"):
        load(folder)


def test_a_missing_shard_is_named(tmp_path):
    save(make_model("llama"), tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        load(tmp_path)


def test_other_formats_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*safetensors"):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match="no "):
        load(folder)
    (folder / "model.safetensors").write_bytes(b"not at all a safetensors file")
    with pytest.raises(ValueError, match="not a valid safetensors"):
        load(folder)


def mapped_files():
    with open("/proc/self/maps", encoding="utf-8") as lines:
        return {line.split(maxsplit=5)[5].strip() for line in lines if len(line.split()) > 5}


def test_matrices_of_the_wanted_dtype_are_mapped_for_as_long_as_they_are_held(folder):
    path = str(folder / "model.safetensors")
    loaded = load_parameters(load_model_config(folder), torch.float32, CPU)
    norm, fused = loaded["norm.weight"], loaded["layers.0.qkv_proj.weight"]
    assert path not in mapped_files()
    one, other = loaded["layers.0.o_proj.weight"], loaded["layers.0.o_proj.weight"]
    assert path in mapped_files()
    one += 1
    assert torch.equal(other, load(folder)["layers.0.o_proj.weight"]), "written to the file or to another's tensor"
    del one, other
    assert path not in mapped_files()
    converted = load_parameters(load_model_config(folder), torch.bfloat16, CPU)["layers.0.o_proj.weight"]
    assert path not in mapped_files() and len({*norm.shape, *fused.shape, *converted.shape}) > 1


@pytest.mark.skipif(not cpu_extension.multiplies(torch.float32), reason="no compiled operations for this processor")
def test_a_runner_holds_nothing_that_it_has_packed(tmp_path, monkeypatch):
    save(make_model("llama_31_tied"), tmp_path)
    given = {}

    class Watched(weights.StoredParameters):
        def __getitem__(self, name):
            tensor = super().__getitem__(name)
            given[name] = weakref.ref(tensor)
            return tensor

    monkeypatch.setattr(weights, "StoredParameters", Watched)
    config = load_model_config(tmp_path)
    runner = make_runner(config, dtype="float32", max_running_requests=1, max_total_tokens=64)
    held = {name for name, tensor in given.items() if tensor() is not None}
    assert held == {name for name in given if name.endswith("norm.weight")}
    assert given.keys() >= {one.name for one in decoder_parameters(config)}
    assert str(tmp_path / "model.safetensors") not in mapped_files() and runner.num_bytes.weights > 0


def test_dummy_weights_are_seeded_and_finite(folder):
    config = load_model_config(folder / "config.json", "dummy")
    first, again, other = (load_parameters(config, torch.bfloat16, CPU, seed=seed) for seed in (0, 0, 1))
    assert {p.name: p.shape for p in decoder_parameters(config)} == {n: tuple(t.shape) for n, t in first.items()}
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed_tokens.weight"], other["embed_tokens.weight"])
    assert torch.equal(first["norm.weight"], torch.ones(64, dtype=torch.bfloat16))
    assert 0.01 < first["layers.0.qkv_proj.weight"].float().std() < 0.03


def test_the_checkpoints_dtype(folder):
    config = load_model_config(folder)
    assert checkpoint_dtype(config) == "float32"
    silent = dataclasses.replace(config, dtype=None)
    assert checkpoint_dtype(silent) == "float32"  # from the embedding itself
    assert checkpoint_dtype(dataclasses.replace(silent, load_format="dummy")) is None


def test_resolve_dtype():
    cuda = torch.device("cuda")
    native = torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32
    for checkpoint in ("float16", "bfloat16", "float32", None):
        assert resolve_dtype("auto", checkpoint, CPU) == native
        assert resolve_dtype("float16", checkpoint, CPU) == torch.float16
    assert resolve_dtype("auto", "float16", cuda) == torch.float16
    assert resolve_dtype("auto", "bfloat16", cuda) == torch.bfloat16
    assert resolve_dtype("auto", "float32", cuda) == torch.bfloat16
    assert resolve_dtype("float32", "float16", cuda) == torch.float32
    with pytest.raises(ValueError, match="int8"):
        resolve_dtype("int8", None, CPU)

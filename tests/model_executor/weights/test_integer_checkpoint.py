"""Checkpoints of 4-bit and 8-bit integers: read exactly, kept in as many bits, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fp8_models import change_config
from integer_models import KINDS, Kind, packed, save_pair
from runner_driver import RunnerDriver, relative_error
from runners import make_runner
from safetensors.torch import load_file, save_file
from tiny_configs import BASE
from tiny_models import initialised, make_model
from transformers import MixtralConfig, Qwen3MoeConfig

from tercet.model_executor import cpu_extension
from tercet.model_executor.layers.quantized_weight import QuantizedWeight
from tercet.model_executor.models.family import family_of
from tercet.model_executor.models.parameter import Shard
from tercet.model_executor.models.parameters import is_expert
from tercet.model_executor.runner.kv_identity import kv_identity
from tercet.model_executor.runner.model_runner import ModelRunner
from tercet.model_executor.weights.loader import checkpoint_dtype, load_parameters, stored_forms
from tercet.model_executor.weights.quantization import parameter_bytes, quantized_forms
from tercet.srt.model_files.fingerprint import weight_fields
from tercet.srt.model_files.load_config import load_model_config

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")
QKV, GATE_UP, DOWN = (f"layers.0.{name}_proj.weight" for name in ("qkv", "gate_up", "down"))
UP = "model.layers.1.mlp.up_proj"
FORMS = {
    "gptq": ("int4", "int4"),
    "gptq-zeros": ("int4", "int4"),
    "gptq-8": ("int8", "int8"),
    "gptq-8-zeros": ("mixed", None),
    "gptq-v2": ("int4", "int4"),
    "gptq-scattered": (None, None),
    "awq": ("int4", "int4"),
    "awq-rows": ("int4", "int4"),
    "packed": ("int4", "int4"),
    "packed-zeros": ("int4", "int4"),
    "packed-rows": ("int8", "int8"),
    "packed-scattered": (None, None),
    "packed-wide-scales": ("mixed", None),
    "int8": ("int8", "int8"),
    "int8-zeros": ("mixed", None),
}
"""The form of all linear layers by the kind of a checkpoint, if activations are float32, and if they are bfloat16."""


def played(runner: ModelRunner) -> torch.Tensor:
    """The logits of a prompt and of a decode step."""
    driver = RunnerDriver(runner)
    driver.extend({1: list(range(5, 25))}, new_rows=[driver.add(1)])
    driver.decode([1], [7])
    return torch.cat(driver.logits)


def logits(path: Path, backend: str, dtype: str = "float32", **settings: object) -> torch.Tensor:
    config = load_model_config(path)
    return played(make_runner(config, attention_backend=backend, dtype=dtype, max_total_tokens=64, **settings))


@pytest.mark.parametrize("name", KINDS)
def test_parameters_are_the_numbers_of_the_file_in_as_many_bits(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    integers, wide = save_pair(tmp_path, kind)
    config = load_model_config(integers)
    assert checkpoint_dtype(config) == "bfloat16"
    exact = load_parameters(load_model_config(wide), torch.float32, CPU)
    widened = load_parameters(config, torch.float32, CPU)
    assert all(torch.equal(widened[name], exact[name]) for name in exact)

    linears = {name for name in exact if "_proj" in name}
    for dtype, form in zip((torch.float32, torch.bfloat16), FORMS[name], strict=True):
        assert stored_forms(config, dtype) == ({} if form is None else dict.fromkeys(linears, form))
    forms = stored_forms(config, torch.float32)
    sizes = parameter_bytes(config, 4, matrix_bytes=4, forms=forms)
    loaded = load_parameters(config, torch.float32, CPU, forms=forms)
    for name in forms:
        weight = loaded[name]
        assert isinstance(weight, QuantizedWeight)
        tensors = [x for x in (weight.scales, weight.minima) if x is not None]
        assert sizes[name] == weight.values.numel() * weight.bits // 8 + sum(x.nbytes for x in tensors)
        if weight.bits == 4 and not kind.symmetric:
            allowed = 0.01 * weight.scales.float().repeat_interleave(32, 1)
            assert ((weight.dequantize() - exact[name]).abs() <= allowed).all()
        else:
            assert torch.equal(weight.dequantize(), exact[name])


@pytest.mark.parametrize("name", ["gptq", "awq", "int8"])
def test_a_model_computes_with_the_numbers_that_its_weights_stand_for(name: str, tmp_path: Path) -> None:
    integers, wide = save_pair(tmp_path, KINDS[name])
    assert torch.equal(logits(integers, "torch"), logits(wide, "torch"))
    if cpu_extension.load() is None:
        pytest.skip("no build of csrc/cpu for this processor")
    found, exact = logits(integers, "cpu"), logits(wide, "cpu")
    if KINDS[name].symmetric:
        assert torch.equal(found, exact)
    else:
        assert 0 < relative_error(found, exact) < 0.002


def test_older_checkpoints_have_the_settings_in_a_file_of_their_own(tmp_path: Path) -> None:
    integers, wide = save_pair(tmp_path, KINDS["gptq"])
    settings = json.loads((integers / "config.json").read_text())["quantization_config"]
    change_config(integers, quantization_config=None)
    for name in ("gptq", "packed"):
        bare = integers if name == "gptq" else save_pair(tmp_path / name, KINDS[name], wide=False)[0]
        change_config(bare, quantization_config=None)
        with pytest.raises(ValueError, match=r"has integers, but config.json has no quantization_config"):
            logits(bare, "torch")
    del settings["quant_method"], settings["checkpoint_format"]
    (integers / "quantize_config.json").write_text(json.dumps(settings))
    assert torch.equal(logits(integers, "torch"), logits(wide, "torch"))


def test_older_checkpoints_of_awq_have_them_in_another_file(tmp_path: Path) -> None:
    integers, wide = save_pair(tmp_path, KINDS["awq"])
    change_config(integers, quantization_config=None)
    settings = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
    (integers / "quant_config.json").write_text(json.dumps(settings))
    assert torch.equal(logits(integers, "torch"), logits(wide, "torch"))


def test_targets_of_compressed_tensors_may_be_regular_expressions(tmp_path: Path) -> None:
    integers, wide = save_pair(tmp_path, KINDS["packed"])
    config = KINDS["packed"].config()

    def with_targets(*targets: str) -> torch.Tensor:
        config["config_groups"]["group_0"]["targets"] = list(targets)
        change_config(integers, quantization_config=config)
        return logits(integers, "torch")

    assert torch.equal(with_targets("re:.*self_attn.*", "re:.*mlp.*"), logits(wide, "torch"))
    with pytest.raises(ValueError, match=r"up_proj.weight_packed' has integers, but quantization_config excludes"):
        with_targets("re:.*self_attn.*", r"re:.*mlp\.(gate|down).*")


@pytest.mark.parametrize("name", ["gptq", "awq", "packed", "int8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_of_integers_and_a_router_that_is_not(name: str, family: str, tmp_path: Path) -> None:
    sizes = BASE | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = (
        Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True)
        if family == "qwen3_moe"
        else MixtralConfig(**sizes, num_local_experts=4)
    )
    integers, wide = save_pair(tmp_path, KINDS[name], initialised(config, 0).bfloat16())
    forms = stored_forms(load_model_config(integers), torch.float32)
    assert sum(map(is_expert, forms)) == 2 * 2 * 4 and not [found for found in forms if "router" in found]
    assert torch.equal(logits(integers, "torch"), logits(wide, "torch"))
    # Rounded minima may change the choice of an expert.
    if KINDS[name].symmetric and cpu_extension.load() is not None:
        assert torch.equal(logits(integers, "cpu"), logits(wide, "cpu"))


def test_new_weights_of_another_format_are_loaded_into_a_running_model(tmp_path: Path) -> None:
    first, second = (save_pair(tmp_path / name, KINDS[name])[0] for name in ("gptq", "packed-scattered"))
    runner = make_runner(load_model_config(first), attention_backend="torch", dtype="float32", max_total_tokens=64)
    runner.weights.update(load_model_config(second))
    assert torch.equal(played(runner), logits(second, "torch"))


def test_the_setting_quantization_takes_the_weights_of_the_file(tmp_path: Path) -> None:
    config = load_model_config(save_pair(tmp_path, KINDS["awq"])[0])
    loaded = load_parameters(config, torch.float32, CPU, forms=quantized_forms(config, "int4"))
    stored = load_parameters(config, torch.float32, CPU, forms=stored_forms(config, torch.float32))
    for found, wanted in zip(loaded[QKV], stored[QKV], strict=True):
        assert (found is None and wanted is None) or torch.equal(found, wanted)


def test_ranks_hold_parts_of_the_same_numbers(tmp_path: Path) -> None:
    for name in ("gptq-zeros", "awq", "packed-scattered", "int8"):
        config = load_model_config(save_pair(tmp_path / name, KINDS[name])[0])
        whole, *ranks = (
            load_parameters(config, torch.float32, CPU, shard=Shard(rank, size))
            for rank, size in ((0, 1), (0, 2), (1, 2))
        )
        assert torch.equal(torch.cat([rank[DOWN] for rank in ranks], 1), whole[DOWN])
        assert torch.equal(torch.cat([rank[GATE_UP][:144] for rank in ranks]), whole[GATE_UP][:288])


@pytest.mark.parametrize("name", ["gptq", "awq", "packed-scattered"])
def test_projections_that_are_rows_of_one_tensor(name: str, tmp_path: Path) -> None:
    """As Phi-3 has them. Rows of queries and keys are reordered, too."""
    integers, wide = save_pair(tmp_path, KINDS[name], make_model("phi3_partial").bfloat16())
    exact = load_parameters(load_model_config(wide), torch.float32, CPU)
    config = load_model_config(integers)
    widened = load_parameters(config, torch.float32, CPU)
    assert all(torch.equal(widened[parameter], exact[parameter]) for parameter in exact)
    forms = stored_forms(config, torch.float32)
    loaded = load_parameters(config, torch.float32, CPU, forms=forms)
    for parameter in forms:
        assert relative_error(loaded[parameter].dequantize(), exact[parameter]) < 0.002


def test_a_fused_projection_has_the_form_of_all_its_parts(tmp_path: Path) -> None:
    """Q and K of 4 bits, and V as it was: one matrix in memory. So all of it is widened, and other matrices are not."""
    integers, wide = save_pair(tmp_path, KINDS["gptq"])
    v = "model.layers.0.self_attn.v_proj"
    tensors = {n: t for n, t in load_file(integers / "model.safetensors").items() if not n.startswith(v)}
    tensors[f"{v}.weight"] = load_file(wide / "model.safetensors")[f"{v}.weight"]
    save_file(tensors, integers / "model.safetensors")
    dynamic = {"-:model.layers.0.self_attn.v_proj": {}}
    change_config(integers, quantization_config=KINDS["gptq"].config() | {"dynamic": dynamic})
    config = load_model_config(integers)
    forms = stored_forms(config, torch.float32)
    assert QKV not in forms and forms[GATE_UP] == "int4" and forms[QKV.replace("layers.0", "layers.1")] == "int4"
    exact = load_parameters(load_model_config(wide), torch.float32, CPU)
    assert torch.equal(load_parameters(config, torch.float32, CPU, forms=forms)[QKV], exact[QKV])


def test_scales_that_float16_lacks_are_kept(tmp_path: Path) -> None:
    integers, wide = save_pair(tmp_path, KINDS["packed"])
    for path, ending in ((integers, ".weight_scale"), (wide, ".weight")):
        tensors = load_file(path / "model.safetensors")
        tensors[UP + ending] *= 2.0**-20
        save_file(tensors, path / "model.safetensors")
    config = load_model_config(integers)
    up = "layers.1.gate_up_proj.weight"
    assert stored_forms(config, torch.float32)[up] == "mixed" and up not in stored_forms(config, torch.bfloat16)
    loaded = load_parameters(config, torch.float32, CPU, forms={up: "mixed"})
    exact = load_parameters(load_model_config(wide), torch.float32, CPU)
    assert torch.equal(loaded[up].dequantize(), exact[up])


def test_a_bias_of_zeros_is_not_missed(tmp_path: Path) -> None:
    integers, _ = save_pair(tmp_path, KINDS["gptq"])
    path = integers / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {f"{UP}.bias": torch.zeros(288)}, path)
    load_parameters(load_model_config(integers), torch.float32, CPU)
    save_file(tensors | {f"{UP}.bias": torch.ones(288)}, path)
    with pytest.raises(ValueError, match=r"unexpected: model.layers.1.mlp.up_proj.bias"):
        load_parameters(load_model_config(integers), torch.float32, CPU)


def test_columns_are_in_order_if_the_file_names_no_groups(tmp_path: Path) -> None:
    for name, index, act_order in (("gptq", torch.zeros, False), ("packed-scattered", torch.ones, True)):
        kind = KINDS[name]._replace(scattered=False)
        integers, wide = save_pair(tmp_path / name, kind)
        tensors = load_file(integers / "model.safetensors")
        ending = ".g_idx" if name == "gptq" else ".weight_g_idx"
        for module in {n.rpartition(".")[0] for n in tensors if "_proj" in n}:
            k = 288 if "down_proj" in module else 160
            tensors[module + ending] = (-index(k)).int()
        save_file(tensors, integers / "model.safetensors")
        change_config(integers, quantization_config=kind._replace(scattered=act_order).config())
        exact = load_parameters(load_model_config(wide), torch.float32, CPU)
        loaded = load_parameters(load_model_config(integers), torch.float32, CPU)
        assert torch.equal(loaded[DOWN], exact[DOWN])


def test_files_of_another_layout_are_other_weights(tmp_path: Path) -> None:
    """The same tensors in the layouts "gptq" and "gptq_v2" stand for other numbers. So caches tell them apart."""
    integers, _ = save_pair(tmp_path, KINDS["gptq"])
    first = load_model_config(integers)
    identity = kv_identity(make_runner(first, attention_backend="torch", max_total_tokens=64).settings, first)
    change_config(integers, quantization_config=KINDS["gptq"]._replace(layout="gptq_v2").config())
    second = load_model_config(integers)
    assert weight_fields(first) != weight_fields(second)
    assert identity != kv_identity(make_runner(second, attention_backend="torch", max_total_tokens=64).settings, second)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (Kind("awq", group_size=128), "int4"),
        (Kind("pack-quantized", bits=8, group_size=-1), "int8"),
        (Kind("gptq", scattered=True), None),
        (Kind("gptq", group_size=16), None),
    ],
)
def test_random_weights_have_the_forms_of_the_config(kind: Kind, form: str | None, tmp_path: Path) -> None:
    config = load_model_config(save_pair(tmp_path, KINDS["awq"])[0] / "config.json", "dummy")
    change_config(tmp_path / "integers", quantization_config=kind.config())
    config = load_model_config(tmp_path / "integers" / "config.json", "dummy")
    linears = [p.name for p in family_of(config).parameters(config) if "_proj" in p.name]
    assert stored_forms(config, torch.bfloat16) == ({} if form is None else dict.fromkeys(linears, form))


def test_tensors_that_contradict_the_config_are_refused_by_name(tmp_path: Path) -> None:
    names = ("gptq", "gptq-scattered", "packed", "int8")
    folders = {name: save_pair(tmp_path / name, KINDS[name])[0] for name in names}
    originals = {name: load_file(folder / "model.safetensors") for name, folder in folders.items()}

    def refused(name: str, message: str, changes: dict[str, torch.Tensor | None], **config: object) -> None:
        tensors = {
            key: found
            for key, found in (originals[name] | {UP + end: new for end, new in changes.items()}).items()
            if found is not None
        }
        save_file(tensors, folders[name] / "model.safetensors")
        change_config(folders[name], quantization_config=KINDS[name].config() | config)
        with pytest.raises(ValueError, match=message):
            make_runner(load_model_config(folders[name]), attention_backend="torch", max_total_tokens=64)

    refused("gptq", r"up_proj.qweight' needs '.*up_proj.scales', which is missing", {".scales": None})
    refused("gptq", r"up_proj.qweight' needs '.*up_proj.qzeros', which is missing", {".qzeros": None})
    refused("gptq-scattered", r"up_proj.qweight' needs '.*g_idx', which is missing", {".g_idx": None})
    groups = torch.arange(160).int() // 20
    refused("gptq", r"up_proj.g_idx' must name groups from 0 to 4, got 0 to 7", {".g_idx": groups})
    refused("gptq", r"down_proj.scales' has shape \(9, 160\) .*implies \(3, 160\)", {}, group_size=128)
    refused("gptq", r"down_proj.scales' has shape \(9, 160\) .*implies \(5, 160\)", {}, bits=8)
    excluded = {"modules_to_not_convert": ["up_proj"]}
    refused("gptq", r"qweight' has integers, but .* excludes 'model.layers.0.mlp.up", {}, **excluded)
    refused("gptq", r"up_proj.weight' is in the checkpoint twice", {".weight": torch.ones(288, 160)})
    refused("gptq", r"scales' has shape .* and type int32", {".scales": torch.ones(5, 288, dtype=torch.int32)})
    refused("gptq", r"missing: .*up_proj.weight", {".qweight": torch.ones(20, 288)})
    refused("gptq", r"qweight' must have 2 dimensions", {".qweight": torch.ones(20, dtype=torch.int32)})
    refused("gptq", r"up_proj.weight' has shape \(288, 128\), the config implies \(288, 160\)", {
        ".qweight": torch.ones(16, 288, dtype=torch.int32), ".scales": torch.ones(4, 288).half(),
        ".qzeros": packed(torch.ones(4, 288, dtype=torch.int64).numpy(), 4, 1), ".g_idx": torch.arange(128).int() // 32,
    })  # fmt: skip
    refused("packed", r"weight_packed' has shape \(288, 20\) .*implies \(288, 19\)", {
        ".weight_shape": torch.tensor([288, 152]),
    })  # fmt: skip
    refused("packed", r"weight_shape' must have two integers", {".weight_shape": torch.tensor([1, 2, 3])})
    refused("packed", r"unexpected: .*weight_zero_point", {".weight_zero_point": torch.ones(36, 5, dtype=torch.int32)})
    refused("int8", r"up_proj.weight' needs '.*weight_scale', which is missing", {".weight_scale": None})
    refused("int8", r"unexpected: .*input_scale", {".input_scale": torch.ones(1)})
    save_file(originals["int8"], folders["int8"] / "model.safetensors")
    change_config(folders["int8"], quantization_config=None)
    with pytest.raises(ValueError, match=r"is int8, but config.json has no quantization_config for it"):
        config = load_model_config(folders["int8"])
        tensors = {n: t for n, t in originals["int8"].items() if not n.endswith("scale")}
        save_file(tensors, folders["int8"] / "model.safetensors")
        make_runner(config, attention_backend="torch", max_total_tokens=64)

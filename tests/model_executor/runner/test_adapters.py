"""Requests with LoRA adapters on a runner, against models whose weights have the adapters merged in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cpu_models import CONFIG
from gguf_models import write_gguf
from lora_adapters import merged, save_adapter
from runner_driver import RunnerDriver, relative_error
from runners import make_runner
from tiny_configs import CONFIGS
from tiny_models import make_model, reference_logits, save

from tercet.model_executor import cpu_extension
from tercet.model_executor.device.memory import Memory
from tercet.model_executor.layers.lora_layers import LoraSize
from tercet.model_executor.step import HiddenRange, HiddenSum, PromptScore
from tercet.model_executor.weights.lora_checkpoint import lora_shapes
from tercet.srt.logprobs import LogprobOptions
from tercet.srt.model_files.load_config import load_model_config

pytestmark = pytest.mark.timeout(300)
SIZE = LoraSize(3, 6)
KINDS = [
    "llama", "llama_biases", "qwen2_tied", "qwen3", "phi3", "phi3_partial", "smollm3", "gemma2", "gemma3",
    "gemma3_scaled", "gemma3_images", "gpt_oss", "qwen3_moe", "mixtral", "mistral_window", "olmo2", "olmo3", "granite",
    "glm", "glm4", "seed_oss", "ernie4_5", "exaone4", "olmoe", "granitemoe", "qwen2_moe",
    "granitemoeshared", "glm4_moe", "dots1", "ernie4_5_moe", "arcee", "ministral3", "ministral3_images",
    "hunyuan_v1_dense", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "minicpm3", "lfm2_bias", "lfm2_moe",
    "lfm3", "granitemoehybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_attention",
    "qwen3_next",
    "lfm3", "granitemoehybrid", "gemma4_heads", "gemma4_inputs", "gemma4_images",
]  # fmt: skip


def make_driver(folder, **options):
    options = {"dtype": "float32", "max_total_tokens": 600, "max_running_requests": 6, "lora": SIZE} | options
    return RunnerDriver(make_runner(load_model_config(folder), **options))


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_merged_weights(name, backend, tmp_path):
    model = make_model(name)
    driver = make_driver(save(model, tmp_path / "model"), attention_backend=backend)
    attention_only = {"targets": ("q_proj", "v_proj", "qkv_proj", "kv_a_proj_with_mqa")}
    adapters = [
        save_adapter(tmp_path / "all", model, rank=4, seed=1),
        save_adapter(tmp_path / "some", model, rank=6, seed=2, use_rslora=True, **attention_only),
    ]
    for slot, path in enumerate(adapters, start=1):
        driver.runner.load_adapter(slot, path)
    models = {0: model, 1: merged(model, tmp_path / "all"), 2: merged(model, tmp_path / "some")}
    rng = np.random.default_rng(1)
    ids = {row: rng.integers(0, 131, 41) for row in range(1, 6)}  # long enough for the factors of phi3_partial
    adapter_of = {1: 1, 2: 0, 3: 2, 4: 1, 5: 2}
    expected = {row: reference_logits(models[adapter_of[row]], tokens.tolist()) for row, tokens in ids.items()}

    def check(order):
        for index, row in enumerate(order):
            found = driver.logits[-1][index]
            assert relative_error(found, expected[row][driver.lens[row] - 1]) < 1e-4, row
            assert int(found.argmax()) == int(expected[row][driver.lens[row] - 1].argmax())

    new = [driver.add(row, adapter=adapter_of[row]) for row in ids]
    driver.extend({2: ids[2][:19], 1: ids[1][:20], 3: ids[3][:5], 4: ids[4][:29]}, new_rows=new)
    check([2, 1, 3, 4])
    driver.runner.future_tokens[1] = int(ids[1][20])
    driver.extend({1: None, 5: ids[5][:7], 3: ids[3][5:13], 2: ids[2][19:39]}, sampled=[True, True, False, True])
    check([1, 5, 2])
    driver.decode([3, 5, 1, 2, 4], [int(ids[row][driver.lens[row]]) for row in (3, 5, 1, 2, 4)])
    check([3, 5, 1, 2, 4])


def test_hidden_states_and_scores_of_prompts_are_those_of_merged_weights(tmp_path):
    model = make_model("qwen3")
    driver = make_driver(save(model, tmp_path / "model"))
    driver.runner.load_adapter(2, save_adapter(tmp_path / "adapter", model))
    expected = make_driver(save(merged(model, tmp_path / "adapter"), tmp_path / "merged"), lora=None)
    ids = np.random.default_rng(1).integers(0, 131, 12).astype(np.int32)

    def run(driver, adapters):
        outputs, run_step = [], driver._run

        def with_extras(step):
            step.hidden_states = [HiddenRange(1, 4), HiddenRange(8, 4)]
            step.hidden_sums = [HiddenSum(3, 6)]
            step.prompt_scores = [PromptScore(1, 2, ids[3:6])]
            launched = driver.runner.launch(step)
            launched.sample()
            outputs.append(launched.wait())

        driver._run = with_extras
        new = [driver.add(row, adapter=adapters[row]) for row in (1, 2)]
        new = [replace(new_row, logprobs=LogprobOptions()) for new_row in new]
        driver.extend({1: ids[:8], 2: ids[8:]}, new_rows=new)
        driver._run = run_step
        return outputs[0]

    found, wanted = run(driver, {1: 2, 2: 2}), run(expected, {1: 0, 2: 0})
    for pair in zip(found.hidden_states, wanted.hidden_states, strict=True):
        assert relative_error(*map(torch.from_numpy, pair)) < 1e-4
    sums = [torch.from_numpy(output.hidden_sums[0]) for output in (found, wanted)]
    assert relative_error(*sums) < 1e-4
    scores = [
        torch.from_numpy(np.frombuffer(output.prompt_logprobs[0].own, np.float32).copy()) for output in (found, wanted)
    ]
    assert relative_error(*scores) < 1e-4
    plain = run(make_driver(tmp_path / "model", lora=None), {1: 0, 2: 0})
    assert relative_error(torch.from_numpy(plain.hidden_states[1]), torch.from_numpy(found.hidden_states[1])) > 0.01


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("llama", "llama"),
        ("phi3_partial", "phi3"),
        ("gemma3_default", "gemma3"),
        ("smollm3_default", "smollm3"),
        ("lfm2", "lfm2"),
        ("lfm2_moe", "lfm2moe"),
    ],
)
def test_adapters_of_gguf_files(name, arch, tmp_path):
    """These files have other orders of rows, other norms and other names. Adapters are those of the model before."""
    model = make_model(name)
    options = {"dtype": "float32", "max_running_requests": 2, "max_total_tokens": 100}
    driver = RunnerDriver(
        make_runner(load_model_config(write_gguf(tmp_path / "m.gguf", model, arch)), LoraSize(1, 4), **options)
    )
    driver.runner.load_adapter(1, save_adapter(tmp_path / "adapter", model))
    ids = np.random.default_rng(1).integers(0, 131, 45)
    expected = reference_logits(merged(model, tmp_path / "adapter"), ids.tolist())
    for position, logits in driver.logits_along(1, ids, [30, 10], adapter=1).items():
        assert relative_error(logits, expected[position]) < 1e-4


@pytest.mark.skipif(cpu_extension.load() is None, reason="only compiled layers have packed weights")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_servers_with_and_without_adapters_share_a_cache_of_weights(dtype, tmp_path):
    folder, cache = save(make_model("llama"), tmp_path / "model"), tmp_path / "cache"
    found = []
    for lora in (None, SIZE, SIZE, None):
        driver = make_driver(folder, lora=lora, weight_cache=str(cache), dtype=dtype)
        found.append(torch.stack(list(driver.logits_along(1, list(range(30)), [20]).values())))
        assert torch.equal(found[-1], found[0])
    assert len(list(cache.glob("*.packed"))) == 1


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_pool_gets_the_memory_that_the_tables_leave(backend, monkeypatch):
    """The tables are empty at the start, so the machine still counts their memory as free."""
    monkeypatch.setattr("tercet.model_executor.runner.load.host_memory", lambda: Memory(1 << 28, 1 << 27))
    options = {"dtype": "float32", "max_running_requests": 4, "attention_backend": backend, "mem_fraction_static": 0.9}
    sizes = [LoraSize(1, 16), LoraSize(200, 16)]
    plain, small, large = (make_runner(CONFIG, lora, **options) for lora in (None, *sizes))
    assert plain.num_bytes.weights < small.num_bytes.weights
    taken = large.num_bytes.weights - small.num_bytes.weights
    assert taken >= 199 * sum(
        4 * 16 * (len(shape.rows) * shape.columns + sum(shape.rows)) for shape in lora_shapes(CONFIG).values()
    )
    freed = (small.max_total_num_tokens - large.max_total_num_tokens) * 2 * 2 * 2 * 16 * 4
    assert abs(freed - taken) < 1 << 20
    with pytest.raises(ValueError, match=r"the tables of LoRA adapters need .* lower --max-loras"):
        make_runner(CONFIG, LoraSize(1000, 16), **options)


@pytest.mark.parametrize("num_slots", [10**12, 2**62])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_tables_that_no_machine_has_memory_for_are_refused(backend, num_slots):
    with pytest.raises(ValueError, match=f"no memory for {num_slots} LoRA adapters of rank 16; lower --max-loras"):
        make_runner(CONFIG, LoraSize(num_slots, 16), attention_backend=backend, max_running_requests=4)


def test_without_adapters_a_step_has_none():
    driver = RunnerDriver(make_runner(CONFIG, max_total_tokens=100, max_running_requests=2))
    assert driver.runner.adapters is None
    seen = []
    forward = driver.runner.model.transform
    driver.runner.model.transform = lambda x, rotations, batch: seen.append(batch) or forward(x, rotations, batch)
    driver.runner._recorded = None
    driver.extend({1: [5, 6]}, new_rows=[driver.add(1)])
    driver.decode([1])
    assert [(batch.adapters, batch.sampled_adapters) for batch in seen] == [(None, None)] * 2


def test_the_families_of_adapters_are_all_families():
    def kind(name):
        return CONFIGS[name]().model_type

    assert {kind(name) for name in KINDS} == {kind(name) for name in CONFIGS}

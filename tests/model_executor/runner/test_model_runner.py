from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from runner_driver import RunnerDriver, relative_error
from runners import make_runner
from tiny_configs import CONFIGS
from tiny_models import make_model, save
from toy_runner import TOY, make_toy_runner

from tercet.model_executor import cpu_extension
from tercet.model_executor.device.memory import Memory
from tercet.model_executor.models.family import family_of
from tercet.model_executor.runner import load
from tercet.model_executor.runner.kv_budget import DEFAULT_CPU_SHARE
from tercet.model_executor.runner.settings import resolve_device
from tercet.model_executor.step import (
    HIDDEN_UNIT,
    ForwardMode,
    HiddenRange,
    HiddenSum,
    NewRow,
    PromptScore,
    StepInputs,
)
from tercet.srt.logprobs import LogprobOptions
from tercet.srt.model_files.families import FAMILIES
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.rope_config import FrequencyDivisors, RopeConfig
from tercet.srt.sampling_params import SamplingParams


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_has_a_model(architecture):
    config = dataclasses.replace(TOY, architecture=architecture)
    family = family_of(config)
    assert len(family.attention(config)) == config.num_layers
    assert all(math.prod(parameter.shape) for parameter in family.parameters(config))


def test_facts():
    runner = make_toy_runner(max_total_tokens=130, page_size=16)
    assert runner.max_total_num_tokens == 128 and runner.kv_pool.size == 128
    assert runner.num_bytes.kv_pool == 128 * 2 * 2 * 2 * 8 * 4
    assert runner.num_bytes.weights == sum(
        4 * n for n in (99 * 32, 32, *2 * (32, 32, 64 * 32, 32 * 32, 96 * 32, 32 * 48))
    )
    assert runner.settings.context_len == 64 and make_toy_runner(context_length=32).settings.context_len == 32
    assert runner.settings.attention_backend == ("cpu" if cpu_extension.load() else "torch")
    assert runner.settings.device == torch.device("cpu")


def test_a_pool_on_a_cpu_leaves_room_for_weights_and_steps(monkeypatch):
    def host(available):
        monkeypatch.setattr(load, "host_memory", lambda: Memory(available, available))

    runner = make_toy_runner()
    weight_bytes, bytes_per_token = runner.num_bytes.weights, 2 * 2 * 2 * 8 * 4
    reserve = load._RunnerBuilder(runner.settings, TOY).cpu_reserve(Memory(1 << 40, 1 << 40))
    beside_weights = 2 * reserve + 4096 * bytes_per_token
    host(weight_bytes + beside_weights)
    share = int(beside_weights * DEFAULT_CPU_SHARE) // bytes_per_token
    assert make_toy_runner(max_total_tokens=None).max_total_num_tokens == share
    # The largest step comes first, whatever is asked for. A hundredth token is the dummy.
    host(weight_bytes + reserve + 100 * bytes_per_token)
    assert make_toy_runner(max_total_tokens=None, mem_fraction_static=0.999).max_total_num_tokens == 99
    with pytest.raises(ValueError, match="--max-total-tokens 100 needs"):
        make_toy_runner(max_total_tokens=100)
    host(weight_bytes)
    with pytest.raises(ValueError, match="not enough memory for a KV pool"):
        make_toy_runner(max_total_tokens=None)


def test_random_weights_that_do_not_fit_are_not_made(monkeypatch):
    num_bytes = make_toy_runner().num_bytes.weights
    monkeypatch.setattr(load, "host_memory", lambda: Memory(num_bytes, num_bytes - 1))
    monkeypatch.setattr(load, "load_parameters", None)
    with pytest.raises(ValueError, match=r"not enough memory for random weights: they take 0\.00 GiB"):
        make_toy_runner()


@pytest.mark.parametrize("name", ["mistral_window", "qwen3"])
def test_dummy_weights_of_a_bare_config(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]().to_dict() | {"architectures": None}))
    config = load_model_config(tmp_path / "config.json", "dummy")
    runs = []
    for seed in (0, 0, 1):
        driver = RunnerDriver(make_toy_runner(config, dtype="bfloat16", random_seed=seed))
        tokens = [driver.extend({1: [5, 6, 7]}, new_rows=[driver.add(1)])[0]]
        tokens += [driver.decode([1])[0] for _ in range(10)]
        assert all(0 <= token < 131 for token in tokens)
        runs.append(driver.logits[0])
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_a_row_with_invalid_logits_is_told_and_does_not_stop_the_others():
    driver = RunnerDriver(make_toy_runner())
    new = [driver.add(1), driver.add(2)]
    driver.extend({1: [5, 6], 2: [7, 8, 9]}, new_rows=new)
    driver.runner.kv_pool.k_buffer[0][int(driver.table[2, 0])] = float("nan")
    tokens = driver.decode([1, 2])
    assert tokens[1] == -1 and tokens[0] >= 0
    assert int(driver.runner.future_tokens[2]) == 0  # a valid id, should the row run on
    tokens = driver.decode([1, 2])
    assert tokens[1] == -1 and tokens[0] >= 0


def test_seeded_sampling_does_not_depend_on_the_batch():
    sampling = SamplingParams(temperature=1.0, top_p=0.9, top_k=20)

    def run(others):
        driver = RunnerDriver(make_toy_runner(max_total_tokens=256), seed=len(others))
        new = [driver.add(row, sampling) for row in (*others, 3)]
        ids = {row: list(range(10, 10 + length)) for row, length in others.items()} | {3: [4, 5, 6]}
        tokens = [driver.extend(ids, new_rows=new)[-1]]
        return tokens + [driver.decode(list(ids))[-1] for _ in range(12)]

    assert run({}) == run({1: 30, 4: 2}) == run({2: 3})


@pytest.mark.parametrize(
    "odd", [{"intermediate_size": 47}, {"hidden_size": 33}, {"hidden_size": 33, "tie_word_embeddings": False}]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_odd_widths_are_served(odd, dtype):
    """Compiled linear layers take whole words of 32 bits, which is two numbers of these types."""
    config = dataclasses.replace(TOY, **odd)
    plain, driver = (
        RunnerDriver(make_toy_runner(config, dtype=dtype, attention_backend=name)) for name in ("torch", "auto")
    )
    for one in (plain, driver):
        one.extend({1: list(range(20))}, new_rows=[one.add(1)])
        one.decode([1], [5])
    assert relative_error(torch.cat(driver.logits), torch.cat(plain.logits)) < 0.05


def test_a_row_can_be_reused():
    driver = RunnerDriver(make_toy_runner())
    first = driver.extend({1: [5, 6, 7]}, new_rows=[driver.add(1)])[0]
    driver.decode([1])
    driver.extend({1: [50, 51]}, new_rows=[driver.add(1)])
    assert driver.extend({1: [5, 6, 7]}, new_rows=[driver.add(1)])[0] == first


def test_settings_that_do_not_fit():
    with pytest.raises(ValueError, match="--max-total-tokens"):
        make_toy_runner(max_total_tokens=1 << 40)
    with pytest.raises(ValueError, match="dtype"):
        make_toy_runner(dtype="float8")
    with pytest.raises(ValueError, match="attention backend"):
        make_toy_runner(attention_backend="flash")
    with pytest.raises(ValueError, match="device"):
        resolve_device("meta")
    if not torch.cuda.is_available():
        assert resolve_device("auto").type == "cpu"
        with pytest.raises(ValueError, match="needs a GPU"):
            resolve_device("cuda")


def test_triton_without_a_gpu_is_refused_before_a_request_comes():
    with pytest.raises(ValueError, match="--attention-backend triton needs a GPU, but the device is cpu"):
        make_toy_runner(attention_backend="triton")


def test_a_table_that_does_not_fit_names_the_flags(monkeypatch):
    for name in ("load_parameters", "Sampler"):  # they take long, or memory for each row
        monkeypatch.delattr(load, name)
    with pytest.raises(ValueError, match="--max-running-requests 1099511627776 times --context-length 64"):
        make_toy_runner(max_running_requests=1 << 40)  # 256 TiB: more than a process can address


def test_frequency_divisors_change_the_rotation():
    plain, divided = (
        RunnerDriver(make_toy_runner(dataclasses.replace(TOY, rope=rope)))
        for rope in (RopeConfig(), RopeConfig(10000.0, FrequencyDivisors((1.0, 2.0, 3.0, 4.0))))
    )
    for driver in (plain, divided):
        driver.extend({1: list(range(30))}, new_rows=[driver.add(1)])
    assert not torch.equal(plain.logits[0], divided.logits[0])


def test_a_token_that_is_wanted_twice_is_computed_once():
    """Log probabilities and hidden states of the same tokens. Memory is measured for each token once."""
    ids = np.arange(1, 41, dtype=np.int32)
    scores, states = [PromptScore(1, 0, ids[1:])], [HiddenRange(0, 40)]

    def outputs(**wanted):
        runner = make_toy_runner()
        transform, computed = runner.model.transform, []

        def noted(x, rotation, batch):
            computed.append(batch.logits_indices.tolist())
            return transform(x, rotation, batch)

        runner.model.transform = noted
        new_row = NewRow(1, SamplingParams(temperature=0.0), 0, ids, ids[:0], (), LogprobOptions(logprob_start_len=0))
        step = StepInputs(
            ForwardMode.EXTEND, ids[:1], ids[-1:], ids, [new_row], extend_lens=ids[-1:], input_ids=ids,
            sampled=np.array([True]), **wanted,
        )  # fmt: skip
        launched = runner.launch(step)
        launched.sample()
        return computed, launched.wait()

    computed, both = outputs(prompt_scores=scores, hidden_states=states)
    assert computed == [list(range(40))]
    _, scored = outputs(prompt_scores=scores)
    _, shown = outputs(hidden_states=states)
    assert both.prompt_logprobs == scored.prompt_logprobs and both.tokens == scored.tokens == shown.tokens
    assert np.array_equal(both.hidden_states[0], shown.hidden_states[0])


def test_hidden_states_are_not_divided_as_logits_are(tmp_path):
    """The norm before the logits of Granite has the divisor in its weights."""
    model = make_model("granite")
    runner = make_runner(load_model_config(save(model, tmp_path)), dtype="float32", max_total_tokens=100)
    ids = np.arange(1, 21, dtype=np.int32)
    new_row = NewRow(1, SamplingParams(temperature=0.0), 0, ids, ids[:0], ())
    step = StepInputs(
        ForwardMode.EXTEND, ids[:1], ids[-1:], ids, [new_row], extend_lens=ids[-1:], input_ids=ids,
        sampled=np.array([True]), hidden_states=[HiddenRange(0, 20)], hidden_sums=[HiddenSum(0, 20)],
    )  # fmt: skip
    launched = runner.launch(step)
    launched.sample()
    found = launched.wait()
    expected = model.model(torch.tensor([ids.tolist()])).last_hidden_state[0].detach()
    assert relative_error(torch.from_numpy(found.hidden_states[0]), expected) < 1e-4
    sums = torch.from_numpy(found.hidden_sums[0]) * HIDDEN_UNIT
    assert relative_error(sums, expected.double().sum(0)) < 1e-4

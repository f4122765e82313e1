"""What is kept free for steps of a CPU, against what torch takes while they run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from backend_steps import Row, make_batch, with_caps, with_sinks
from cpu_models import CONFIG
from gemma4_layers import like_gemma4
from lora_adapters import save_for_config
from patience import PATIENCE_S
from peak_memory import peak_bytes
from runner_driver import RunnerDriver
from runners import make_runner, make_settings
from some_cases import crossed

from tercet.mem_cache.token_to_kv_pool import TokenToKVPool
from tercet.model_executor import cpu_extension
from tercet.model_executor.attention import torch_backend
from tercet.model_executor.device.memory import Memory
from tercet.model_executor.layers.lora_layers import LoraSize
from tercet.model_executor.models.family import family_of
from tercet.model_executor.runner import load, step_memory
from tercet.model_executor.runner.step_memory import (
    activation_bytes,
    bytes_in_steps,
    gather_bytes,
    recurrence_bytes,
    saved_split_bytes,
)
from tercet.model_executor.runner.warmup import warmup_steps
from tercet.srt.model_files.delta_net_config import DeltaNetConfig
from tercet.srt.model_files.experts_config import ClampedGate, ExpertsConfig, SharedExpert
from tercet.srt.model_files.latent_config import LatentConfig
from tercet.srt.model_files.short_convolutions import ShortConvolutions

TOKENS, ROWS, CONTEXT = 2048, 8, 320
EXPERTS = ExpertsConfig(num_experts=64, num_experts_per_token=8, intermediate_size=32, normalized=True)
GEMMA = {
    "output_norms": True,
    "norm_offset": 1.0,
    "embedding_scale": 8.0,
    "hidden_act": "gelu_tanh",
    "qk_norm": "heads",
    "layer_ropes": (CONFIG.rope, replace(CONFIG.rope, theta=500.0)),
}
LATENT = LatentConfig(latent_dim=128, nope_dim=32, rope_dim=32, value_dim=64, query_rank=96)


def with_latent(latent, num_heads):
    return {
        "architecture": "YoutuForCausalLM", "latent": latent, "num_heads": num_heads, "num_kv_heads": 1,
        "head_dim": latent.key_dim, "qk_norm": None, "sliding_windows": (),
    }  # fmt: skip


def with_convolutions(**sizes):
    config = replace(CONFIG, **sizes)
    convolutions = ShortConvolutions((0, 2), config.hidden_size, 3, has_bias=True)
    return sizes | {
        "architecture": "Lfm2ForCausalLM", "num_layers": 4, "sliding_windows": (), "convolutions": convolutions,
    }  # fmt: skip


def with_delta_net(**sizes):
    delta_net = DeltaNetConfig((0, 2), 4, 8, 32, 32, 4)
    return sizes | {
        "architecture": "Qwen3_5ForCausalLM", "num_layers": 4, "sliding_windows": (), "delta_net": delta_net,
        "attention_gates": "components",
    }  # fmt: skip


OLMO = {"input_norms": False, "output_norms": True, "qk_norm": "rows"}
SHAPES = {
    "usual": {},
    "wide": {"hidden_size": 512, "intermediate_size": 128},
    "deep": {"hidden_size": 64, "intermediate_size": 1024},
    "heads": {"num_heads": 16, "num_kv_heads": 8, "head_dim": 32},
    "vocabulary": {"vocab_size": 100_000},
    "experts": {"experts": EXPERTS},
    "many experts": {"experts": replace(EXPERTS, num_experts_per_token=32, intermediate_size=96)},
    "clamped experts": {"experts": replace(EXPERTS, gate=ClampedGate(1.702, 7.0), has_biases=True)},
    "wide experts": {"experts": replace(EXPERTS, num_experts=3, num_experts_per_token=3, intermediate_size=512)},
    "experts with sigmoids": {"experts": replace(EXPERTS, has_sigmoids=True, has_corrections=True, scale=2.5)},
    "groups of experts": {"experts": replace(EXPERTS, num_experts=512, num_groups=8, groups_per_token=6)},
    "experts with a float32 router": {"experts": replace(EXPERTS, has_corrections=True, float32_router=True)},
    "shared expert": {"experts": replace(EXPERTS, shared=SharedExpert(512, has_gate=True))},
    "shared expert without a gate": {"experts": replace(EXPERTS, shared=SharedExpert(512, has_gate=False))},
    "latents": with_latent(LATENT, 8),
    "latents without those of queries": with_latent(LATENT._replace(query_rank=None), 8),
    "latents of wide queries": with_latent(LATENT._replace(query_rank=4096), 1),
    "short latents": with_latent(LatentConfig(32, 224, 32, 256), 8),
    "convolutions": with_convolutions(),
    "wide convolutions": with_convolutions(hidden_size=1024, num_heads=4, intermediate_size=64),
    "gates of heads": with_convolutions(num_heads=32, num_kv_heads=8)
    | {"attention_gates": "heads", "output_norms": True},
    "recurrent": with_delta_net(),
    "gates of components": with_delta_net(num_heads=32, num_kv_heads=8),
    "gemma": GEMMA,
    "wide gemma": GEMMA | {"hidden_size": 512, "intermediate_size": 128},
    "olmo": OLMO,
    "heads of olmo": OLMO | {"num_heads": 16, "num_kv_heads": 8, "head_dim": 32},
    "gemma 4": like_gemma4(CONFIG),
    "wide inputs of layers": like_gemma4(CONFIG, input_dim=512),
    "heads of gemma": GEMMA | {"num_heads": 16, "num_kv_heads": 8, "head_dim": 32},
}

NUMBERS = [("float32", None), ("bfloat16", None), ("float16", None), ("bfloat16", "int8")]
"""Types of numbers, and quantizations."""


def measured_and_kept(runner, step, *, quantized, lora=None):
    """The bytes that a step takes at its peak, and those that are kept for it."""

    def run():
        launched = runner.launch(step)
        launched.sample()
        launched.wait()

    run()  # what is made once and kept
    measured = peak_bytes(run)
    kept = activation_bytes(
        runner.config,
        runner.settings.dtype,
        tokens=int(step.extend_lens.sum()),
        rows=ROWS,
        compiled=runner.model.compiled,
        quantized=quantized,
        widened=runner.settings.widens_activations,
        lora=lora,
    )
    if runner.config.delta_net is not None and not runner.model.compiled:
        kept += recurrence_bytes(runner.config.delta_net, rows=len(step.rows))
    return measured, kept + runner.sampler.max_choice_bytes(ROWS)


@pytest.mark.usefixtures("each_cpu_choice")
@pytest.mark.parametrize(("shape", "numbers"), crossed(list(SHAPES), NUMBERS, each=2))
def test_the_largest_step_takes_what_is_kept_for_it(shape, numbers):
    dtype, quantization = numbers
    if quantization is not None and cpu_extension.load() is None:
        pytest.skip("only compiled operations compute with such weights")
    config = replace(CONFIG, **SHAPES[shape])
    runner = make_runner(
        config, dtype=dtype, quantization=quantization, max_running_requests=ROWS, max_total_tokens=4096
    )
    largest = warmup_steps(ROWS, CONTEXT, TOKENS)[0]

    measured, kept = measured_and_kept(runner, largest, quantized=quantization is not None)
    assert measured <= kept <= (2.25 if runner.model.compiled else 6) * measured


@pytest.mark.usefixtures("each_cpu_choice")
@pytest.mark.parametrize(("shape", "numbers"), crossed(["deep", "heads", "gemma", "usual"], NUMBERS, each=1))
def test_the_largest_step_with_adapters_takes_what_is_kept_for_it(shape, numbers, tmp_path):
    dtype, quantization = numbers
    if quantization is not None and cpu_extension.load() is None:
        pytest.skip("only compiled operations compute with such weights")
    config, lora = replace(CONFIG, **SHAPES[shape]), LoraSize(2, 32)
    runner = make_runner(
        config, lora, dtype=dtype, quantization=quantization, max_running_requests=ROWS, max_total_tokens=4096
    )
    runner.load_adapter(1, save_for_config(tmp_path, config, rank=32))
    largest = warmup_steps(ROWS, CONTEXT, TOKENS)[0]
    largest = replace(largest, new_rows=[replace(new_row, adapter=1) for new_row in largest.new_rows])

    measured, kept = measured_and_kept(runner, largest, quantized=quantization is not None, lora=lora)
    assert measured <= kept <= (3 if runner.model.compiled else 9) * measured


@pytest.mark.parametrize("windows", [(None, None), (None, 70)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_torch_backend_gathers_is_kept_for_it(dtype, windows):
    """Decodes of long contexts, equal and not, and a chunk on a long prefix."""
    rows, context, chunk = 8, 320, 64
    config = replace(CONFIG, sliding_windows=windows)
    runner = make_runner(
        config, dtype=dtype, attention_backend="torch", max_running_requests=rows, max_total_tokens=4096
    )
    sizes = {"tokens": rows * chunk, "rows": rows}
    gathers = gather_bytes(config, runner.settings.dtype, chunk=chunk, longest=context, **sizes)
    driver = RunnerDriver(runner)
    driver.extend(
        {row: [5] * (240 + row) for row in range(1, rows + 1)}, new_rows=[driver.add(row) for row in range(1, rows + 1)]
    )
    steps = {
        "decode": (rows, lambda: driver.decode(range(1, rows + 1))),
        "chunks": (rows * chunk, lambda: driver.extend({row: [6] * chunk for row in range(1, rows + 1)})),
    }
    for name, (tokens, run) in steps.items():
        kept = activation_bytes(config, runner.settings.dtype, tokens=tokens, rows=rows, compiled=runner.model.compiled)
        kept += runner.sampler.max_choice_bytes(rows) + rows * config.vocab_size * 4  # the driver copies the logits
        measured = peak_bytes(run)
        assert measured <= kept + gathers, name
        if name == "decode":
            assert measured > kept, "the gathered keys and values are most of it"
            assert gathers < 4 * measured


@pytest.mark.parametrize("windows", [(None,), (70,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_sinks_and_soft_caps_take_on_torch_is_kept_for_them(dtype, windows, monkeypatch):
    rows, context, chunk = 8, 320, 64
    monkeypatch.setattr(torch_backend, "_MAX_SCORES", 1 << 17)  # chunks of queries have more
    config = replace(CONFIG, num_layers=1, sliding_windows=windows)
    sinks = torch.zeros(config.num_heads)
    specs = with_caps(with_sinks(family_of(config).attention(config), [sinks]), [5.0])
    pool = TokenToKVPool(4096, 1, 1, config.num_kv_heads, config.head_dim, dtype, "cpu")
    backend = torch_backend.TorchAttentionBackend(specs, pool)
    table = torch.arange(rows * context, dtype=torch.int32).view(rows, context)
    requests = [Row(row, context - row) for row in range(rows)]
    kept = gather_bytes(config, dtype, tokens=rows * chunk, chunk=chunk, rows=rows, longest=context)
    kept += bytes_in_steps(config, chunk=chunk, rows=rows, longest=context)
    for num_new in (1, chunk):
        batch = make_batch(requests, [num_new] * rows, table, decode=num_new == 1)
        q = torch.zeros(rows * num_new, config.num_heads, config.head_dim, dtype=dtype)

        def run(q=q, batch=batch):
            backend.plan(batch)
            backend.attend(q, 0, batch, sinks)

        measured = peak_bytes(run)
        assert measured <= kept + 2 * q.nbytes  # the output, and that of a chunk
        assert windows[0] is not None or kept < 4 * measured


def test_a_server_on_torch_keeps_room_for_sinks_and_soft_caps(monkeypatch):
    def reserve(**changes):
        def attention(config):
            return [replace(spec, **changes) for spec in family_of(config).attention(config)]

        family = replace(family_of(CONFIG), attention=attention)
        monkeypatch.setattr(step_memory, "family_of", lambda config: family)
        settings = make_settings(CONFIG, dtype="float32", attention_backend="torch", max_running_requests=4)
        return load._RunnerBuilder(settings, CONFIG).cpu_reserve(Memory(1 << 40, 1 << 40))

    assert reserve(has_sinks=True) - reserve() > 4 * torch_backend._MAX_SCORES
    assert reserve(soft_cap=50.0) == reserve(has_sinks=True)


def test_no_rectangle_is_larger_than_what_is_kept(monkeypatch):
    monkeypatch.setattr(torch_backend, "_MAX_RECTANGLE", 100)
    assert torch_backend.gathered_tokens(8, 30) == 100 and torch_backend.gathered_tokens(8, 300) == 300
    lengths = np.array([30, 31, 29, 300, 30, 7, 30, 300, 8], np.int32)
    groups = torch_backend._similar_lengths(lengths)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    assert all(len(group) == 1 or len(group) * lengths[group].max() <= 100 for group in groups)


def test_a_server_on_torch_keeps_room_for_what_it_gathers():
    def reserve(backend, **changes):
        settings = make_settings(CONFIG, **({"dtype": "float32", "attention_backend": backend} | changes))
        return load._RunnerBuilder(settings, CONFIG).cpu_reserve(Memory(1 << 40, 1 << 40))

    few, many = (reserve("torch", max_running_requests=n) for n in (1, 64))
    kv_bytes = 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 4
    assert many - few > 63 * CONFIG.context_len * kv_bytes


def test_a_long_context_is_kept_room_for_its_rotations():
    """No more than the pool could use: a million positions take half a gigabyte with heads of 128."""

    def reserve(context_len, **limits):
        config = replace(CONFIG, context_len=context_len, load_format="dummy")
        settings = make_settings(config, max_running_requests=2, dtype="float32", **limits)
        if settings.attention_backend != "cpu":
            return None
        return load._RunnerBuilder(settings, config).cpu_reserve(Memory(1 << 40, 1 << 40))

    def splits(context_len):
        return saved_split_bytes(CONFIG, rows=2, longest=context_len)

    short, long = reserve(1000), reserve(101_000)
    assert short is None or long - short == 100_000 * CONFIG.head_dim * 4 + splits(101_000) - splits(1000)
    assert short == reserve(101_000, max_total_tokens=1000)


@pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured in /proc")
def test_the_results_of_shared_splits_take_what_is_kept_for_them():
    """Requests that share a long prefix, as in a batch of questions about one document.

    In a process of its own, because others keep freed memory.
    """
    done = subprocess.run([sys.executable, "-c", SHARED_SPLITS], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    kept = saved_split_bytes(replace(CONFIG, num_heads=32, head_dim=64), rows=96, longest=16_385)
    assert 0.8 * kept < int(done.stdout) < 1.1 * kept


SHARED_SPLITS = """
import torch
from tercet.model_executor import cpu_extension

cpu_extension.load()
torch.set_num_threads(2)
cpu_extension.take_threads()
rows, shared, heads, dim = 96, 16_384, 32, 64
pools, q = torch.randn(2, shared + rows, 1, dim), torch.randn(rows, heads, dim)
table = torch.arange(shared + 1, dtype=torch.int32).repeat(rows, 1)
table[:, shared] += torch.arange(rows, dtype=torch.int32)

def attend(rows, length):
    numbers = torch.arange(rows), torch.full((rows,), length)
    torch.ops.tercet_cpu.attention(q[:rows], *pools, table, *numbers, None, None, 1.0)

def resident(name):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) << 10

attend(1, 1)
before = resident("VmRSS:")
attend(rows, shared + 1)
print(resident("VmHWM:") - before)  # ru_maxrss has the peak of the process before exec, too
"""


def test_float32_is_the_widest():
    kinds = {"tokens": 10, "rows": 1, "compiled": True}
    assert activation_bytes(CONFIG, torch.float32, **kinds) > activation_bytes(CONFIG, torch.bfloat16, **kinds)


def test_widened_activations_are_kept_room_for():
    kinds = {"tokens": 10, "rows": 1, "compiled": True}
    widest = max(CONFIG.hidden_size, CONFIG.num_heads * CONFIG.head_dim, CONFIG.intermediate_size)
    widened, native = (activation_bytes(CONFIG, torch.bfloat16, widened=kind, **kinds) for kind in (True, False))
    assert widened - native == 10 * widest * 4

"""What is kept free for steps of a CPU, against what torch takes while they run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_models import CONFIG
from peak_memory import peak_bytes
from runners import make_runner, make_settings

from tercet.model_executor import cpu_extension
from tercet.model_executor.device.memory import Memory
from tercet.model_executor.runner import load
from tercet.model_executor.runner.step_memory import activation_bytes
from tercet.model_executor.runner.warmup import warmup_steps

TOKENS, ROWS, CONTEXT = 2048, 8, 320
SHAPES = {
    "usual": {},
    "wide": {"hidden_size": 512, "intermediate_size": 128},
    "deep": {"hidden_size": 64, "intermediate_size": 1024},
    "heads": {"num_heads": 16, "num_kv_heads": 8, "head_dim": 32},
    "vocabulary": {"vocab_size": 100_000},
}


@pytest.mark.usefixtures("each_cpu_choice")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", None), ("bfloat16", None), ("float16", None), ("bfloat16", "int8")]
)
def test_the_largest_step_takes_what_is_kept_for_it(shape, dtype, quantization):
    if quantization is not None and cpu_extension.load() is None:
        pytest.skip("only compiled operations compute with such weights")
    config = replace(CONFIG, **SHAPES[shape])
    runner = make_runner(
        config, dtype=dtype, quantization=quantization, max_running_requests=ROWS, max_total_tokens=4096
    )
    largest = warmup_steps(ROWS, CONTEXT, TOKENS)[0]

    def run():
        step = runner.launch(largest)
        step.sample()
        step.wait()

    run()  # what is made once and kept
    measured = peak_bytes(run)
    kept = activation_bytes(
        config,
        runner.settings.dtype,
        tokens=int(largest.extend_lens.sum()),
        rows=ROWS,
        compiled=runner.model.compiled,
        quantized=quantization is not None,
    )
    kept += runner.sampler.max_choice_bytes
    assert measured <= kept <= (2 if runner.model.compiled else 6) * measured


def test_a_long_context_is_kept_room_for_its_rotations():
    """No more than the pool could use: a million positions take half a gigabyte with heads of 128."""

    def reserve(context_len):
        config = replace(CONFIG, context_len=context_len, load_format="dummy")
        settings = make_settings(config, max_running_requests=2, max_total_tokens=64, dtype="float32")
        if settings.attention_backend != "cpu":
            return None
        return load._RunnerBuilder(settings, config).cpu_reserve(Memory(1 << 40, 1 << 40))

    short, long = reserve(1000), reserve(101_000)
    assert short is None or long - short == 100_000 * CONFIG.head_dim * 4


def test_float32_is_the_widest():
    kinds = {"tokens": 10, "rows": 1, "compiled": True, "quantized": False}
    assert activation_bytes(CONFIG, torch.float32, **kinds) > activation_bytes(CONFIG, torch.bfloat16, **kinds)

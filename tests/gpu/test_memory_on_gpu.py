"""The memory of a runner on a real GPU. No other test may run beside it, because it takes nearly all memory."""

from __future__ import annotations

import pytest
import runners
import torch
from runner_driver import RunnerDriver

from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=256,
    intermediate_size=512,
    num_layers=64,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=4099,
    context_len=2048,
)
"""Its layers are those of test_runner_on_gpu.py, whose kernels are compiled already."""


def test_the_pool_leaves_room_for_the_largest_steps():
    """Sized by what is left, the runner does the largest prefill and decode without running out of memory."""
    runner = runners.make_runner(
        MODEL,
        device="cuda",
        dtype="bfloat16",
        page_size=None,
        max_running_requests=256,
        max_prefill_tokens=16384,
    )
    _, total = torch.cuda.mem_get_info()
    assert runner.num_bytes.kv_pool > 0.8 * (total - runner.num_bytes.weights)
    driver = RunnerDriver(runner)
    rows = list(range(1, 257))
    sampled = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.1)
    driver.extend({row: [row] * 64 for row in rows}, new_rows=[driver.add(row, sampled) for row in rows])
    driver.decode(rows)

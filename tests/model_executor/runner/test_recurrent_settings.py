from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_models import CONFIG
from runners import make_runner
from saved_prefixes import logits_of_continued_prefixes
from tiny_models import checkpoint

from tercet.model_executor.row_states import state_bytes
from tercet.model_executor.runner.kv_budget import check_states
from tercet.model_executor.runner.recurrent_settings import (
    gpu_bytes_of,
    resolve_rows,
    resolve_saved_states,
    states_of_settings,
)
from tercet.srt.model_files.delta_net_config import DeltaNetConfig
from tercet.srt.server_args import ServerArgs

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SMALL = DeltaNetConfig((0,), 2, 4, 16, 16, 4)
QWEN_9B = DeltaNetConfig(tuple(range(24)), 16, 32, 128, 128, 4)
ARGS = ServerArgs(model_path="A")


def settings_of(num_rows: int, num_saved: int | None) -> Any:
    return SimpleNamespace(max_running_requests=num_rows, max_saved_states=num_saved, dtype=torch.bfloat16, device=CPU)


@pytest.mark.parametrize(
    ("sizes", "device", "expected"),
    [
        (None, CPU, 256),
        (SMALL, CPU, 256),
        (QWEN_9B, CPU, 41),
        (QWEN_9B, GPU, 166),
        (QWEN_9B._replace(num_value_heads=1600), CPU, 8),
    ],
)
def test_the_default_number_of_requests(sizes: DeltaNetConfig | None, device: torch.device, expected: int) -> None:
    """The states of Qwen 3.5-9B take 49 MiB for each."""
    config = replace(CONFIG, delta_net=sizes, num_layers=32, sliding_windows=())
    assert resolve_rows(ARGS, config, torch.bfloat16, device) == expected
    assert resolve_rows(replace(ARGS, max_running_requests=1000), config, torch.bfloat16, device) == 1000


@pytest.mark.parametrize(("device", "expected"), [(CPU, 20), (GPU, 166)])
def test_the_default_number_of_saved_states(device: torch.device, expected: int) -> None:
    config = replace(CONFIG, delta_net=QWEN_9B, num_layers=32, sliding_windows=())
    assert resolve_saved_states(ARGS, config, torch.bfloat16, device) == expected
    assert resolve_saved_states(replace(ARGS, max_saved_states=5), config, torch.bfloat16, device) == 5
    assert resolve_saved_states(replace(ARGS, disable_radix_cache=True), config, torch.bfloat16, device) is None
    assert resolve_saved_states(ARGS, CONFIG, torch.bfloat16, device) is None


def test_states_are_made_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        states = states_of_settings(settings_of(3, 2), QWEN_9B)
    assert sum(tensor.nbytes for layer in states for tensor in layer) == 6 * state_bytes(QWEN_9B, 2)
    assert "take 49.1 MiB for each of at most 3 running requests and 2 saved prefixes" in caplog.text
    assert not any(tensor[-1].any() for layer in states[:2] for tensor in layer)


def test_states_take_at_most_a_tenth_of_a_small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=24 << 30))
    config = replace(CONFIG, delta_net=QWEN_9B, num_layers=32, sliding_windows=())
    assert gpu_bytes_of(CPU) is None
    assert resolve_rows(ARGS, config, torch.bfloat16, GPU, gpu_bytes_of(GPU)) == 50
    assert resolve_saved_states(ARGS, config, torch.bfloat16, GPU, gpu_bytes_of(GPU)) == 50


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_requests_continue_saved_prefixes(backend: str, tmp_path: Path) -> None:
    config = checkpoint(tmp_path / "model", "qwen3_5")
    limits = {"max_total_tokens": 100, "max_running_requests": 5, "max_saved_states": 2}
    runner = make_runner(config, dtype="float32", attention_backend=backend, **limits)
    continued, whole = logits_of_continued_prefixes(runner)
    if backend == "cpu":
        assert torch.equal(continued, whole)
    torch.testing.assert_close(continued, whole, rtol=1e-4, atol=1e-4)


def test_too_little_memory() -> None:
    with pytest.raises(
        ValueError,
        match=r"no memory for the states of --max-running-requests 10000000 and --max-saved-states 0, 49\.1 MiB each",
    ):
        states_of_settings(settings_of(10_000_000, None), QWEN_9B)
    with pytest.raises(ValueError, match=r"need 2\.00 GiB, but beside the weights only 1\.00 GiB are available"):
        check_states(2 << 30, 1 << 30)
    check_states(0, 0)

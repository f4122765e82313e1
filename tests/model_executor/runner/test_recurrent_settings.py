from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from cpu_models import CONFIG

from tercet.model_executor.row_states import state_bytes
from tercet.model_executor.runner.kv_budget import check_states
from tercet.model_executor.runner.recurrent_settings import resolve_rows, states_of_settings
from tercet.srt.model_files.delta_net_config import DeltaNetConfig
from tercet.srt.server_args import ServerArgs

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SMALL = DeltaNetConfig((0,), 2, 4, 16, 16, 4)
QWEN_9B = DeltaNetConfig(tuple(range(24)), 16, 32, 128, 128, 4)
ARGS = ServerArgs(model_path="A")


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"speculative_algorithm": "NGRAM"}, "cannot take back a draft"), ({"fuse_small_steps": True}, "has no kernels")],
)
def test_what_recurrent_layers_do_not_have(settings: dict[str, object], message: str) -> None:
    args = ServerArgs.from_dict({"model_path": "A", **settings})
    assert resolve_rows(args, CONFIG, torch.float32, CPU) == 256
    with pytest.raises(ValueError, match=message):
        resolve_rows(args, replace(CONFIG, delta_net=SMALL), torch.float32, CPU)


def test_states_are_made_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        states = states_of_settings(3, QWEN_9B, torch.bfloat16, CPU)
    assert sum(tensor.nbytes for layer in states for tensor in layer) == 4 * state_bytes(QWEN_9B, 2)
    assert "take 49.1 MiB for each of at most 3 running requests" in caplog.text
    assert not any(tensor[-1].any() for layer in states[:2] for tensor in layer)


def test_too_little_memory() -> None:
    with pytest.raises(
        ValueError, match=r"no memory for the states of --max-running-requests 10000000, 49\.1 MiB each"
    ):
        states_of_settings(10_000_000, QWEN_9B, torch.bfloat16, CPU)
    with pytest.raises(ValueError, match=r"need 2\.00 GiB, but beside the weights only 1\.00 GiB are available"):
        check_states(2 << 30, 1 << 30)
    check_states(0, 0)

"""Prints what the launches of a prefill layer cost the host, with Triton's own launches and with bound ones.

    .venv/bin/python tests/launch_times.py

A fake driver takes the launches, so a GPU's driver is not counted, and none is needed. The wrappers run on tensors of
the CPU. Each figure is the fastest of many short rounds, because other programs disturb the rest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
import triton
from fake_gpu_driver import fake_gpu

from tercet.model_executor.kernels import extend_attention, fp8_linear
from tercet.model_executor.kernels.activation import act_and_mul
from tercet.model_executor.kernels.bound import Bound
from tercet.model_executor.kernels.rmsnorm import rmsnorm
from tercet.model_executor.kernels.rotary import rotary
from tercet.model_executor.kernels.tuning import extend_tile
from tercet.model_executor.kernels.work_map import query_tile_map

TOKENS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER = 16, 2048, 32, 8, 64, 8192
"""A short prompt of Llama-3.2-1B."""
_ROUNDS, _CALLS = 300, 20


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def layer() -> dict[str, Callable[[], object]]:
    """The wrappers of a layer's kernels, called as serving does."""
    x, residual, norm, gate_up = zeros(TOKENS, WIDTH), zeros(TOKENS, WIDTH), zeros(WIDTH), zeros(TOKENS, 2 * INNER)
    qkv, pool = zeros(TOKENS, HEADS + 2 * KV_HEADS, HEAD_DIM), zeros(64, KV_HEADS, HEAD_DIM)
    angles = zeros(TOKENS, HEAD_DIM // 2, dtype=torch.float32)
    slots, rows, starts = torch.arange(TOKENS), torch.zeros(1, dtype=torch.int64), torch.tensor([0, TOKENS])
    table = zeros(4, 128, dtype=torch.int32)
    tile = extend_tile("sm_90", HEAD_DIM)
    work = query_tile_map(starts, HEADS // KV_HEADS, tile.block_m, TOKENS)
    q = qkv[:, :HEADS]
    out = zeros(TOKENS, HEADS, HEAD_DIM)
    weight, scales = zeros(WIDTH, WIDTH, dtype=torch.float8_e4m3fn), zeros(1, WIDTH, dtype=torch.float32)
    return {
        "rmsnorm, with residual": lambda: rmsnorm(x, norm, 1e-5, residual),
        "rotary, with store": lambda: rotary(
            qkv, HEADS, KV_HEADS, angles, angles, k_buffer=pool, v_buffer=pool, slots=slots
        ),
        "extend_attention": lambda: extend_attention.extend_attention(
            q, pool, pool, table, rows, starts, rows, work, out, longest=TOKENS, sm_scale=0.1, tile=tile
        ),
        "act_and_mul": lambda: act_and_mul(gate_up),
        "fp8_linear (2 launches)": lambda: fp8_linear.fp8_linear(x, weight, scales),
    }


def microseconds(call: Callable[[], object]) -> float:
    call()
    rounds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        rounds.append(time.perf_counter() - start)
    return min(rounds) / _CALLS * 1e6


def _nothing(*args: object, **kwargs: object) -> None:
    pass


def main() -> None:
    ways = {
        "Triton": lambda kernel, grid: kernel.jit[grid],
        "bound": Bound.__getitem__,
        "none": lambda kernel, grid: _nothing,
    }
    with (
        fake_gpu() as driver,
        patch.object(extend_attention, "arch_of", lambda device: "sm_90"),
        patch.object(fp8_linear, "arch_of", lambda device: "sm_90"),
    ):
        driver.utils.launch = _nothing
        calls = layer()
        sys.stdout.write(f"us of the host, Triton {triton.__version__}: wrapper with its launches\n")
        for name, call in calls.items():
            line = f"{name:26}"
            for way, launch in ways.items():
                with patch.object(Bound, "__getitem__", launch):
                    line += f"{way:>10} {microseconds(call):6.1f}"
            sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()

"""Compiles the kernels of models' servers into Triton's cache on disk, in several processes at once.

Triton compiles a kernel at its first launch, one after the other, and each takes seconds. Here each process makes the
warm-up steps of a server on tensors without values (tests/meta_runner.py), notes their launches, and compiles its share
of them as Triton would. Servers that start afterwards find the kernels in the cache.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

import pytest  # noqa: E402
import torch  # noqa: E402
from meta_runner import make_meta_runner  # noqa: E402
from triton.runtime import driver as drivers  # noqa: E402
from triton_aot import Launch, recorded, what_is_compiled  # noqa: E402

from tercet.benchmarks.presets import load_shape  # noqa: E402
from tercet.model_executor.attention import registry, triton_backend  # noqa: E402
from tercet.model_executor.kernels import (  # noqa: E402
    decode_attention,
    expert_choice,
    experts,
    extend_attention,
    fp8_linear,
    fused_decode,
    hopper_extend,
    latent_attention,
    lora,
    rotary,
    skinny_linear,
    tuning,
)
from tercet.model_executor.runner import kernel_flags  # noqa: E402

_FUSED, _DEPENDENT = "+fused", "+dependent"
"""Endings of a model: its server has --fuse-small-steps; it has --dependent-launch, too."""
_THAT_ASK_FOR_THE_DEVICE = (
    registry, triton_backend, decode_attention, expert_choice, experts, extend_attention, fp8_linear, fused_decode,
    latent_attention, lora, rotary, skinny_linear,
)  # fmt: skip


def main() -> int:
    """Returns the exit code: 1 if a kernel could not be compiled."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_compile.py", description=__doc__)
    parser.add_argument("models", nargs="+", help=f"presets or paths, each alone, with {_FUSED} or with {_DEPENDENT}")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="(default: one per core)")
    parser.add_argument("--share", type=int, help="compile only this share, in this process; counts from 0")
    parser.add_argument("--results", metavar="DIR", type=Path, help="folder of a file that says what was compiled")
    args = parser.parse_args()
    if args.processes < 1:
        parser.error(f"--processes must be at least 1, got {args.processes}")
    if args.share is not None:
        return compile_share(kernels_of(args.models), args.share, args.processes)
    began = time.monotonic()
    command = [sys.executable, __file__, *args.models, "--processes", str(args.processes)]
    shares = [subprocess.Popen([*command, "--share", str(share)]) for share in range(args.processes)]
    codes = [share.wait() for share in shares]
    line = f"{args.processes} processes compiled the kernels of {len(args.models)} servers in "
    line += f"{time.monotonic() - began:.0f} s."
    sys.stdout.write(line + "\n")
    if args.results is not None:
        args.results.mkdir(parents=True, exist_ok=True)
        (args.results / "compilation.md").write_text(f"# Compilation\n\n{line}\n", encoding="utf-8")
    return int(any(codes))


def kernels_of(models: list[str]) -> list[Launch]:
    """A launch of each kernel that a server of these models compiles when it starts, in a fixed order."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    arch = f"sm_{properties.major}{properties.minor}"
    found: dict[tuple[str, str, str], Launch] = {}
    with pytest.MonkeyPatch.context() as patch, as_if_on(arch, properties.multi_processor_count, patch):
        for model in models:
            name, dependent = model.removesuffix(_FUSED).removesuffix(_DEPENDENT), model.endswith(_DEPENDENT)
            if dependent and properties.major < 9:
                continue  # servers refuse it there
            for launch in warmup_launches(name, patch, fused=name != model, dependent=dependent):
                # Which launches share machine code does not depend on the architecture within the tests' targets.
                found.setdefault(what_is_compiled(launch, "sm_90"), launch)
    return list(found.values())


@contextlib.contextmanager
def as_if_on(arch: str, num_multiprocessors: int, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """A context in which tensors without values count as tensors of a GPU of this kind."""
    with patch.context() as inner:
        for module in _THAT_ASK_FOR_THE_DEVICE:
            inner.setattr(module, "arch_of", lambda device: arch)
        for module in (tuning, extend_attention, decode_attention, hopper_extend):
            inner.setattr(module, "num_multiprocessors", lambda device: num_multiprocessors)
        inner.setattr(kernel_flags, "_nvidia_capability", lambda device: (9, 0))
        yield


def warmup_launches(model: str, patch: pytest.MonkeyPatch, *, fused: bool, dependent: bool) -> list[Launch]:
    """The launches of Triton kernels while a server of the model starts. Few rows and tokens need the same kernels."""
    with recorded() as launches:
        make_meta_runner(
            patch, load_shape(model), attention=None, attention_backend="triton", disable_cuda_graph=True,
            page_size=None, max_running_requests=64, max_total_tokens=4096, max_prefill_tokens=512,
            fuse_small_steps=fused, dependent_launch=dependent,
        )  # fmt: skip
    return launches


def compile_share(kernels: list[Launch], share: int, num_shares: int) -> int:
    """Compile every `num_shares`-th kernel, and what launches it. Returns the exit code: 1 if one failed."""
    failed = 0
    for launch in kernels[share::num_shares]:
        try:
            compiled: Any = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.kwargs)
            drivers.active.launcher_cls(compiled.src, compiled.metadata)
        except Exception as error:  # a kernel that does not compile must not stop the others
            sys.stdout.write(f"{launch.kernel.fn.__name__}: {type(error).__name__}: {str(error)[:500]}\n")
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())

"""Dependent launches (programmatic dependent launch, sm_90 and later): a kernel starts before the one before it ends.

Between two kernels of a stream, a GPU first waits until all programs of the first one have ended, and then starts those
of the second one. With a dependent launch, programs of the second kernel start as soon as all programs of the first one
have called `gdc_launch_dependents` or ended. They then wait in `gdc_wait` until the first kernel has ended and its
writes are visible. Source: PTX ISA, griddepcontrol; CUDA C++ programming guide, programmatic dependent launch.

The rules that make a chain of such kernels safe:

- Each program of a dependent kernel calls `wait_for_previous` on every path, before it reads anything that a kernel has
  written and before it writes anything. Before that it may only prefetch weights.
- So a kernel ends only after the kernel before it has ended, which has waited for the one before, and so on. All
  earlier writes are visible, and no earlier kernel still reads what is written now.
- A kernel without these calls, such as one of torch, is safe on both sides. A dependent kernel after it waits for its
  end. It starts itself only when the dependent kernel before it has ended.

A program calls `let_next_start` when it has read its weights, or the KV of its first work unit. It does not do so at
its start: then the programs of the next kernel fill the multiprocessors that have the most room, and the others get
none. On an H200, each kernel ran on half of the multiprocessors (docs/log.md).

They change no token on an H200 (docs/performance.md).
"""

from __future__ import annotations

import triton
import triton.language as tl


def launch_options(*, dependent: bool) -> dict[str, bool]:
    """The options of Triton for a launch. Without a dependent launch there are none: other devices know none."""
    return {"launch_pdl": True} if dependent else {}


@triton.jit
def wait_for_previous():
    """Wait until the kernel before this one has ended."""
    tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start():
    """Let the next kernel start, as soon as all programs of this one have called this or have ended."""
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_lines(pointers):
    """Start to fetch the cache lines at a tensor of valid pointers into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )

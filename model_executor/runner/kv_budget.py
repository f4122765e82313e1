"""How many tokens of keys and values fit into the memory that is left."""

from __future__ import annotations

from ..device.memory import Memory

GPU_MARGIN = 0.02
"""of a GPU's memory stays free by default: for what allocators round up, and for neighbours that grow a little"""
DEFAULT_CPU_BYTES = 4 << 30
DEFAULT_CPU_SHARE = 0.25
"""of the memory that is available: a server on somebody's own machine takes no more unless it is told to"""


def num_kv_tokens(
    memory: Memory,
    bytes_per_token: int,
    *,
    page_size: int,
    context_len: int,
    mem_fraction_static: float | None,
    max_total_tokens: int | None,
    on_cpu: bool,
    reserve: int = 0,
) -> int:
    """Tokens of the KV pool, a multiple of the page size. `memory` is as it is after the weights were loaded.

    `reserve` bytes are left for steps (activations, logits, graphs); what is left after that always bounds the pool.
    `max_total_tokens` decides where it is given. Otherwise `mem_fraction_static` of the total memory is for weights and
    keys and values together; without it the pool is all that is left of a GPU but a margin, and modest on a CPU. Raises
    ValueError when that leaves less than two pages, or when the tokens asked for do not fit.
    """
    available = memory.available - reserve
    # One page more is allocated than is served: the dummy that padded writes hit.
    fits = (available // bytes_per_token - page_size) // page_size * page_size
    if max_total_tokens is not None:
        if max_total_tokens > fits:
            raise ValueError(
                f"--max-total-tokens {max_total_tokens} needs {_gib(max_total_tokens * bytes_per_token)}, "
                f"but only {_gib(available)} are available ({max(fits, 0)} tokens)"
            )
        num_tokens = max_total_tokens // page_size * page_size
    else:
        if mem_fraction_static is not None:
            budget = memory.available - int(memory.total * (1 - mem_fraction_static))
        elif on_cpu:
            wanted = max(DEFAULT_CPU_BYTES, context_len * bytes_per_token)
            budget = min(wanted, int(memory.available * DEFAULT_CPU_SHARE))
        else:
            budget = available - int(memory.total * GPU_MARGIN)
        num_tokens = min(fits, budget // bytes_per_token // page_size * page_size)
    if num_tokens < 2 * page_size:
        raise ValueError(
            f"not enough memory for a KV pool: beside the weights {_gib(memory.available)} of {_gib(memory.total)} are "
            f"available, steps need {_gib(reserve)}, and a token needs {bytes_per_token} bytes; raise "
            "--mem-fraction-static if it is given, else lower --max-prefill-tokens or --max-running-requests"
        )
    return num_tokens


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"

"""The size of the KV pool: the number of tokens whose K and V fit into the free memory."""

from __future__ import annotations

from ..device.memory import Memory

GPU_MARGIN = 0.02
"""Share of a GPU's memory that stays free by default, for rounding in allocators and for other processes."""
DEFAULT_CPU_BYTES = 4 << 30
DEFAULT_CPU_SHARE = 0.25
"""Share of the available memory: by default, a server on a CPU leaves most of the memory to other programs."""


def num_kv_tokens(
    memory: Memory,
    bytes_per_token: int,
    *,
    page_size: int,
    context_len: int,
    mem_fraction_static: float | None,
    max_total_tokens: int | None,
    on_cpu: bool,
    reserve: int,
) -> int:
    """The size of the KV pool in tokens, a multiple of the page size.

    `memory`: the memory after the weights were loaded. `reserve`: bytes to keep free for steps (activations, logits,
    graphs). The pool never takes more than the rest. Within this bound, the first rule that applies gives its size:

    1. `max_total_tokens` is given: that size.
    2. `mem_fraction_static` is given: that share of the total memory, less the memory in use (the weights).
    3. On a GPU: the rest, less a margin.
    4. On a CPU: DEFAULT_CPU_BYTES or one full context, whichever is more. At most DEFAULT_CPU_SHARE of the available
       memory.

    Raises ValueError if fewer than two pages fit, or if `max_total_tokens` does not fit.
    """
    available = memory.available - reserve
    # The pool has one more page: the dummy that padded entries write to.
    fits = (available // bytes_per_token - page_size) // page_size * page_size
    if max_total_tokens is not None:
        if max_total_tokens > fits:
            raise ValueError(
                f"--max-total-tokens {max_total_tokens} needs {_gib(max_total_tokens * bytes_per_token)}, "
                f"but only {_gib(max(available, 0))} are available ({max(fits, 0)} tokens)"
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
        first = "" if mem_fraction_static is None else f"raise --mem-fraction-static {mem_fraction_static:g}, or "
        raise ValueError(
            f"not enough memory for a KV pool: beside the weights {_gib(memory.available)} of {_gib(memory.total)} are "
            f"available, steps need {_gib(reserve)}, and a token needs {bytes_per_token} bytes; "
            f"{first}lower --max-prefill-tokens, --max-running-requests or --context-length"
        )
    return num_tokens


def check_host_kv(num_bytes: int, available: int, *, on_cpu: bool) -> None:
    """Raises ValueError if --hicache-size takes all host memory that is available, on a CPU beside the weights."""
    if num_bytes and num_bytes >= available:
        where, others = ("beside the weights ", " for it and the KV pool") if on_cpu else ("", "")
        raise ValueError(
            f"--hicache-size {num_bytes / 2**30:g} needs {_gib(num_bytes)} of host memory, but {where}only "
            f"{_gib(available)} are available{others}; lower --hicache-size"
        )


def check_adapters(num_bytes: int, available: int) -> None:
    """Raises ValueError if the tables of LoRA adapters take all memory that is available beside the weights."""
    if num_bytes and num_bytes >= available:
        raise ValueError(
            f"the tables of LoRA adapters need {_gib(num_bytes)}, but beside the weights only {_gib(available)} are "
            "available; lower --max-loras or --max-lora-rank"
        )


def check_states(num_bytes: int, available: int) -> None:
    """Raises ValueError if the states of requests and prefixes take all memory that is available beside the weights."""
    if num_bytes and num_bytes >= available:
        raise ValueError(
            f"the states of recurrent layers need {_gib(num_bytes)}, but beside the weights only {_gib(available)} are "
            "available; lower --max-running-requests or --max-saved-states"
        )


def check_weights(num_bytes: int, memory: Memory) -> None:
    """Raises ValueError if weights of `num_bytes` take all memory that is available on a GPU."""
    if num_bytes >= memory.available:
        raise ValueError(
            f"the weights need {_gib(num_bytes)}, but only {_gib(memory.available)} of the GPU's "
            f"{_gib(memory.total)} are available; end other programs on the GPU, or use a smaller model or "
            "--quantization fp8"
        )


def check_random_weights(num_bytes: int, available: int) -> None:
    """Raises ValueError if random weights do not fit. They are made all at once; those of a file are mapped."""
    if num_bytes > available:
        raise ValueError(
            f"not enough memory for random weights: they take {_gib(num_bytes)}, and {_gib(available)} are available"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"

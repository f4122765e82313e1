"""The values that `decode_kv_pairs` gives for all pairs of fp8 bytes, and those of torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tercet.model_executor.kernels.primitives import decode_kv_pairs

_BLOCK = 1024


@triton.jit
def _decode_kernel(pairs_ptr, low_ptr, high_ptr, KV_FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low, high = decode_kv_pairs(tl.load(pairs_ptr + at), KV_FORMAT, tl.float16)
    tl.store(low_ptr + at, low)
    tl.store(high_ptr + at, high)


def assert_pairs_are_decoded(kv_format: int, device: str) -> None:
    pairs = torch.arange(1 << 16, device=device).to(torch.uint16)
    found = torch.empty(2, len(pairs), dtype=torch.float16, device=device)
    _decode_kernel[(len(pairs) // _BLOCK,)](pairs, *found, KV_FORMAT=kv_format, BLOCK=_BLOCK)
    wanted = pairs.view(torch.float8_e4m3fn).view(-1, 2).T.half()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())

"""The gated activation of a feed-forward layer: activation(gate) * up (GLU variants, arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ...srt.model_files.model_config import Activation
from .bound import bound
from .primitives import has_dense_rows
from .tuning import cdiv

_BLOCK = 1024


@bound
@triton.jit
def _act_and_mul_kernel(x_ptr, out_ptr, stride_x, WIDTH: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < WIDTH
    gate = tl.load(x_ptr + row * stride_x + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + WIDTH + i, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        # x (1 + tanh(a)) / 2 = x / (1 + exp(-2 a)), with a = sqrt(2 / pi) (x + 0.044715 x^3)
        gate = gate / (1.0 + tl.exp(-gate * (1.5957691216 + 0.0713548163 * gate * gate)))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * WIDTH + i, (gate * up).to(out_ptr.dtype.element_ty), mask=mask)


def act_and_mul(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Compute activation(first half) * second half in float32: [T, 2 * n] -> [T, n].

    The last dimension is contiguous.
    """
    num_tokens, doubled = gate_up.shape
    assert has_dense_rows(gate_up) and doubled % 2 == 0
    width = doubled // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _act_and_mul_kernel[(num_tokens, cdiv(width, _BLOCK))](
            gate_up, out, gate_up.stride(0), WIDTH=width, GELU=activation == "gelu_tanh", BLOCK=_BLOCK, num_warps=4
        )
    return out


def act_and_mul_ref(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """`act_and_mul` in plain torch."""
    wide = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
    gate, up = wide.chunk(2, dim=-1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return (activated * up).to(gate_up.dtype)

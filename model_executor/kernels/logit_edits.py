"""Edits of logits, and the largest logit of each part of a row, in one kernel that many multiprocessors share.

The edits are those of model_executor/sampling/logit_edits.py and token_mask.py, in their order: penalties, bias,
suppressed stop tokens, token masks. The edited lines go to a buffer of their own, so the model's logits stay as they
are. The kernel rounds each product before a sum (`enable_fp_fusion`), as torch does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .argmax import peak_of_chunk
from .bound import bound
from .sampling_layout import Column, Field
from .tuning import cdiv

CHUNK = 4096
"""Logits of one program."""
_COLUMNS = tl.constexpr(len(Column))
_FIELDS = tl.constexpr(len(Field))
_ROW, _COUNTS, _BIAS, _MASK, _EDITED, _STOPS_START, _STOPS_END = (
    tl.constexpr(int(field))
    for field in (
        Field.ROW, Field.COUNTS, Field.BIAS, Field.MASK, Field.EDITED, Field.STOPS_START, Field.STOPS_END
    )
)  # fmt: skip
_REPETITION, _FREQUENCY, _PRESENCE = (
    tl.constexpr(int(column)) for column in (Column.REPETITION, Column.FREQUENCY, Column.PRESENCE)
)


class EditTables(NamedTuple):
    """What the edits read. `Field` says which line of each belongs to a line of logits."""

    counts: torch.Tensor
    """int32 [*, vocab], 2 * (number of times in the output) + (1 if in the prompt)"""
    bias: torch.Tensor
    """float32 [*, vocab]"""
    stop_ids: torch.Tensor
    """int64 [*], the suppressed stop tokens of all lines"""
    mask_bits: torch.Tensor
    """int32 [*, ceil(vocab / 32)]; bit i of word w: token 32 * w + i may come next"""


class EditedLogits(NamedTuple):
    """The edited lines, and the largest logit of each chunk of each line, edited or not."""

    lines: torch.Tensor
    """float32 [num_edited, vocab]"""
    peaks: torch.Tensor
    """float32 [n, num_chunks]; +inf for a chunk with a NaN"""
    peak_ids: torch.Tensor
    """int32 [n, num_chunks], the first token with this logit; -1 for a chunk with a NaN"""


@triton.jit
def _edit(x, i, in_vocab, plan, table_ptr, counts_ptr, bias_ptr, stop_ids_ptr, mask_ptr, vocab, num_words):
    """The edited logits of tokens i. A NaN stays, so that invalid logits are still found."""
    counts_line = tl.load(plan + _COUNTS)
    if counts_line >= 0:
        params = table_ptr + tl.load(plan + _ROW) * _COLUMNS
        counts = tl.load(counts_ptr + counts_line * vocab + i, mask=in_vocab, other=0)
        factor = tl.where(counts > 0, tl.load(params + _REPETITION).to(tl.float32), 1.0)
        x = tl.where(x < 0, x * factor, tl.div_rn(x, factor))
        times = counts >> 1
        x -= times.to(tl.float32) * tl.load(params + _FREQUENCY).to(tl.float32)
        x -= tl.minimum(times, 1).to(tl.float32) * tl.load(params + _PRESENCE).to(tl.float32)
    bias_line = tl.load(plan + _BIAS)
    if bias_line >= 0:
        x += tl.load(bias_ptr + bias_line * vocab + i, mask=in_vocab, other=0.0)
    mask_line = tl.load(plan + _MASK)
    if mask_line >= 0:
        word = tl.load(mask_ptr + mask_line * num_words + i // 32, mask=in_vocab, other=-1)
        x = tl.where((((word >> (i % 32)) & 1) == 0) & (x == x), float("-inf"), x)
    for stop in range(tl.load(plan + _STOPS_START), tl.load(plan + _STOPS_END)):
        x = tl.where((i == tl.load(stop_ids_ptr + stop)) & (x == x), float("-inf"), x)
    return x


@bound
@triton.jit
def _edit_kernel(
    x_ptr,
    table_ptr,
    plan_ptr,
    counts_ptr,
    bias_ptr,
    stop_ids_ptr,
    mask_ptr,
    edited_ptr,
    peak_ptr,
    peak_id_ptr,
    cleared_ptr,
    stride_x,
    vocab,
    num_words,
    num_chunks,
    num_cleared,
    CHUNK: tl.constexpr,
    CLEARED: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    for start in range(chunk * CLEARED, num_cleared, num_chunks * CLEARED):
        cell = start + tl.arange(0, CLEARED)
        tl.store(cleared_ptr + line * num_cleared + cell, tl.zeros([CLEARED], tl.int32), mask=cell < num_cleared)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    in_vocab = i < vocab
    plan = plan_ptr + line * _FIELDS
    x = tl.load(x_ptr + line * stride_x + i, mask=in_vocab, other=float("-inf"))
    edited = tl.load(plan + _EDITED)
    if edited >= 0:
        x = _edit(x, i, in_vocab, plan, table_ptr, counts_ptr, bias_ptr, stop_ids_ptr, mask_ptr, vocab, num_words)
        tl.store(edited_ptr + edited * vocab + i, x, mask=in_vocab)
    top, first = peak_of_chunk(x, i)
    tl.store(peak_ptr + line * num_chunks + chunk, top)
    tl.store(peak_id_ptr + line * num_chunks + chunk, first)


def edit_logits(
    x: torch.Tensor, table: torch.Tensor, plan: torch.Tensor, edits: EditTables, num_edited: int, cleared: torch.Tensor
) -> EditedLogits:
    """Edit the lines that the plan names, and fill `cleared` with zeros for the kernels that follow.

    x: float32 [n, vocab], last dimension contiguous; not changed. table: float64 [*, columns], see Column. plan: int64
    [n, fields], see Field. cleared: int32 [n, *], or empty. All but x are contiguous.
    """
    n, vocab = x.shape
    num_chunks = cdiv(vocab, CHUNK)
    out = EditedLogits(
        torch.empty((num_edited, vocab), dtype=torch.float32, device=x.device),
        torch.empty((n, num_chunks), dtype=torch.float32, device=x.device),
        torch.empty((n, num_chunks), dtype=torch.int32, device=x.device),
    )
    _edit_kernel[(n, num_chunks)](
        x, table, plan, *edits, *out, cleared, x.stride(0), vocab, cdiv(vocab, 32), num_chunks,
        cleared.shape[1] if len(cleared) else 0, CHUNK=CHUNK, CLEARED=1024, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def edit_logits_ref(x: torch.Tensor, table: torch.Tensor, plan: torch.Tensor, edits: EditTables) -> torch.Tensor:
    """The edited logits of all lines in plain torch: float32 [n, vocab]."""
    out = x.float().clone()
    for line, fields in zip(out, plan.tolist(), strict=True):
        if fields[Field.EDITED] < 0:
            continue
        params = table[fields[Field.ROW]].float()
        if fields[Field.COUNTS] >= 0:
            counts = edits.counts[fields[Field.COUNTS]]
            factor = torch.where(counts > 0, params[Column.REPETITION], 1.0)
            line.copy_(torch.where(line < 0, line * factor, line / factor))
            line -= (counts >> 1).float() * params[Column.FREQUENCY]
            line -= (counts >> 1).clamp(max=1).float() * params[Column.PRESENCE]
        if fields[Field.BIAS] >= 0:
            line += edits.bias[fields[Field.BIAS]]
        barred = torch.zeros(len(line), dtype=torch.bool, device=x.device)
        barred[edits.stop_ids[fields[Field.STOPS_START] : fields[Field.STOPS_END]]] = True
        if fields[Field.MASK] >= 0:
            bits = edits.mask_bits[fields[Field.MASK]].repeat_interleave(32)[: len(line)]
            barred |= (bits >> (torch.arange(len(line), device=x.device) % 32)) & 1 == 0
        line.copy_(torch.where(barred, line.clamp(max=-torch.inf), line))
    return out

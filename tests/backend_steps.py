"""Steps of requests for tests of attention backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tercet.model_executor.attention.base import AttentionBackend, AttentionSpec
from tercet.model_executor.forward_batch import ForwardBatch
from tercet.model_executor.step import ForwardMode
from tercet.srt.model_files.model_config import ModelConfig

NUM_SLOTS = 400
CONTEXT = 120


def random_sinks(num_heads: int, seed: int) -> torch.Tensor:
    """A sink for each head: most are as large as scores. Some heads have none, or one that decides alone."""
    g = torch.Generator().manual_seed(seed)
    rare = torch.tensor([1e4, -1e4, float("-inf")])[torch.randint(3, (num_heads,), generator=g)]
    return torch.where(torch.rand(num_heads, generator=g) < 0.2, rare, torch.randn(num_heads, generator=g) * 3)


def config(group: int, window: int | None) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=32,
        intermediate_size=32,
        num_layers=2,
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=32,
        context_len=CONTEXT,
        sliding_windows=(None, window),
    )


@dataclass
class Row:
    row: int
    length: int


def make_batch(rows: list[Row], extend_lens: list[int], table: torch.Tensor, decode: bool) -> ForwardBatch:
    """`rows[i].length` tokens, of which the last `extend_lens[i]` are this step's."""
    seq_lens = np.array([row.length for row in rows], np.int32)
    new = np.array(extend_lens, np.int32)
    index = torch.tensor([row.row for row in rows])
    spans = [range(row.length - n, row.length) for row, n in zip(rows, extend_lens, strict=True)]
    positions = torch.tensor([p for span in spans for p in span])
    loc = torch.cat([table[row.row, span.start : span.stop] for row, span in zip(rows, spans, strict=True)]).long()
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(new)]))
    return ForwardBatch(
        mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
        rows=index,
        seq_lens=torch.from_numpy(seq_lens).long(),
        input_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=positions,
        out_cache_loc=loc,
        req_to_token=table,
        logits_indices=None,
        extend_start_loc=None if decode else starts,
        prefix_lens=None if decode else torch.from_numpy(seq_lens - new).long(),
        seq_lens_host=seq_lens,
        extend_lens_host=None if decode else new,
    )


def with_sinks(specs: list[AttentionSpec], sinks: Sequence[torch.Tensor | None]) -> list[AttentionSpec]:
    """The specs of layers that have these sinks."""
    return [replace(spec, has_sinks=own is not None) for spec, own in zip(specs, sinks, strict=True)]


def error_of(out: torch.Tensor, want: torch.Tensor) -> float:
    """The relative norm of the difference. Both tensors are 0 if the sinks of all heads decide alone."""
    difference = (out.double() - want.double()).norm()
    return float(difference / want.double().norm()) if difference else 0.0


def with_caps(specs: list[AttentionSpec], caps: Sequence[float | None]) -> list[AttentionSpec]:
    """The specs of layers whose scores have these soft caps."""
    return [replace(spec, soft_cap=cap) for spec, cap in zip(specs, caps, strict=True)]


def attend(
    backend: AttentionBackend,
    batch: ForwardBatch,
    fused: torch.Tensor,
    num_heads: int,
    sinks: Sequence[torch.Tensor | None] = (None, None),
) -> list[torch.Tensor]:
    """The outputs of two layers. fused: queries, keys and values [T, heads, head_dim], the same for both."""
    backend.plan(batch)
    q, k, v = fused[:, :num_heads], fused[:, num_heads : num_heads + 2], fused[:, num_heads + 2 :]
    return [backend.forward(q, k, v, layer, batch, own) for layer, own in enumerate(sinks)]

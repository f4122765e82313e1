"""Steps of requests for tests of attention backends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from tercet.model_executor.attention.base import AttentionBackend
from tercet.model_executor.forward_batch import ForwardBatch
from tercet.model_executor.step import ForwardMode
from tercet.srt.model_files.model_config import ModelConfig

NUM_SLOTS = 400
CONTEXT = 120


def draw_sinks(data: st.DataObject, num_heads: int, generator: torch.Generator) -> torch.Tensor:
    """A sink for each head: of the size of scores, so large or so small that it decides alone, or none (-inf)."""
    sinks = torch.randn(num_heads, generator=generator) * 3
    sinks[0] = data.draw(st.sampled_from([float(sinks[0]), 1e4, -1e4, float("-inf")]))
    return sinks


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


def attend(backend: AttentionBackend, batch: ForwardBatch, fused: torch.Tensor, num_heads: int) -> list[torch.Tensor]:
    backend.plan(batch)
    q, k, v = fused[:, :num_heads], fused[:, num_heads : num_heads + 2], fused[:, num_heads + 2 :]
    return [backend.forward(q, k, v, layer, batch) for layer in range(2)]

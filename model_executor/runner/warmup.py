"""Warm-up steps without requests, as large as the largest of serving. They run once at the start of a GPU server.

They measure the memory that steps take, and compile all kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...srt.logprobs import MAX_TOP_LOGPROBS, LogprobOptions
from ...srt.model_files.model_config import ModelConfig
from ...srt.sampling_params import SamplingParams
from ..kernels.fp8_layout import FP8_LOW_TILE
from ..step import ForwardMode, Int32Array, NewRow, PromptScore, StateSaves, StepInputs, TokenMasks, num_mask_words
from .settings import RunnerSettings

LONG_TOKENS = 4096
"""More than a split of extend attention (`ExtendTile.split`) on any GPU."""


def low_tile_tokens(settings: RunnerSettings, config: ModelConfig) -> list[int]:
    """The most tokens of a step with the lower tile, for each kind of kernel that has two."""
    found = [FP8_LOW_TILE] if settings.has_fp8_weights else []
    if config.experts is not None and settings.attention_backend == "triton":
        from ..kernels.experts import high_tile_from  # importing Triton takes half a second

        count, per_token = config.experts.num_experts, config.experts.num_experts_per_token
        found.append(high_tile_from(settings.dtype, count, per_token, settings.device) - 1)
    if settings.lora is not None and settings.attention_backend == "triton":
        from ..kernels.lora import lora_row_counts  # importing Triton takes half a second

        found += [count - 1 for count in lora_row_counts(settings.dtype, settings.device)[1:]]
    return found


def warmup_steps(
    num_rows: int,
    context_len: int,
    max_prefill_tokens: int,
    tile_tokens: Sequence[int] = (),
    saved_row: int | None = None,
) -> list[StepInputs]:
    """The warm-up steps, all prefills:

    - the largest step: `max_prefill_tokens` in as many requests as possible, sampled in the way that takes most memory;
      with recurrent layers, it saves states in `saved_row`,
    - the same step with the log probabilities of all its tokens,
    - a small step that samples from the whole vocabulary,
    - a small greedy step of a request with one token and a request with two, without log probabilities and with them,
      and one of the latter alone, for servers with one row,
    - long requests, with `max_prefill_tokens` new tokens in as many as possible, and with two in one: attention splits
      their KV in two ways,
    - for each of `tile_tokens`, if `max_prefill_tokens` is at most as many, and decode rows and prompts together may be
      more, a step of more tokens: layers with kernels of their own then use higher tiles.

    The small steps compile the remaining kernels. All steps write to the dummy slot, so the rows of the table must be
    zeros. The next owner of a row overwrites the row's state.
    """
    count = min(num_rows, max_prefill_tokens)
    lens = np.full(count, min(context_len, max_prefill_tokens // count), np.int32)
    long = np.full(max(1, min(num_rows, max_prefill_tokens // 2)), min(context_len, LONG_TOKENS), np.int32)
    new = min(context_len, max_prefill_tokens // len(long))
    mixed = np.array([1, min(2, context_len)][:num_rows], np.int32)
    tall = [
        np.full(more, min(context_len, -(-(low + 1) // more)), np.int32)
        for low in tile_tokens
        if max_prefill_tokens <= low < max_prefill_tokens + num_rows
        for more in [min(num_rows, low + 1)]
    ]
    largest = _prefill(lens, SamplingParams(temperature=1.0, top_p=0.9))
    if saved_row is not None:
        largest.state_saves = StateSaves(lens, np.full(count, saved_row, np.int32))
    return [
        largest,
        _prefill(lens, SamplingParams(temperature=0.0), LogprobOptions(top_logprobs_num=MAX_TOP_LOGPROBS)),
        *(_prefill(lens, SamplingParams(temperature=0.0)) for lens in tall),
        _prefill(mixed[:1], SamplingParams(temperature=1.0)),
        _prefill(mixed, SamplingParams(temperature=0.0)),
        _prefill(mixed, SamplingParams(temperature=0.0), LogprobOptions()),
        _prefill(np.array([min(2, context_len)], np.int32), SamplingParams(temperature=0.0)),
        _prefill(np.maximum(long, new), SamplingParams(temperature=0.0), new=new),
        _prefill(long[:1], SamplingParams(temperature=0.0), new=2),
    ]


def all_allowed(num_rows: int, vocab_size: int) -> TokenMasks:
    """Masks that change nothing. They compile the kernel that applies masks."""
    bits = np.full((num_rows, num_mask_words(vocab_size)), -1, np.int32)
    return TokenMasks(np.arange(num_rows, dtype=np.int32), bits)


def _prefill(
    seq_lens: Int32Array, sampling: SamplingParams, logprobs: LogprobOptions | None = None, new: int | None = None
) -> StepInputs:
    """new: new tokens of each request; None: all of them."""
    rows = np.arange(1, len(seq_lens) + 1, dtype=np.int32)
    lens = seq_lens if new is None else np.minimum(seq_lens, new).astype(np.int32)
    total = int(lens.sum())
    none = np.empty(0, np.int32)
    starts = (np.cumsum(lens) - lens).tolist()
    scores = [
        PromptScore(int(row), start, np.zeros(length, np.int32))
        for row, start, length in zip(rows, starts, lens.tolist(), strict=True)
    ]
    return StepInputs(
        mode=ForwardMode.EXTEND,
        rows=rows,
        seq_lens=seq_lens,
        out_cache_loc=np.zeros(total, np.int32),
        new_rows=[NewRow(int(row), sampling, 0, none, none, (), logprobs) for row in rows],
        extend_lens=lens,
        input_ids=np.zeros(total, np.int32),
        sampled=np.ones(len(lens), np.bool_),
        prompt_scores=[] if logprobs is None else scores,
    )

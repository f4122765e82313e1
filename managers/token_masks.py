"""Fills the token masks of a step: one for each choice of a request with a grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..model_executor.step import TokenMasks
from ..srt.errors import InvalidRequest, TercetError
from .grammar import GrammarFailed, mask_of
from .req import Req, Stage
from .schedule_batch import ScheduleBatch


def masked_indices(reqs: Sequence[Req]) -> list[int]:
    """The indices of the requests that have a grammar."""
    return [index for index, req in enumerate(reqs) if req.grammar is not None]


def allowed_drafts(req: Req, drafts: Sequence[int]) -> Sequence[int]:
    """The drafts before the first one that the request's grammar forbids."""
    return drafts[: req.grammar.look_ahead(drafts, len(req.output_ids))] if req.grammar and drafts else drafts


def fill_masks(
    batch: ScheduleBatch, indices: Sequence[int], num_words: int, fail: Callable[[Req, TercetError], None]
) -> TokenMasks | None:
    """The masks of the requests at `indices` of `batch.sampled`. None if none is needed: all of them have ended.

    The drafts of a request are those that `allowed_drafts` left. `fail` is called for a request whose grammar cannot
    continue.
    """
    drafts = [batch.drafts_of(index) for index in indices]
    firsts = batch.inputs.first_choices.tolist()
    bits = np.empty((len(indices) + sum(map(len, drafts)), num_words), np.int32)
    lines: list[int] = []
    for index, own in zip(indices, drafts, strict=True):
        req = batch.sampled[index]
        if req.stage is Stage.FINISHED or req.pending_abort is not None:
            continue
        assert req.grammar is not None
        known = req.output_from(int(batch.sampled_lens[index]))
        if known:
            assert not own
            bits[len(lines)] = mask_of(known[0], num_words)
            lines.append(firsts[index])
            continue
        try:
            req.grammar.fill(bits, len(lines), len(req.output_ids))
        except GrammarFailed as error:
            fail(req, grammar_error(req, error))
        else:
            req.grammar.fill_after(own, bits, len(lines) + 1)
            lines.extend(range(firsts[index], firsts[index] + 1 + len(own)))
    return TokenMasks(np.array(lines, np.int32), bits[: len(lines)]) if lines else None


def grammar_error(req: Req, error: GrammarFailed) -> TercetError:
    """The error of a request whose grammar cannot continue."""
    spec = req.options.grammar
    assert spec is not None
    message = f"the grammar cannot be followed after {len(req.output_ids)} tokens of output: {error}"
    return InvalidRequest(message, param=spec.kind)

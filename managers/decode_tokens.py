"""The tokens that a decode step computes of each request: its newest one, or those that its grammar has forced, and
drafts after them."""

from __future__ import annotations

from collections.abc import Sequence

from ..model_executor.step import FROM_DEVICE
from .proposer import Proposer
from .req import Req
from .token_masks import allowed_drafts


def known_ids(reqs: Sequence[Req], max_tokens: int) -> list[Sequence[int]]:
    """The forced tokens of each request that are not computed yet, or FROM_DEVICE, which is its newest token. The
    requests have at most `max_tokens` together, but at least one each."""
    num_left = max_tokens - len(reqs)
    known: list[Sequence[int]] = []
    for req in reqs:
        if req.grammar is not None and req.num_tokens - req.kv_len > 1 and num_left > 0 and req.joins_forced_tokens:
            known.append(req.output_from(req.kv_len)[: 1 + num_left])
            num_left -= len(known[-1]) - 1
        else:
            known.append((FROM_DEVICE,))
    return known


def draft_ids(
    reqs: Sequence[Req], known: Sequence[Sequence[int]], proposer: Proposer | None
) -> Sequence[Sequence[int]]:
    """The drafts of each request after its `known` tokens. It has none while forced tokens remain after these."""
    if proposer is None:
        return [()] * len(reqs)
    limits = []
    for req, ids in zip(reqs, known, strict=True):
        end = req.kv_len + len(ids)
        is_last = req.grammar is None or req.num_tokens == end
        limits.append(req.max_kv_len - end if is_last and req.takes_drafts else 0)
    return list(map(allowed_drafts, reqs, proposer.propose(reqs, limits)))

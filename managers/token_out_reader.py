"""Reads the outputs of a scheduler: each as a TokenOut, whichever form it was sent in."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from ..srt.io_struct import BatchTokenOut, Counts, NextTokens, TokenOut
from ..srt.logprobs import NewLogprobs


class TokenOutReader:
    """Reads all messages of one scheduler, in order. It remembers the counts of each live request."""

    def __init__(self) -> None:
        self._counts: dict[str, Counts] = {}

    def __len__(self) -> int:
        """The number of requests that it remembers."""
        return len(self._counts)

    def read(self, batch: BatchTokenOut) -> Iterator[TokenOut]:
        """The outputs of a message, in order."""
        if batch.next.rids:
            yield from self._read_next(batch.next)
        for out in batch.outs:
            if out.finish is None:
                self._counts[out.rid] = out.counts
            else:
                self._counts.pop(out.rid, None)
            yield out

    def forget(self, rid: str) -> None:
        """No more outputs of this request will come."""
        self._counts.pop(rid, None)

    def _read_next(self, new: NextTokens) -> Iterator[TokenOut]:
        known = self._counts
        for rid, token, found in zip(new.rids, new.token_ids, new.logprobs or repeat(None), strict=False):
            counts = known[rid] = _one_more(known.get(rid) or Counts(0))
            logprobs = None if found is None else NewLogprobs(None, found)
            yield TokenOut(rid=rid, token_ids=[token], finish=None, counts=counts, logprobs=logprobs)


def _one_more(counts: Counts) -> Counts:
    """The counts of a running request after its next token."""
    return Counts(
        counts.prompt_tokens,
        counts.completion_tokens + 1,
        counts.cached_tokens,
        counts.num_retractions,
        None,
        counts.host_tokens,
        counts.storage_tokens,
        counts.num_drafts,
        counts.num_accepted_drafts,
    )

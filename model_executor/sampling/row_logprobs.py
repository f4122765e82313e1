"""Which rows want log probabilities, their computation after a forward pass, and their way to the host.

A step without such rows runs none of this code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...srt.logprobs import LogprobOptions, Logprobs
from ..device.device_buffers import ArrayCopy, Downloads, Uploads
from ..step import Int32Array, NewRow, PromptScore
from .token_logprobs import TokenLogprobs, make_method

BLOCK_LOGITS = 2**22
"""The logits of prompt tokens are computed in blocks of about this many numbers, whatever the length of the prompt."""
_BYTES_PER_LOGIT = 4
_BYTES_PER_RANKED_LOGIT = 40
"""Bytes per logit of a block in torch: the logits, a copy, and the keys by which the tokens are ranked."""


def block_bytes(vocab_size: int, *, compiled: bool) -> int:
    """The memory of one block in bytes. `compiled`: the C++ operation reads logits where they are."""
    return max(BLOCK_LOGITS, vocab_size) * (_BYTES_PER_LOGIT if compiled else _BYTES_PER_RANKED_LOGIT)


class RowLogprobs:
    """The log probabilities of rows 1..num_rows. All device work is queued on the current stream."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        uploads: Uploads,
        downloads: Downloads,
        *,
        use_kernels: bool,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._uploads = uploads
        self._downloads = downloads
        self._method = make_method(device, use_kernels=use_kernels)
        self._block_rows = max(1, BLOCK_LOGITS // vocab_size)
        self._wishes: dict[int, LogprobOptions] = {}
        self._wants = np.zeros(num_rows + 1, np.bool_)

    def set_row(self, new_row: NewRow) -> None:
        """Set the wish of a row's new owner, and forget the old owner's."""
        row, wish = new_row.row, new_row.logprobs
        self._wants[row] = wish is not None
        if wish is not None:
            self._wishes[row] = wish
        elif self._wishes:
            self._wishes.pop(row, None)

    def wanted(self, rows: Int32Array) -> bool:
        """Whether any of these rows wants log probabilities."""
        return bool(self._wishes) and bool(self._wants[rows].any())

    def of_tokens(self, logits: torch.Tensor, tokens: torch.Tensor, rows: Int32Array) -> SampledLogprobs | None:
        """Queue the log probabilities of the chosen tokens of the rows that want them. None: no row does.

        Args:
            logits: float32 [n, vocab]
            tokens: int64 [n] on the device; those of a row with an invalid token mean nothing
            rows: int32 [n], the row of each line of logits
        """
        if not self._wishes:
            return None
        places = np.flatnonzero(self._wants[rows])
        if not len(places):
            return None
        wishes = [self._wishes[row] for row in rows[places].tolist()]
        width = max(len(wish.token_ids_logprob) for wish in wishes)
        asked = np.zeros((len(wishes), width), np.int64)
        for line, wish in zip(asked, wishes, strict=True):
            line[: len(wish.token_ids_logprob)] = wish.token_ids_logprob
        lines, others = self._uploads.send(places.astype(np.int64), asked)
        own = tokens.index_select(0, lines).clamp_(min=0).unsqueeze(1)
        ids = torch.cat((own, others), dim=1)
        k = max(self._num_top(wish) for wish in wishes)
        blocks = [self._method(logits, lines[at], ids[at], k) for at in self._blocks(len(places))]
        return SampledLogprobs(places.tolist(), wishes, self._fetch(blocks))

    def of_prompts(
        self, scores: Sequence[PromptScore], hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]
    ) -> PromptLogprobs:
        """Queue the log probabilities of prompt tokens.

        Args:
            hidden: the hidden states before these tokens, those of the first score first: [sum of n, hidden]
            head: computes float32 logits from hidden states
        """
        blocks = []
        num_blocks = []
        first = 0
        for score in scores:
            wish, n = self._wishes[score.row], len(score.targets)
            ids = np.empty((n, 1 + len(wish.token_ids_logprob)), np.int64)
            ids[:, 0] = score.targets
            ids[:, 1:] = wish.token_ids_logprob
            (sent,) = self._uploads.send(ids)
            places = list(self._blocks(n))
            for at in places:
                logits = head(hidden[first + at.start : first + at.stop])
                lines = torch.arange(len(logits), device=self._device)
                blocks.append(self._method(logits, lines, sent[at], self._num_top(wish)))
            num_blocks.append(len(places))
            first += n
        return PromptLogprobs(num_blocks, self._fetch(blocks))

    def _num_top(self, wish: LogprobOptions) -> int:
        return min(wish.top_logprobs_num, self._vocab_size)

    def _blocks(self, n: int) -> Iterator[slice]:
        return (slice(start, min(start + self._block_rows, n)) for start in range(0, n, self._block_rows))

    def _fetch(self, blocks: Sequence[TokenLogprobs]) -> _Arriving:
        """Start the copy of all results in one transfer."""
        parts = [part.reshape(-1) for found in blocks for part in (found.given, found.top, found.top_ids.view(_FLOAT))]
        shapes = [(*found.given.shape, found.top.shape[1]) for found in blocks]
        return _Arriving(self._downloads.fetch_array(torch.cat(parts)), shapes)


_FLOAT = torch.float32


class _Found(NamedTuple):
    """TokenLogprobs on the host."""

    given: npt.NDArray[np.float32]
    top: npt.NDArray[np.float32]
    top_ids: Int32Array

    def pack(self, at: slice, num_top: int, num_asked: int) -> Logprobs:
        """The results of some lines. The given tokens are a line's own token and `num_asked` others."""
        return Logprobs(
            own=self.given[at, 0].tobytes(),
            top=self.top[at, :num_top].tobytes(),
            top_ids=self.top_ids[at, :num_top].tobytes(),
            asked=self.given[at, 1 : 1 + num_asked].tobytes(),
        )


class _Arriving(NamedTuple):
    """The results of several blocks on their way to the host."""

    copy: ArrayCopy
    """float32: for each block the given, the top and (as bits) the top ids"""
    shapes: list[tuple[int, int, int]]
    """for each block its rows, given tokens and top tokens"""

    def wait(self) -> Iterator[_Found]:
        data = self.copy.wait()
        start = 0
        for n, m, k in self.shapes:
            given, top, top_ids = np.split(data[start : start + n * (m + 2 * k)], [n * m, n * (m + k)])
            yield _Found(given.reshape(n, m), top.reshape(n, k), top_ids.view(np.int32).reshape(n, k))
            start += n * (m + 2 * k)


class SampledLogprobs(NamedTuple):
    """The log probabilities of a step's new tokens, on their way to the host."""

    places: list[int]
    """positions among the sampled rows"""
    wishes: list[LogprobOptions]
    arriving: _Arriving

    def wait(self) -> dict[int, Logprobs]:
        lines = ((found, at) for found in self.arriving.wait() for at in range(len(found.given)))
        return {
            place: found.pack(slice(at, at + 1), wish.top_logprobs_num, len(wish.token_ids_logprob))
            for place, wish, (found, at) in zip(self.places, self.wishes, lines, strict=True)
        }


class PromptLogprobs(NamedTuple):
    """The log probabilities of a step's prompt tokens, on their way to the host."""

    num_blocks: list[int]
    """of each PromptScore"""
    arriving: _Arriving

    def wait(self) -> list[Logprobs]:
        found = self.arriving.wait()
        packed = (one.pack(slice(None), one.top.shape[1], one.given.shape[1] - 1) for one in found)
        return [Logprobs.concat([next(packed) for _ in range(count)]) for count in self.num_blocks]

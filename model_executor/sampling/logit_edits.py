"""Edits of a request's logits before sampling: penalties, logit bias, and the suppression of early stop tokens.

For each token t with logit x, in this order:

1. repetition_penalty r, if t is in the prompt or the output: x * r if x < 0, else x / r (Keskar et al.,
   "CTRL", 2019)
2. frequency_penalty f: x - f * (number of times that t is in the output)
3. presence_penalty p, if t is in the output: x - p
4. logit_bias b: x + b
5. stop tokens, until the output has min_new_tokens: -inf

Output tokens are counted on the device when they are sampled, because the host may not have them at the next step. In
a step with drafts, each choice follows other tokens: drafts before it count for it alone, and the accepted tokens are
counted when they are known.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..step import Int32Array, NewRow
from .draft_verification import EarlierDrafts
from .sampling_state import Column, SamplingState


class LazyRowTable:
    """A device tensor [lines, width] with a line for each row that needs one.

    The table starts empty and doubles up to num_rows lines, so it takes no memory while no request needs a line. A row
    keeps its line until `release`.
    """

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_rows = num_rows
        self._lines = np.full(num_rows + 1, -1, np.int64)
        self._free: list[int] = []
        self.table = torch.empty((0, width), dtype=dtype, device=device)

    def assign(self, row: int) -> torch.Tensor:
        """Give the row a line of zeros. Returns a view [width] of `table`, valid until the next `assign`."""
        if self._lines[row] < 0:
            if not self._free:
                self._grow()
            self._lines[row] = self._free.pop()
        return self.table[int(self._lines[row])].zero_()

    def release(self, row: int) -> None:
        """Free the row's line, if it has one."""
        if self._lines[row] >= 0:
            self._free.append(int(self._lines[row]))
            self._lines[row] = -1

    def lines(self, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """The line of each row; -1 for a row without a line."""
        return self._lines[rows]

    def _grow(self) -> None:
        old = len(self.table)
        new = min(max(1, 2 * old), self._num_rows)
        assert new > old, "a row holds at most one line"
        self.table = torch.cat((self.table, self.table.new_empty((new - old, self.table.shape[1]))))
        self._free.extend(range(old, new))


class EditLines(NamedTuple):
    """The edits of n rows at one step, as numbers of lines in the tables."""

    counts: npt.NDArray[np.int64]
    """[n], lines of `LogitEdits.counts`; -1: none"""
    bias: npt.NDArray[np.int64]
    """[n], lines of `LogitEdits.bias`; -1: none"""
    stop_ends: npt.NDArray[np.int64]
    """[n], where the suppressed stop tokens of each row end in `stop_ids`"""
    stop_ids: npt.NDArray[np.int64]
    """the suppressed stop tokens of all rows, one row after the other"""


class LogitEdits:
    """The logit edits of rows 1..num_rows. All device work is queued on the current stream."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, state: SamplingState) -> None:
        self._vocab_size = vocab_size
        self._state = state
        # 2 * (number of times in the output) + (1 if in the prompt). The prompt counts only for a repetition penalty.
        self._counts = LazyRowTable(num_rows, vocab_size, torch.int32, device)
        self._bias = LazyRowTable(num_rows, vocab_size, torch.float32, device)
        self._stop_ids: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)] * (num_rows + 1)
        self._stops_from = np.zeros(num_rows + 1, np.int64)
        self._edited: set[int] = set()
        """The rows whose last owner may need edits."""
        self._counted: set[int] = set()
        """Those of them whose last owner has penalties."""

    def set_row(self, new_row: NewRow) -> None:
        """Set the edits of a row's new owner, and forget the old owner's. Ids outside the vocabulary are skipped."""
        params = new_row.sampling
        row = new_row.row
        repetition = params.repetition_penalty != 1
        penalised = repetition or params.frequency_penalty != 0 or params.presence_penalty != 0
        edited = penalised or params.logit_bias or params.min_new_tokens
        (self._edited.add if edited else self._edited.discard)(row)
        (self._counted.add if penalised else self._counted.discard)(row)
        if penalised:
            line = self._counts.assign(row)
            if repetition:
                line.index_fill_(0, self._state.send(self._known_ids(new_row.prompt_ids)), 1)
            output_ids = self._state.send(self._known_ids(new_row.output_ids))
            line.index_add_(0, output_ids, torch.full_like(output_ids, 2, dtype=torch.int32))
        else:
            self._counts.release(row)
        if params.logit_bias:
            ids = np.array([int(key) for key in params.logit_bias], np.int64)
            values = np.array(list(params.logit_bias.values()), np.float32)
            known = ids < self._vocab_size
            line = self._bias.assign(row)
            line.index_copy_(0, self._state.send(ids[known]), self._state.send(values[known]))
        else:
            self._bias.release(row)
        self._stop_ids[row] = self._known_ids(np.array(new_row.stop_ids, np.int64))
        self._stops_from[row] = len(new_row.prompt_ids) + params.min_new_tokens

    def needed(self, rows: npt.NDArray[np.integer], seq_lens: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Which rows need edits at this step: bool [n]."""
        early = seq_lens < self._stops_from[rows]
        return (self._counts.lines(rows) >= 0) | (self._bias.lines(rows) >= 0) | early

    def any_needed(self, rows: npt.NDArray[np.integer], seq_lens: npt.NDArray[np.integer]) -> bool:
        """Whether any of the rows needs edits at this step."""
        return not self._edited.isdisjoint(rows.tolist()) and bool(self.needed(rows, seq_lens).any())

    def any_counted(self, rows: npt.NDArray[np.integer]) -> bool:
        """Whether tokens are counted for the penalties of any of the rows."""
        return not self._counted.isdisjoint(rows.tolist())

    @property
    def counts(self) -> torch.Tensor:
        """int32 [lines, vocab]: 2 * (number of times in the output) + (1 if in the prompt)."""
        return self._counts.table

    @property
    def bias(self) -> torch.Tensor:
        """float32 [lines, vocab]."""
        return self._bias.table

    def lines(self, rows: npt.NDArray[np.int64], seq_lens: npt.NDArray[np.int64]) -> EditLines:
        """What kernels need to know of the rows to do what `apply` and `count` do."""
        early = np.flatnonzero(seq_lens < self._stops_from[rows])
        stop_ids = [self._stop_ids[row] for row in rows[early]]
        lens = np.zeros(len(rows), np.int64)
        lens[early] = [len(ids) for ids in stop_ids]
        return EditLines(
            self._counts.lines(rows),
            self._bias.lines(rows),
            np.cumsum(lens),
            np.concatenate(stop_ids) if stop_ids else np.empty(0, np.int64),
        )

    def apply(
        self,
        x: torch.Tensor,
        rows: npt.NDArray[np.int64],
        seq_lens: npt.NDArray[np.int64],
        earlier: EarlierDrafts | None = None,
    ) -> None:
        """Edit the logits of the rows in place. x: float32 [n, vocab]. `earlier`: the drafts before each line of x."""
        self._penalise(x, rows, earlier)
        biased = np.flatnonzero(self._bias.lines(rows) >= 0)
        if len(biased):
            lines = self._state.send(np.stack((biased, self._bias.lines(rows[biased]))))
            x.index_add_(0, lines[0], self._bias.table.index_select(0, lines[1]))
        early = np.flatnonzero(seq_lens < self._stops_from[rows])
        stop_ids = [self._stop_ids[row] for row in rows[early]]
        if any(map(len, stop_ids)):
            at = np.stack((np.repeat(early, [len(ids) for ids in stop_ids]), np.concatenate(stop_ids)))
            index = tuple(self._state.send(at))
            # A clamp keeps NaN, unlike a fill, so that invalid logits are still found.
            x.index_put_(index, x[index].clamp(max=-torch.inf))

    def count(self, rows: npt.NDArray[np.int64], tokens: torch.Tensor) -> None:
        """Count new tokens of the rows. tokens: int64 [n] on the device; -1 is not counted. rows: [n], may repeat."""
        counted = np.flatnonzero(self._counts.lines(rows) >= 0)
        if not len(counted):
            return
        at = self._state.send(np.stack((counted, self._counts.lines(rows[counted]))))
        token = tokens.index_select(0, at[0])
        flat = at[1] * self._vocab_size + token.clamp(min=0)
        self._counts.table.view(-1).index_add_(0, flat, 2 * (token >= 0).to(torch.int32))

    def _penalise(self, x: torch.Tensor, rows: npt.NDArray[np.int64], earlier: EarlierDrafts | None) -> None:
        """Apply the penalties by arithmetic on all elements: on a CPU a masked fill takes many times as long."""
        counted = np.flatnonzero(self._counts.lines(rows) >= 0)
        if not len(counted):
            return
        params = self._state.host[rows[counted]]
        at = self._state.send(np.stack((counted, self._counts.lines(rows[counted]), rows[counted])))
        counts = self._counts.table.index_select(0, at[1])
        if earlier is not None:
            places, drafts = earlier.flat(counted)
            flat = self._state.send(places * self._vocab_size + drafts)
            counts.view(-1).index_add_(0, flat, torch.full_like(flat, 2, dtype=torch.int32))
        y = x.index_select(0, at[0])
        if (params[:, Column.REPETITION] != 1).any():
            seen = counts.clamp(max=1).float()
            # The penalty for a seen token, else 1. Both are exact, unlike seen * (penalty - 1) + 1.
            factor = seen * self._parameter(at[2], Column.REPETITION)
            factor += seen.neg_().add_(1)
            y = (y.clamp(max=0) * factor).add_(y.clamp_(min=0).div_(factor))
        if (params[:, Column.FREQUENCY] != 0).any() or (params[:, Column.PRESENCE] != 0).any():
            times = counts >> 1
            y -= times.float().mul_(self._parameter(at[2], Column.FREQUENCY))
            y -= times.clamp_(max=1).float().mul_(self._parameter(at[2], Column.PRESENCE))
        x.index_copy_(0, at[0], y)

    def _parameter(self, rows: torch.Tensor, column: Column) -> torch.Tensor:
        return self._state.on_device(rows, column).float()

    def _known_ids(self, ids: Int32Array | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        known: npt.NDArray[np.int64] = ids[(ids >= 0) & (ids < self._vocab_size)].astype(np.int64)
        return known

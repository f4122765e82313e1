"""The step journal: which requests the scheduler works on, readable after the scheduler has died.

It is a small mapped file in the run directory. The kernel keeps what a killed process has written to it. Most steps
cost two writes to memory: the requests are written again only if others run, or if one got several tokens at once.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import time
from collections.abc import Iterable, Sequence, Sized
from operator import add
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<QQI?")
"""Steps launched, steps launched when the rows were written, bytes of the rows, whether a step is under way."""
_IN_STEP = _HEAD.size - 1
_STEP = struct.Struct("<QdII")
_NUM_STEPS_KEPT = 16
_ROWS = 1024
_BYTES_PER_ROW = 40
_Rows = tuple[list[str], list[int], list[str]]
"""Keys and positions of the requests in the step, and keys of those that had begun before it and have no output."""
assert _HEAD.size + _NUM_STEPS_KEPT * _STEP.size <= _ROWS


def open_journal(path: Path, max_rows: int) -> StepJournal | NoJournal:
    """The journal of a scheduler. On a full disk there is none: after a death, every request is then a suspect."""
    try:
        return StepJournal(path, max_rows)
    except OSError as error:
        logger.warning("The scheduler has no step journal: %s", error.strerror or error)
        return NO_JOURNAL


class JournaledReq(Protocol):
    """What the journal wants to know of a request: see `managers.req.Req`."""

    rid: str
    num_steps_in_flight: int

    @property
    def output_ids(self) -> Sized: ...


class StepJournal:
    """The scheduler's side. It makes the file, or raises OSError."""

    def __init__(self, path: Path, max_rows: int) -> None:
        size = _ROWS + max_rows * _BYTES_PER_ROW
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "r+b") as file:
            # The file gets its space on the disk now. If a hole were filled later, on a full disk, the process would
            # die of SIGBUS.
            file.write(bytes(size))
            file.flush()
            self._map = mmap.mmap(file.fileno(), size)
        self._num_steps = 0
        self._rows_since = 0
        self._rows_bytes = 0
        self._reqs: Sequence[JournaledReq] = ()
        """Those of the last step that had some."""
        self._names_earlier = False
        """Whether the rows have requests of the step before that one, too."""

    def begin(
        self,
        reqs: Sequence[JournaledReq],
        num_prompt_tokens: int,
        unfinished: Iterable[JournaledReq],
        num_drafts: Sequence[int] | None = None,
        *,
        had_several_tokens: bool = False,
    ) -> None:
        """A step is about to be launched. `reqs`: the caller does not change it afterwards. `unfinished`: the requests
        whose prompts are computed in chunks. `num_drafts`: of each request; None: the step has no drafts.
        `had_several_tokens`: since the last call, a request has got several tokens at once, so its position does not
        follow from the rows.

        With overlap, the step before may still be in flight, and a device reports a fault late. So the rows have its
        requests, too. A step without requests keeps the rows of the step before.
        """
        self._num_steps += 1
        if reqs and (self._names_earlier or had_several_tokens or num_drafts is not None or reqs != self._reqs):
            self._write_rows(reqs, unfinished, num_drafts)
        place = _HEAD.size + self._num_steps % _NUM_STEPS_KEPT * _STEP.size
        _STEP.pack_into(self._map, place, self._num_steps, time.monotonic(), len(reqs), num_prompt_tokens)
        _HEAD.pack_into(self._map, 0, self._num_steps, self._rows_since, self._rows_bytes, True)

    def end(self) -> None:
        """No step is under way any more."""
        self._map[_IN_STEP] = 0

    def _write_rows(
        self, reqs: Sequence[JournaledReq], unfinished: Iterable[JournaledReq], num_drafts: Sequence[int] | None
    ) -> None:
        keys, positions = [req.rid for req in reqs], [len(req.output_ids) + req.num_steps_in_flight for req in reqs]
        if num_drafts is not None:
            positions = list(map(add, positions, num_drafts))
        named = set(keys)
        earlier = [req for req in self._reqs if req.num_steps_in_flight and req.rid not in named]
        keys += [req.rid for req in earlier]
        positions += [len(req.output_ids) + req.num_steps_in_flight - 1 for req in earlier]
        # The outputs of the step before may be on their way. Who has output is known to have begun.
        begun = {req.rid for req in (*self._reqs, *unfinished) if not len(req.output_ids)}.difference(keys)
        data = msgspec.msgpack.encode((keys, positions, list(begun)))
        if len(data) > len(self._map) - _ROWS:
            data = b""  # the reader sees that the rows are unknown
        self._map[_ROWS : _ROWS + len(data)] = data
        self._reqs, self._rows_since, self._rows_bytes = reqs, self._num_steps, len(data)
        self._names_earlier = bool(earlier)


class NoJournal:
    """The journal of a scheduler that has none."""

    def begin(self, *_args: object, **_options: object) -> None:
        """Writes nothing."""

    def end(self) -> None:
        """Writes nothing."""


NO_JOURNAL = NoJournal()


class JournalRow(NamedTuple):
    """A request in the last step. `position`: its output tokens before the last one that the step may return, or a few
    more."""

    key: str
    position: int


class JournalStep(NamedTuple):
    """One of the last steps. `age_s`: seconds between the launches of this step and of the last one."""

    number: int
    age_s: float
    num_requests: int
    num_prompt_tokens: int


class Journal(msgspec.Struct, frozen=True):
    """What the file says."""

    rows: list[JournalRow] | None
    """The requests of the step that was under way, with overlap of both steps in flight. None: no step was, or its
    requests are unknown."""
    last_steps: list[JournalStep]
    """Oldest first."""
    is_between_steps: bool = False
    """It is known that no step was under way."""
    begun: frozenset[str] = frozenset()
    """Requests of the last step, and requests that had begun before it and had no output. Some may have ended."""


def read_journal(path: Path) -> Journal:
    """The journal of a dead scheduler. It is empty if there is no file, or if the file is not valid."""
    try:
        data = path.read_bytes()
        num_steps, rows_since, rows_bytes, in_step = _HEAD.unpack_from(data)
        steps = [_STEP.unpack_from(data, _HEAD.size + i * _STEP.size) for i in range(_NUM_STEPS_KEPT)]
    except (OSError, struct.error):
        return Journal(None, [])
    steps = sorted(step for step in steps if step[0])
    last = [JournalStep(number, steps[-1][1] - at, *rest) for number, at, *rest in steps]
    journal = Journal(None, last, is_between_steps=not in_step)
    try:
        keys, positions, begun = msgspec.msgpack.decode(data[_ROWS : _ROWS + rows_bytes], type=_Rows)
    except msgspec.DecodeError:
        return journal
    journal = msgspec.structs.replace(journal, begun=frozenset(keys + begun))
    if not in_step:
        return journal
    behind = num_steps - rows_since
    rows = [JournalRow(key, position + behind) for key, position in zip(keys, positions, strict=False)]
    return msgspec.structs.replace(journal, rows=rows)

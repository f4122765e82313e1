"""Fakes for tests of the scheduler: a model whose tokens depend on every KV slot it reads, queues, and a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fake_states import FakeStates

from tercet.model_executor.step import (
    FROM_DEVICE,
    HIDDEN_UNIT,
    INVALID_TOKEN,
    ForwardMode,
    HiddenRange,
    HiddenSum,
    KVCopies,
    PromptScore,
    StepInputs,
    StepOutput,
    TokenMasks,
)
from tercet.srt.logprobs import LogprobOptions, Logprobs

_POWERS = np.cumprod(np.full(1 << 16, 0x9E3779B97F4A7C15, dtype=np.uint64))
"""More than any sequence of a test has tokens."""
_UINT64 = (1 << 64) - 1


WEIGHTS_STEP = 1 << 20
"""The KV of a token is its id plus this for each version of the weights."""
ADAPTER_STEP = 1 << 22
"""It is also its id plus this for each number of an adapter's files: `adapter_number`."""


def adapter_number(path: str) -> int:
    """The number of the fake adapter in `path`, which is any text that ends with it. Its weights depend on it alone."""
    digits = path[len(path.rstrip("0123456789")) :]
    if not digits:
        raise ValueError(f"{path} has no adapter")
    return int(digits)


def fingerprint_of(number: int) -> str:
    """The fingerprint of the fake adapter of this number."""
    return f"{number:08x}"


def next_token(ids: Sequence[int] | np.ndarray, seed: int, vocab_size: int, weights: int = 0, adapter: int = 0) -> int:
    """The fake language model. The next token is a hash of all `ids`, in order, of the seed and of the weights.

    `weights`: the number of their version. `adapter`: the number of the adapter's files; 0: none.
    """
    tokens = np.asarray(ids, dtype=np.uint64) + np.uint64(1 + weights * WEIGHTS_STEP + adapter * ADAPTER_STEP)
    mixed = int((tokens * _POWERS[: len(tokens)]).sum(dtype=np.uint64)) ^ (seed & 0xFFFFFFFF)
    mixed ^= mixed >> 29
    mixed = mixed * 0xBF58476D1CE4E5B9 & _UINT64
    mixed ^= mixed >> 32
    return mixed % vocab_size


def next_tokens(ids: Sequence[int], num_following: int, vocab_size: int) -> np.ndarray:
    """`next_token([*ids, i], 0, vocab_size)` for each i below `num_following`."""
    tokens = np.asarray(ids, dtype=np.uint64) + np.uint64(1)
    before = (tokens * _POWERS[: len(tokens)]).sum(dtype=np.uint64)
    mixed = before + np.arange(1, num_following + 1, dtype=np.uint64) * _POWERS[len(tokens)]
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return mixed % np.uint64(vocab_size)


def choose(hashed: int, allowed: np.ndarray | None) -> int:
    """The fake sampler: the token itself, or if it is masked, one that the mask allows."""
    if allowed is None or allowed[hashed]:
        return hashed
    ids = np.flatnonzero(allowed)
    return int(ids[hashed % len(ids)])


def expected_output(
    prompt: Sequence[int],
    seed: int,
    max_new_tokens: int,
    vocab_size: int,
    stop_ids: frozenset[int] = frozenset(),
    weights: int = 0,
    adapter: int = 0,
) -> list[int]:
    """The output tokens that a request must get with any schedule."""
    ids = list(prompt)
    for _ in range(max_new_tokens):
        ids.append(next_token(ids, seed, vocab_size, weights, adapter))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def score(ids: Sequence[int] | np.ndarray, token: int, wish: LogprobOptions, vocab_size: int) -> Logprobs:
    """The fake language model's log probabilities behind `ids`. They are hashes, too, and not ranked."""

    def of(tokens: Sequence[int]) -> bytes:
        return np.array([-next_token([*ids, other], 1, 1 << 20) for other in tokens], np.float32).tobytes()

    top = [next_token(ids, rank, vocab_size) for rank in range(wish.top_logprobs_num)]
    return Logprobs(of([token]), of(top), np.array(top, np.int32).tobytes(), of(wish.token_ids_logprob))


def expected_input(prompt: Sequence[int], wish: LogprobOptions, vocab_size: int) -> Logprobs:
    """The log probabilities that a request must get for its prompt."""
    places = range(wish.input_start(len(prompt)) + 1, len(prompt))
    return Logprobs.concat([score(prompt[:at], prompt[at], wish, vocab_size) for at in places])


def expected_logprobs(
    prompt: Sequence[int], output: Sequence[int], wish: LogprobOptions, vocab_size: int
) -> tuple[Logprobs, Logprobs]:
    """The log probabilities that a request must get for its prompt and its output tokens."""
    ids = [*prompt, *output]
    places = range(len(prompt), len(ids))
    found = Logprobs.concat([score(ids[:at], ids[at], wish, vocab_size) for at in places])
    return expected_input(prompt, wish, vocab_size), found


class FakeStep:
    """A launched step. `sample` must be called before the tokens are read and before the next launch."""

    def __init__(
        self,
        rows: list[list[int]],
        places: list[tuple[int, int, int]],
        runner: FakeRunner,
        logprobs: dict[int, Logprobs],
        prompt_logprobs: list[Logprobs],
        hidden_sums: list[np.ndarray],
        hidden_states: list[np.ndarray],
    ) -> None:
        """`rows`: the new tokens of each sampled row. `places`: their rows of the table, their lengths, and the
        numbers of their drafts."""
        self._hidden = hidden_sums, hidden_states
        self._rows = rows
        self._places = places
        self._runner = runner
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs
        self.is_sampled = False
        self.is_read = False
        """The host has its tokens."""
        self.rows_of_step: list[int] = []

    def sample(self, masks: TokenMasks | None = None) -> None:
        assert not self.is_sampled
        self.is_sampled = True
        if masks is None:
            return
        self._runner.num_masked += len(masks.lines)
        assert (np.diff(masks.lines) > 0).all()
        unpacked = [np.unpackbits(bits.view(np.uint8), bitorder="little") for bits in masks.bits]
        allowed = dict(zip(masks.lines.tolist(), unpacked, strict=True))
        first = 0
        for line, (row, seq_len, num_drafts) in enumerate(self._places):
            of_row = [allowed.get(choice) for choice in range(first, first + num_drafts + 1)]
            first += num_drafts + 1
            if any(mask is not None for mask in of_row):
                slots = self._runner._table[row, :seq_len]
                self._rows[line] = self._runner._verify(row, slots, num_drafts, of_row)
                self._runner.num_masked_drafts += len(self._rows[line]) - 1
                if line in self._logprobs:  # of the chosen token, before the mask
                    self._logprobs[line] = self._runner._score_output(row, slots, num_drafts, self._rows[line])

    def wait(self) -> StepOutput:
        assert self.is_sampled
        self.is_read = True
        tokens = np.array([token for row in self._rows for token in row], dtype=np.int32)
        num_tokens = np.array([len(row) for row in self._rows], dtype=np.int32)
        lens = None if (num_tokens == 1).all() else num_tokens
        return StepOutput(tokens, lens, self._logprobs, self._prompt_logprobs, *self._hidden)


class FakeRunner:
    """Runs `next_token` over a simulated KV pool, in which a slot holds a token, the weights that computed its KV, and
    its position.

    As on a GPU, it reads its own copy of the slot table, which only the table updates of a step change. So a lost,
    overwritten or wrongly shared slot gives wrong tokens or an error. It verifies drafts: a row returns its tokens up
    to the first one that differs from its draft.
    """

    def __init__(
        self,
        table_shape: tuple[int, int],
        pool_size: int,
        page_size: int = 1,
        vocab_size: int = 97,
        num_host_pages: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.steps: list[StepInputs] = []
        self.num_masked = 0
        """Choices with a token mask."""
        self.num_runs_with_drafts = 0
        """Rows with drafts after several known tokens."""
        self.num_masked_drafts = 0
        """Accepted drafts of rows with a token mask."""
        self.invalid_rows: set[int] = set()
        self.poison: int | None = None
        """A token with invalid KV. All later KV of its sequence, and the logits, are invalid, too."""
        self.weights = 0
        """The version of the weights."""
        self.adapters: dict[int, int] = {}
        """The number of the adapter in each slot that has one."""
        self._adapter = np.zeros(table_shape[0], dtype=np.int64)
        """The adapter slot of each row."""
        self.is_nan = np.zeros(pool_size + page_size, dtype=np.bool_)
        """Whether the KV of each slot is invalid."""
        self._table = np.zeros(table_shape, dtype=np.int32)
        self._last: FakeStep | None = None
        self._kv_token = np.full(pool_size + page_size, -1, dtype=np.int64)
        self._kv_position = np.full(pool_size + page_size, -1, dtype=np.int64)
        self.host = np.full((num_host_pages, 3, page_size), -7, dtype=np.int64)
        """The host's KV memory: tokens, positions, and whether they are NaN, of each page."""
        self.states: FakeStates | None = None
        """None: it has no recurrent layers."""
        self._future = np.full(table_shape[0], -1, dtype=np.int64)
        self._seed = np.zeros(table_shape[0], dtype=np.int64)
        self._wishes: dict[int, LogprobOptions | None] = {}

    def launch(self, step: StepInputs) -> FakeStep:
        assert self._last is None or self._last.is_sampled, "the step before was never sampled"
        self.steps.append(step)
        if step.kv_copies is not None:
            self._copy(step.kv_copies)
        assert len(step.rows) == len(set(step.rows.tolist())), "a request twice in a step"
        assert 0 not in step.rows and (step.out_cache_loc > 0).all()
        for update in step.table_updates:
            self._table[update.row, update.start : update.start + len(update.slots)] = update.slots
        for new in step.new_rows:
            self._seed[new.row] = new.seed
            self._wishes[new.row] = new.logprobs
            self._adapter[new.row] = new.adapter
            self._future[new.row] = -1
        is_extend = step.mode is ForwardMode.EXTEND
        lens = step.extend_lens if is_extend else np.ones_like(step.rows)
        wanted = step.sampled if is_extend else np.ones(len(step.rows), dtype=bool)
        offset = 0
        work = []
        drafts = np.zeros_like(step.rows) if step.num_drafts is None else step.num_drafts
        assert (drafts < lens).all() and (step.num_drafts is None or wanted.all())
        self.num_runs_with_drafts += int(((drafts > 0) & (lens - drafts > 1)).sum())
        each = zip(step.rows.tolist(), step.seq_lens.tolist(), lens.tolist(), drafts.tolist(), strict=True)
        for row, seq_len, length, num_drafts in each:
            slots = step.out_cache_loc[offset : offset + length]
            ids = step.input_ids[offset : offset + length].astype(np.int64) if is_extend else np.array([FROM_DEVICE])
            if ids[0] == FROM_DEVICE:
                assert self._future[row] >= 0, "no token on the device for this row"
                ids[0] = self._future[row]
            assert (ids != FROM_DEVICE).all()
            self._table[row, seq_len - length : seq_len] = slots
            self._kv_token[slots] = self._kv_of(ids, row)
            self._kv_position[slots] = np.arange(seq_len - length, seq_len)
            before = self.is_nan[self._table[row, : seq_len - length]].any()
            self.is_nan[slots] = before | np.logical_or.accumulate(ids == self.poison)
            offset += length
            work.append((row, seq_len, num_drafts))
        if self.states is not None:
            self.states.run(step, lens, lambda row, end: self._kv_token[self._table[row, :end]])
        rows, places = [], []
        logprobs = {}
        for (row, seq_len, num_drafts), is_wanted in zip(work, wanted.tolist(), strict=True):
            slots = self._table[row, :seq_len]
            assert (self._kv_position[slots] == np.arange(seq_len)).all(), f"row {row} reads KV of other positions"
            if is_wanted:
                rows.append(self._verify(row, slots, num_drafts))
                places.append((row, seq_len, num_drafts))
                if self._wishes.get(row) is not None:
                    logprobs[len(rows) - 1] = self._score_output(row, slots, num_drafts, rows[-1])
        scores = [self._score_prompt(step, one) for one in step.prompt_scores]
        hidden_sums = [self._sum_hidden(step, one) for one in step.hidden_sums]
        states = [self._hidden_of(step, one) for one in step.hidden_states]
        self._last = FakeStep(rows, places, self, logprobs, scores, hidden_sums, states)
        self._last.rows_of_step = step.rows.tolist()
        return self._last

    def _copy(self, copies: KVCopies) -> None:
        assert 0 not in copies.out_pages and 0 not in copies.in_pages
        assert len(set(copies.in_pages.tolist())) == len(copies.in_pages)
        held = [array.reshape(-1, self.host.shape[2]) for array in (self._kv_token, self._kv_position, self.is_nan)]
        for index, array in enumerate(held):
            self.host[copies.out_host, index] = array[copies.out_pages]
        for index, array in enumerate(held):
            array[copies.in_pages] = self.host[copies.in_host, index]

    def _hidden_of(self, step: StepInputs, wanted: HiddenRange) -> np.ndarray:
        """The hidden state of a token is the token, its position and 1."""
        slots = step.out_cache_loc[wanted.start : wanted.start + wanted.length]
        columns = self._kv_token[slots], self._kv_position[slots], np.ones(len(slots))
        return np.stack(columns, axis=1).astype(np.float32)

    def _sum_hidden(self, step: StepInputs, wanted: HiddenSum) -> np.ndarray:
        """The hidden state of a token is the token, its position and 1."""
        slots = step.out_cache_loc[wanted.start : wanted.start + wanted.length]
        sums = [self._kv_token[slots].sum(), self._kv_position[slots].sum(), wanted.length]
        return (np.array(sums) / HIDDEN_UNIT).astype(np.int64)

    def _verify(
        self, row: int, slots: np.ndarray, num_drafts: int, masks: Sequence[np.ndarray | None] = ()
    ) -> list[int]:
        """The new tokens of a row whose last `num_drafts` slots hold drafts. `masks`: those of its choices."""
        tokens: list[int] = []
        first = len(slots) - num_drafts
        for end in range(first, len(slots) + 1):
            hashed = next_token(self._kv_token[slots[:end]], int(self._seed[row]), self.vocab_size)
            self._future[row] = choose(hashed, masks[end - first] if masks else None)
            is_invalid = row in self.invalid_rows or self.is_nan[slots[:end]].any()
            tokens.append(INVALID_TOKEN if is_invalid else int(self._future[row]))
            if is_invalid or end == len(slots) or self._kv_token[slots[end]] != self._kv_of(tokens[-1], row):
                break
        return tokens

    def _kv_of(self, ids: Any, row: int) -> Any:
        """The KV of tokens of a row: int or int64 [n]."""
        slot = int(self._adapter[row])
        return ids + self.weights * WEIGHTS_STEP + (self.adapters[slot] * ADAPTER_STEP if slot else 0)

    def load_adapter(self, slot: int, path: str) -> str:
        """Raises ValueError for a path that does not end with a number."""
        assert slot not in self.adapters
        self._check_unused(slot)
        self.adapters[slot] = adapter_number(path)
        return fingerprint_of(self.adapters[slot])

    def unload_adapter(self, slot: int) -> None:
        self._check_unused(slot)
        del self.adapters[slot]

    def _check_unused(self, slot: int) -> None:
        """No row of the last step has the adapter slot, unless the host has its tokens already."""
        if self._last is not None and not self._last.is_read:
            assert not any(self._adapter[row] == slot for row in self._last.rows_of_step), "the slot is in use"

    def _score_output(self, row: int, slots: np.ndarray, num_drafts: int, tokens: list[int]) -> Logprobs:
        wish = self._wishes[row]
        assert wish is not None
        ids, first = self._kv_token[slots], len(slots) - num_drafts
        places = enumerate(tokens, start=first)
        scores = [score(ids[:end], max(token, 0), wish, self.vocab_size) for end, token in places]  # -1: invalid logits
        return Logprobs.concat(scores)

    def _score_prompt(self, step: StepInputs, one: PromptScore) -> Logprobs:
        wish = self._wishes[one.row]
        assert wish is not None and len(one.targets)
        slots = step.out_cache_loc[one.start : one.start + len(one.targets)]
        first = int(self._kv_position[slots[0]])
        assert (self._table[one.row, first : first + len(slots)] == slots).all(), "tokens of another row"
        ids = self._kv_token[self._table[one.row, : first + len(slots)]]
        places = range(first + 1, first + 1 + len(slots))
        scores = zip(places, one.targets.tolist(), strict=True)
        return Logprobs.concat([score(ids[:at], target, wish, self.vocab_size) for at, target in scores])


class FakeInbox:
    """A list of messages. `on_idle` is called when the scheduler would sleep."""

    def __init__(self, on_idle: Callable[[], None] = lambda: None) -> None:
        self.messages: list = []
        self.num_sleeps = 0
        self._on_idle = on_idle

    def drain(self) -> list:
        messages, self.messages = self.messages, []
        return messages

    def wait(self, timeout_s: float) -> bool:
        self.num_sleeps += 1
        self._on_idle()
        return bool(self.messages)


class FakeOutbox:
    def __init__(self) -> None:
        self.messages: list = []

    def send(self, message: object) -> None:
        self.messages.append(message)


class FakeClock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

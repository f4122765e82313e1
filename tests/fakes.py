"""Fakes for tests of the scheduler: a model whose tokens depend on every KV slot it reads, queues, and a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tercet.model_executor.step import FROM_DEVICE, ForwardMode, StepInputs, StepOutput

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def next_token(ids: Sequence[int] | np.ndarray, seed: int, vocab_size: int) -> int:
    """The fake language model. The next token is a hash of all `ids`, in order, and of the seed."""
    tokens = np.asarray(ids, dtype=np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(len(tokens), _MULTIPLIER, dtype=np.uint64))
        mixed = (tokens * powers).sum(dtype=np.uint64) ^ np.uint64(seed & 0xFFFFFFFF)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
    return int(mixed % np.uint64(vocab_size))


def expected_output(
    prompt: Sequence[int], seed: int, max_new_tokens: int, vocab_size: int, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    """The output tokens that a request must get with any schedule."""
    ids = list(prompt)
    for _ in range(max_new_tokens):
        ids.append(next_token(ids, seed, vocab_size))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


class FakeStep:
    """A launched step. `sample` must be called before the tokens are read and before the next launch."""

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens
        self.is_sampled = False

    def sample(self) -> None:
        assert not self.is_sampled
        self.is_sampled = True

    def wait(self) -> StepOutput:
        assert self.is_sampled
        return StepOutput(self._tokens)


class FakeRunner:
    """Runs `next_token` over a simulated KV pool, in which a slot holds a token and its position.

    As on a GPU, it reads its own copy of the slot table, which only the table updates of a step change. So a lost,
    overwritten or wrongly shared slot gives wrong tokens or an error.
    """

    def __init__(self, table_shape: tuple[int, int], pool_size: int, page_size: int = 1, vocab_size: int = 97) -> None:
        self.vocab_size = vocab_size
        self.steps: list[StepInputs] = []
        self.invalid_rows: set[int] = set()
        self.poison: int | None = None
        """A token with invalid KV. All later KV of its sequence, and the logits, are invalid, too."""
        self.is_nan = np.zeros(pool_size + page_size, dtype=np.bool_)
        """Whether the KV of each slot is invalid."""
        self._table = np.zeros(table_shape, dtype=np.int32)
        self._last: FakeStep | None = None
        self._kv_token = np.full(pool_size + page_size, -1, dtype=np.int64)
        self._kv_position = np.full(pool_size + page_size, -1, dtype=np.int64)
        self._future = np.full(table_shape[0], -1, dtype=np.int64)
        self._seed = np.zeros(table_shape[0], dtype=np.int64)

    def launch(self, step: StepInputs) -> FakeStep:
        assert self._last is None or self._last.is_sampled, "the step before was never sampled"
        self.steps.append(step)
        assert len(step.rows) == len(set(step.rows.tolist())), "a request twice in a step"
        assert 0 not in step.rows and (step.out_cache_loc > 0).all()
        for update in step.table_updates:
            self._table[update.row, update.start : update.start + len(update.slots)] = update.slots
        for new in step.new_rows:
            self._seed[new.row] = new.seed
            self._future[new.row] = -1
        is_extend = step.mode is ForwardMode.EXTEND
        lens = step.extend_lens if is_extend else np.ones_like(step.rows)
        wanted = step.sampled if is_extend else np.ones(len(step.rows), dtype=bool)
        offset = 0
        work = []
        for row, seq_len, length in zip(step.rows.tolist(), step.seq_lens.tolist(), lens.tolist(), strict=True):
            slots = step.out_cache_loc[offset : offset + length]
            ids = step.input_ids[offset : offset + length].astype(np.int64) if is_extend else np.array([FROM_DEVICE])
            if (ids == FROM_DEVICE).any():
                assert length == 1 and self._future[row] >= 0, "no token on the device for this row"
                ids = self._future[row : row + 1].copy()
            self._table[row, seq_len - length : seq_len] = slots
            self._kv_token[slots] = ids
            self._kv_position[slots] = np.arange(seq_len - length, seq_len)
            before = self.is_nan[self._table[row, : seq_len - length]].any()
            self.is_nan[slots] = before | np.logical_or.accumulate(ids == self.poison)
            offset += length
            work.append((row, seq_len))
        tokens = []
        for (row, seq_len), is_wanted in zip(work, wanted.tolist(), strict=True):
            slots = self._table[row, :seq_len]
            assert (self._kv_position[slots] == np.arange(seq_len)).all(), f"row {row} reads KV of other positions"
            if is_wanted:
                token = next_token(self._kv_token[slots], int(self._seed[row]), self.vocab_size)
                tokens.append(-1 if row in self.invalid_rows or self.is_nan[slots].any() else token)
                self._future[row] = token
        self._last = FakeStep(np.array(tokens, dtype=np.int32))
        return self._last


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

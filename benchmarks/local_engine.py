"""The scheduler and the runner in this process, without sockets, to measure the steps of a model alone.

There are two ways to run steps. `TimedEngine.run_decode` sends requests through the scheduler, with or without overlap
as its settings say. `DirectBatch` calls the runner directly, with random keys and values as context, which need no
prefill.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import torch

from ..managers.local_engine import LocalEngine
from ..model_executor.step import ForwardMode, Int32Array, LaunchedStep, NewRow, StepInputs, TableUpdate
from ..srt.sampling_params import SamplingParams
from ..srt.server_args import ServerArgs
from .timing import synchronize

_PROMPT_ID_LIMIT = 10_000
"""Random prompts have token ids below this limit and below the vocabulary size."""
_SEED = 0
"""Of random prompts and contexts."""
_NEVER = 1 << 30
"""Tokens between two outputs of a request, because nobody reads them while the clock runs."""
_SETTLE_STEPS = 8
"""Number of decode steps that are not timed, after the last prefill."""


class DecodeTime(NamedTuple):
    """The time of decode steps."""

    step_s: float
    """mean seconds of a step"""
    context_len: float
    """mean number of tokens that a request attends to"""


class TimedEngine(LocalEngine):
    """A LocalEngine without a tokenizer, with methods that measure steps."""

    def __init__(self, server_args: ServerArgs) -> None:
        """Dummy weights have seed 0 unless the settings give one."""
        super().__init__(
            server_args=dataclasses.replace(
                server_args,
                skip_tokenizer_init=True,
                random_seed=server_args.random_seed or 0,
                stream_interval=_NEVER,
                admission_watermark=0.0,  # a batch takes the whole pool
            )
        )
        self.device = self.runner.settings.device
        self._rng = np.random.default_rng(_SEED)
        self._num_submitted = 0

    def random_ids(self, count: int, rng: np.random.Generator | None = None) -> Int32Array:
        """Random token ids. `rng`: the generator; None: the engine's own, which gives different ids in each call."""
        limit = min(_PROMPT_ID_LIMIT, self.model_config.vocab_size)
        return (rng or self._rng).integers(0, limit, count, dtype=np.int32)

    def check_room(self, batch_size: int, num_tokens: int) -> None:
        """Raises ValueError unless `batch_size` requests of `num_tokens` tokens each can run at once."""
        runner, max_rows = self.runner, self.runner.settings.max_running_requests
        if batch_size > max_rows:
            raise ValueError(f"batch {batch_size} is more than --max-running-requests {max_rows}")
        if num_tokens > runner.settings.context_len:
            raise ValueError(f"{num_tokens} tokens are more than the context of {runner.settings.context_len}")
        if num_tokens > self._share_of_pool(batch_size):
            pages = "" if self._page_size == 1 else f" in pages of {self._page_size}"
            raise ValueError(
                f"{batch_size} x {num_tokens} tokens{pages} are more than the KV pool's {runner.max_total_num_tokens}"
            )

    @property
    def _page_size(self) -> int:
        return self.runner.settings.page_size

    def _share_of_pool(self, batch_size: int) -> int:
        """Tokens that each of `batch_size` requests can have, in whole pages."""
        num_pages = self.runner.max_total_num_tokens // self._page_size
        return num_pages // batch_size * self._page_size

    def run_decode(
        self,
        batch_size: int,
        context_len: int,
        num_steps: int,
        window: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> DecodeTime:
        """Time decode steps through the scheduler: `num_steps` consecutive steps of `batch_size` requests.

        First, prompts of `context_len` random tokens are prefilled. The scheduler lets requests decode between the
        prefills of others, so the first requests are some tokens ahead when the clock starts. `window`: makes a context
        manager that is entered for the timed steps.

        Raises ValueError if the requests do not fit, or if one ends before the last timed step.
        """
        self.check_room(batch_size, context_len + num_steps + _SETTLE_STEPS + 2)
        # As long as can be, because the first requests are ahead. The scheduler admits the last request only if a page
        # for each request is left over.
        longest = min(self._share_of_pool(batch_size) - self._page_size, self.runner.settings.context_len)
        sampling = SamplingParams(
            max_new_tokens=longest - context_len, temperature=0.0, ignore_eos=True, sampling_seed=0
        )
        started = self._num_submitted
        self._num_submitted += batch_size
        names = [str(index) for index in range(started, self._num_submitted)]
        for name in names:
            self.add_request(name, self.random_ids(context_len).tolist(), sampling)
        try:
            return self._time_decodes(batch_size, num_steps, window)
        finally:
            for name in names:
                self.abort(name)
            while self.has_unfinished():
                self.step()
            self.step()  # with overlap, one more step may be in flight

    def _time_decodes(
        self, batch_size: int, num_steps: int, window: Callable[[], AbstractContextManager[object]]
    ) -> DecodeTime:
        """Prefill the waiting requests, then time `num_steps` steps."""
        running = self.scheduler.queues.running
        while not (len(running) == batch_size and all(req.output_ids for req in running)):
            self._step_without_end()
        for _ in range(_SETTLE_STEPS):
            self._step_without_end()
        begin = sum(req.kv_len for req in running)
        with window():
            synchronize(self.device)
            start = time.perf_counter()
            for _ in range(num_steps):
                self._step_without_end()
            synchronize(self.device)
            seconds = (time.perf_counter() - start) / num_steps
        return DecodeTime(seconds, begin / batch_size + (num_steps + 1) / 2)

    def _step_without_end(self) -> None:
        for name, finish in self.step().finish_reasons.items():
            raise ValueError(
                f"request {name} ended before the last timed step ({finish}): the KV pool and the context leave too "
                "little room for the tokens that it decodes while other prompts are prefilled"
            )


class DirectBatch:
    """A batch whose steps run directly on the runner. Use it only while the scheduler is idle.

    It has `batch_size` rows with `context_len` tokens each. The keys and values of all but the last token are random
    numbers. They are the same in each engine, for the same size.
    """

    def __init__(self, engine: TimedEngine, batch_size: int, context_len: int, num_steps: int) -> None:
        engine.check_room(batch_size, context_len + num_steps)
        self._engine = engine
        self._runner = engine.runner
        self._rng = np.random.default_rng(_SEED)
        kv = engine.scheduler.kv
        kv.flush()
        self._table = kv.req_to_token_pool.req_to_token
        rows = [kv.req_to_token_pool.alloc() for _ in range(batch_size)]
        self.rows = np.array(rows, dtype=np.int32)
        self._context_len = context_len
        self.lens = np.full(batch_size, context_len, dtype=np.int32)
        none = np.zeros(batch_size, dtype=np.int32)
        slots = kv.allocator.alloc_extend(none, self.lens, none)
        assert slots is not None, "check_room said that there is room"
        self._table[self.rows, :context_len] = slots.reshape(batch_size, context_len)
        self._fill(slots)
        self._allocator = kv.allocator
        self.tokens = [self._launch(self._first_step(context_len)).wait().tokens]
        """Output tokens of each step so far, int32 [B]."""
        self._steps = [self._decode_step() for _ in range(num_steps)]

    @classmethod
    @contextmanager
    def of(cls, engine: TimedEngine, batch_size: int, context_len: int, num_steps: int) -> Iterator[DirectBatch]:
        """A DirectBatch whose KV memory is released at the end of the `with` block."""
        try:
            yield cls(engine, batch_size, context_len, num_steps)
        finally:
            engine.scheduler.kv.flush()

    def decode(self, num_steps: int) -> float:
        """Mean seconds of one decode step, over `num_steps` consecutive steps.

        Each step is launched before the tokens of the step before it are read.
        """
        steps, self._steps = self._steps[:num_steps], self._steps[num_steps:]
        assert len(steps) == num_steps, "more steps than were made room for"
        synchronize(self._engine.device)
        start = time.perf_counter()
        pending: LaunchedStep | None = None
        for step in steps:
            launched = self._launch(step)
            if pending is not None:
                self.tokens.append(pending.wait().tokens)
            pending = launched
        assert pending is not None
        self.tokens.append(pending.wait().tokens)
        synchronize(self._engine.device)
        return (time.perf_counter() - start) / num_steps

    def prefill(self) -> float:
        """Seconds of one prefill of the whole context of every row, from its launch to its tokens."""
        ends = np.full(len(self.rows), self._context_len, dtype=np.int32)
        step = self._extend_step(np.zeros_like(ends), ends, self._engine.random_ids(int(ends.sum())))
        synchronize(self._engine.device)
        start = time.perf_counter()
        self._launch(step).wait()
        return time.perf_counter() - start

    def _launch(self, step: StepInputs) -> LaunchedStep:
        launched = self._runner.launch(step)
        launched.sample()
        return launched

    def _fill(self, slots: Int32Array) -> None:
        """Fills the slots with random numbers, because a step could run faster on zeros."""
        where = torch.from_numpy(slots.astype(np.int64)).to(self._engine.device)
        pool = self._runner.kv_pool
        config = self._engine.model_config
        dtype = self._runner.settings.dtype  # the pool's may be fp8, which has no random numbers
        kv = torch.empty(2, len(slots), config.num_kv_heads, config.head_dim, device=where.device, dtype=dtype)
        numbers = torch.Generator(where.device).manual_seed(_SEED)
        for stored in pool.conv_buffer:
            stored[where] = stored.new_empty(len(slots), stored.shape[1]).normal_(generator=numbers)
        for layer in range(len(config.attention_layers)):
            k, v = kv.normal_(generator=numbers)
            pool.set_kv(layer, where, k, v if config.latent_dim is None else k[..., : config.latent_dim])

    def _first_step(self, context_len: int) -> StepInputs:
        """The step of the context's last token. It also sends the new rows and the slot table to the runner."""
        step = self._extend_step(self.lens - 1, self.lens, self._engine.random_ids(len(self.rows), self._rng))
        step.table_updates = [TableUpdate(int(row), 0, self._table[row, :context_len].copy()) for row in self.rows]
        greedy = SamplingParams(temperature=0.0, ignore_eos=True)
        nothing = np.empty(0, dtype=np.int32)
        step.new_rows = [NewRow(int(row), greedy, 0, nothing, nothing, ()) for row in self.rows]
        return step

    def _extend_step(self, starts: Int32Array, ends: Int32Array, ids: Int32Array) -> StepInputs:
        bounds = zip(self.rows, starts, ends, strict=True)
        return StepInputs(
            mode=ForwardMode.EXTEND,
            rows=self.rows,
            seq_lens=ends.copy(),
            out_cache_loc=np.concatenate([self._table[row, start:end] for row, start, end in bounds]),
            extend_lens=ends - starts,
            input_ids=ids,
            sampled=np.ones(len(ends), dtype=np.bool_),
        )

    def _decode_step(self) -> StepInputs:
        last = self._table[self.rows, self.lens - 1]
        self.lens = self.lens + 1
        slots = self._allocator.alloc_decode(self.lens, last)
        assert slots is not None, "check_room said that there is room"
        self._table[self.rows, self.lens - 1] = slots
        return StepInputs(mode=ForwardMode.DECODE, rows=self.rows, seq_lens=self.lens, out_cache_loc=slots)

"""Drives a ModelRunner as the scheduler does, request by request, and keeps the logits of every sampled token."""

from __future__ import annotations

import numpy as np
import torch

from tercet.model_executor.step import (
    FROM_DEVICE,
    ForwardMode,
    NewRow,
    StateCopies,
    StateSaves,
    StepInputs,
    TableUpdate,
)
from tercet.srt.sampling_params import SamplingParams


class RunnerDriver:
    """Runs requests on a runner. Each request has one row, and its pages are in random order."""

    def __init__(self, runner, seed=0, masks=None):
        """`masks`: makes the token masks of a step from its number of sampled rows."""
        self.runner = runner
        self.masks = masks
        self.table = np.zeros((runner.settings.max_running_requests + 1, runner.settings.context_len), np.int32)
        # Unused slots hold NaN, so that a step that reads one by mistake gives NaN.
        page = runner.settings.page_size
        pages = np.arange(page, runner.max_total_num_tokens + page).reshape(-1, page)
        for buffer in (*runner.kv_pool.k_buffer, *runner.kv_pool.v_buffer):
            blocks = (runner.max_total_num_tokens + page) // len(buffer)
            buffer[page // blocks :] = float("nan")
        self.free = np.random.default_rng(seed).permutation(pages)
        self.lens = {}
        self.logits = []
        self._updates = []
        self._copies = []
        self._sample = runner.sampler.sample
        runner.sampler.sample = self._record
        runner.sampler.takes_most_probable = lambda *_: False  # greedy steps may compute tokens without logits

    def _record(self, logits, *arguments):
        self.logits.append(logits.clone())
        return self._sample(logits, *arguments)

    def add(self, row, sampling=None, adapter=0):
        """Starts a request in `row`. Pass the result to `extend` in `new_rows`."""
        self.lens[row] = 0
        none = np.empty(0, np.int32)
        return NewRow(
            row=row,
            sampling=sampling or SamplingParams(temperature=0.0),
            seed=0,
            prompt_ids=none,
            output_ids=none,
            stop_ids=(),
            adapter=adapter,
        )

    def _grow(self, row, count):
        start, page = self.lens[row], self.runner.settings.page_size
        end = start + count
        first, num = -(-start // page), -(-end // page) - -(-start // page)
        assert num <= len(self.free)
        taken, self.free = self.free[:num], self.free[num:]
        for at, slots in enumerate(taken, start=first):
            room = self.table[row, at * page : (at + 1) * page]
            room[:] = slots[: len(room)]
        self.lens[row] = end
        return self.table[row, start:end].copy()

    def share(self, row, other, length):
        """A new request in `row` continues the first `length` tokens of another."""
        self.table[row, :length] = self.table[other, :length]
        self._updates.append(TableUpdate(row, 0, self.table[row, :length].copy()))
        self.lens[row] = length

    def copy_state(self, source, target):
        """Copies the state of a row before the next step."""
        self._copies.append((source, target))

    def extend(self, chunks, sampled=None, new_rows=(), num_drafts=None, saves=None):
        """Runs an extend step. Returns its tokens. `saves`: the length and the row of each state to save, by row.

        `chunks`: {row: token ids, or None for the row's newest token on the device}. `num_drafts`: how many of the last
        tokens of each are drafts.
        """
        rows = np.array(list(chunks), np.int32)
        ids = [np.array([FROM_DEVICE] if part is None else part, np.int32) for part in chunks.values()]
        slots = [self._grow(row, len(part)) for row, part in zip(chunks, ids, strict=True)]
        step = StepInputs(
            mode=ForwardMode.EXTEND,
            rows=rows,
            seq_lens=np.array([self.lens[row] for row in chunks], np.int32),
            out_cache_loc=np.concatenate(slots).astype(np.int32),
            new_rows=list(new_rows),
            extend_lens=np.array([len(part) for part in ids], np.int32),
            input_ids=np.concatenate(ids),
            sampled=np.ones(len(rows), bool) if sampled is None else np.array(sampled),
            num_drafts=None if num_drafts is None else np.array(num_drafts, np.int32),
            state_saves=None if saves is None else StateSaves(*_columns([saves[row] for row in chunks])),
        )
        return self._run(step)

    def decode(self, rows, forced=None):
        """Runs a decode step: one token for each row. `forced`: input tokens in place of the newest ones."""
        if forced is not None:
            self.runner.future_tokens[torch.tensor(list(rows))] = torch.tensor(
                forced, device=self.runner.settings.device
            )
        slots = np.concatenate([self._grow(row, 1) for row in rows]).astype(np.int32)
        step = StepInputs(
            mode=ForwardMode.DECODE,
            rows=np.array(list(rows), np.int32),
            seq_lens=np.array([self.lens[row] for row in rows], np.int32),
            out_cache_loc=slots,
        )
        return self._run(step)

    def _run(self, step):
        step.table_updates, self._updates = self._updates, []
        if self._copies:
            step.state_copies = StateCopies(*_columns(self._copies))
            self._copies = []
        launched = self.runner.launch(step)
        launched.sample(None if self.masks is None else self.masks(step.num_choices))
        return launched.wait().tokens

    def logits_along(self, row, ids, chunks, adapter=0):
        """Runs one request's `ids` in chunks of these lengths, and the remaining ids in decode steps.

        Returns {position: logits of its token}.
        """
        found = {}
        end = 0
        new_rows = [self.add(row, adapter=adapter)]
        for length in chunks:
            self.extend({row: ids[end : end + length]}, new_rows=new_rows)
            new_rows = []
            end += length
            found[end - 1] = self.logits[-1][0]
        for position in range(end, len(ids)):
            self.decode([row], [int(ids[position])])
            found[position] = self.logits[-1][0]
        return found


def short_logits(runner):
    """The logits of a prompt and of two decode steps, [3, vocab]. The vocabulary has at least 131 tokens."""
    driver = RunnerDriver(runner)
    prompt, decoded = np.split(np.random.default_rng(3).integers(0, 131, 40), [38])
    driver.extend({1: prompt}, new_rows=[driver.add(1)])
    for token in decoded:
        driver.decode([1], [int(token)])
    runner.sampler.sample = driver._sample
    return torch.cat(driver.logits)


def relative_error(actual, expected):
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


def _columns(pairs):
    """The first and the second numbers of pairs, int32 [n] each."""
    return np.array(pairs, np.int32).T.copy()

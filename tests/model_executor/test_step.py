"""A step travels: a worker in another process, with a table and a pool of its own, gets the same tokens from it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from patience import PATIENCE_S
from runner_driver import RunnerDriver
from toy_runner import TOY_QWEN, make_toy_runner

from tercet.mem_cache.req_to_token_pool import TableUpdate
from tercet.model_executor.step import (
    ForwardMode,
    HiddenRange,
    HiddenSum,
    PromptScore,
    StepInputs,
    StepOutput,
    decode_step,
    encode_step,
)
from tercet.srt.logprobs import LogprobOptions, Logprobs
from tercet.srt.sampling_params import SamplingParams

# Frames of a 4-byte length and a step on stdin; the output of each on stdout, in the same form.
WORKER = """
import sys
import msgspec
from tercet.model_executor.step import decode_step
from toy_runner import TOY_QWEN, make_toy_runner

runner = make_toy_runner(TOY_QWEN, attention_backend="torch")
while head := sys.stdin.buffer.read(4):
    launched = runner.launch(decode_step(sys.stdin.buffer.read(int.from_bytes(head, "little"))))
    launched.sample()
    out = launched.wait()
    sums = [one.tolist() for one in (*out.hidden_sums, *out.hidden_states)]
    found = msgspec.msgpack.encode((out.tokens.tolist(), out.logprobs, out.prompt_logprobs, sums))
    sys.stdout.buffer.write(len(found).to_bytes(4, "little") + found)
    sys.stdout.buffer.flush()
"""


Output = tuple[list[int], dict[int, Logprobs], list[Logprobs], list[list]]
"""Tokens, their log probabilities, those of prompts, sums of hidden states, and hidden states."""


class Worker:
    """A runner in a process of its own, behind two pipes (a Runner)."""

    def __init__(self) -> None:
        code = f"import sys; sys.path[:0] = {sys.path!r}\n{WORKER}"
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def output(self, step: StepInputs) -> Output:
        data = encode_step(step)
        self._process.stdin.write(len(data).to_bytes(4, "little") + data)
        self._process.stdin.flush()
        size = int.from_bytes(self._process.stdout.read(4), "little")
        return msgspec.msgpack.decode(self._process.stdout.read(size), type=Output)

    def close(self) -> None:
        self._process.stdin.close()
        assert self._process.wait(PATIENCE_S) == 0
        self._process.stdout.close()


def test_a_worker_in_another_process_runs_the_steps() -> None:
    driver = RunnerDriver(make_toy_runner(TOY_QWEN, attention_backend="torch"))
    worker = Worker()
    launch, compared = driver.runner.launch, []

    def launch_both(step: StepInputs) -> object:
        if step.new_rows and step.new_rows[0].row == 3:
            step.prompt_scores = [PromptScore(3, 1, np.array([7, 6, 5], np.int32))]
            step.hidden_sums = [HiddenSum(0, 2), HiddenSum(3, 1)]
            step.hidden_states = [HiddenRange(1, 3)]
        theirs = worker.output(step)
        launched = launch(step)
        wait = launched.wait

        def compare() -> StepOutput:
            out = wait()
            sums = [one.tolist() for one in (*out.hidden_sums, *out.hidden_states)]
            compared.append(((out.tokens.tolist(), out.logprobs, out.prompt_logprobs, sums), theirs))
            return out

        launched.wait = compare
        return launched

    driver.runner.launch = launch_both
    sampled = SamplingParams(temperature=0.9, top_p=0.8, repetition_penalty=1.3, logit_bias={"3": 1.5})
    driver.extend({1: [5, 6, 7], 2: [8]}, new_rows=[driver.add(1), driver.add(2, sampled)])
    wish = LogprobOptions(logprob_start_len=1, top_logprobs_num=2, token_ids_logprob=[4])
    third = dataclasses.replace(driver.add(3), logprobs=wish)
    driver.extend({3: [9, 8, 7, 6], 1: None}, sampled=[False, True], new_rows=[third])
    driver.extend({3: [5, 4], 2: None})
    for rows in ([1, 2, 3], [2], [3, 1]):
        driver.decode(rows)
    worker.close()
    assert len(compared) == 6 and all(ours == theirs for ours, theirs in compared), compared
    assert [len(out[1]) for out, _ in compared] == [0, 0, 1, 1, 0, 1]
    assert [len(found) for out, _ in compared for found in out[2]] == [3]
    assert [len(found) for out, _ in compared for found in out[3]] == [driver.runner.config.hidden_size] * 2 + [3]


def test_a_cached_prefix_travels_with_its_slots() -> None:
    """A request that finds its prefix in the cache names the slots of it; the worker's table knows them from nowhere
    else."""
    runner = make_toy_runner(TOY_QWEN, attention_backend="torch")
    driver = RunnerDriver(runner)
    ids = [3, 1, 4, 1, 5, 9]
    (expected,) = driver.extend({1: ids}, new_rows=[driver.add(1)])
    prefix = driver.table[1, :4].copy()
    (slot, last) = driver.free[0][0], driver.free[1][0]
    step = StepInputs(
        mode=ForwardMode.EXTEND,
        rows=np.array([2], np.int32),
        seq_lens=np.array([6], np.int32),
        out_cache_loc=np.array([slot, last], np.int32),
        new_rows=[driver.add(2)],
        table_updates=[TableUpdate(2, 0, prefix)],
        extend_lens=np.array([2], np.int32),
        input_ids=np.array(ids[4:], np.int32),
        sampled=np.array([True]),
    )
    launched = runner.launch(decode_step(encode_step(step)))
    launched.sample()
    assert launched.wait().tokens.tolist() == [expected]


def test_what_is_no_step_is_refused() -> None:
    for data in (b"", b"\x80", msgspec.msgpack.encode({"mode": "extend", "rows": 3})):
        with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
            decode_step(data)


def test_the_next_tokens_may_be_chosen_later() -> None:
    """A mask may depend on the tokens of the step before: the choice waits for them, the forward pass does not."""
    tokens = []
    for late in (False, True):
        driver = RunnerDriver(make_toy_runner(TOY_QWEN, attention_backend="torch"))
        driver.extend({1: [5, 6, 7]}, new_rows=[driver.add(1)])
        steps, before = [], None
        for _ in range(5):
            slots = driver._grow(1, 1)
            step = StepInputs(ForwardMode.DECODE, np.array([1], np.int32), np.array([driver.lens[1]], np.int32), slots)
            launched = driver.runner.launch(step)
            if late and before is not None:
                before.wait()
            launched.sample()
            steps.append(launched)
            before = launched
        tokens.append([launched.wait().tokens.tolist() for launched in steps])
    assert tokens[0] == tokens[1]


def test_rows_of_an_output() -> None:
    assert StepOutput(np.array([4, -1, 6], np.int32)).rows() == [(4,), (-1,), (6,)]
    ragged = StepOutput(np.array([4, 5, 6, 7], np.int32), np.array([1, 3], np.int32))
    assert ragged.rows() == [(4,), (5, 6, 7)]
    assert StepOutput(np.empty(0, np.int32)).rows() == []


def test_starts_and_positions_of_new_tokens():
    step = StepInputs(
        mode=ForwardMode.EXTEND,
        rows=np.array([2, 1, 7], np.int32),
        seq_lens=np.array([5, 3, 8], np.int32),
        out_cache_loc=np.arange(6, dtype=np.int32),
        extend_lens=np.array([2, 3, 1], np.int32),
    )
    assert step.starts.tolist() == [0, 2, 5, 6] and step.positions.tolist() == [3, 4, 0, 1, 2, 7]
    decode = dataclasses.replace(step, mode=ForwardMode.DECODE, out_cache_loc=step.rows, extend_lens=None)
    assert decode.starts.tolist() == [0, 1, 2, 3] and decode.positions.tolist() == [4, 2, 7]

"""Greedy outputs on the real model in fp32 are those of `transformers`, token for token, however they are scheduled."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import pytest
import torch
from default_model import generate, is_greedy, model_path, prompts
from runners import make_settings
from some_cases import ALL_CASES, crossed

from fakes import FakeInbox, FakeOutbox
from tercet.managers.scheduler import InFlight
from tercet.managers.scheduler_io import SchedulerIO
from tercet.managers.scheduler_process import build_scheduler
from tercet.managers.token_out_reader import TokenOutReader
from tercet.model_executor import cpu_extension
from tercet.model_executor.layers.linear import can_pack
from tercet.model_executor.runner.load import load_runner
from tercet.srt.io_struct import GenerateReq, pack_ids
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.server_args import ServerArgs
from tercet.srt.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.timeout(300)

NUM_PROMPTS = int(os.environ.get("TERCET_PARITY_PROMPTS", "50" if ALL_CASES else "31"))
"""A usual run takes every other one. The longest is the 31st. Emulators have time for a few. `test_alone` and
`test_in_batches` need only one."""
NEW_TOKENS = 16

TOKENIZER = load_tokenizer(str(model_path()))
PROMPTS = prompts(TOKENIZER, NUM_PROMPTS)[:: 1 if ALL_CASES else 2]


class InProcessEngine:
    """The scheduler on the real model, without processes and sockets; audits the books after every turn."""

    def __init__(self, *, onednn: bool = False, **settings: Any) -> None:
        """`onednn`: with oneDNN's linear layers, for which matrices must have the type of the activations."""
        args = ServerArgs(model_path=str(model_path()), dtype="float32", max_total_tokens=16384)
        args = dataclasses.replace(args, **settings)
        config = load_model_config(args.model_path)
        runner_settings = make_settings(
            config,
            max_running_requests=args.max_running_requests,
            dtype=args.dtype,
            attention_backend=args.attention_backend,
            page_size=args.page_size,
            max_total_tokens=args.max_total_tokens,
        )
        if onednn:
            runner_settings = dataclasses.replace(
                runner_settings, weight_dtype=torch.float32, weight_forms={}, onednn=True
            )
        runner = load_runner(runner_settings, config)
        self.inbox = FakeInbox()
        self.outbox = FakeOutbox()
        io = SchedulerIO(self.inbox, self.outbox, FakeOutbox(), time.monotonic)
        self.scheduler = build_scheduler(args, config, runner, TOKENIZER, io, time.monotonic)
        # A CPU gains nothing by it, but has to get it right as well.
        self.scheduler._enable_overlap = not args.disable_overlap_schedule

    def generate(self, batch: list[list[int]]) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, sampling_seed=0)
        options = RequestOptions(sampling=sampling)
        for index, prompt in enumerate(batch):
            self.inbox.messages.append(GenerateReq(str(index), pack_ids(prompt), options))
        outputs: list[list[int]] = [[] for _ in batch]
        self.num_retractions = 0
        in_flight: InFlight | None = None
        reader = TokenOutReader()
        while self.inbox.messages or in_flight or self.scheduler.queues.is_busy:
            in_flight = self.scheduler.turn(in_flight)
            self.scheduler.kv.audit(self.scheduler.queues.holders())
            for message in self.outbox.messages:
                for out in reader.read(message):
                    outputs[int(out.rid)].extend(out.token_ids)
                    self.num_retractions += out.counts.num_retractions
            self.outbox.messages.clear()
        return outputs


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Each prompt alone; `test_alone` holds it against `transformers`."""
    engine = InProcessEngine(disable_radix_cache=True)
    return [engine.generate([prompt])[0] for prompt in PROMPTS]


def test_alone(expected: list[list[int]]) -> None:
    wrong = [i for i, prompt in enumerate(PROMPTS) if not is_greedy(prompt, expected[i])]
    assert not wrong
    assert all(len(ids) == NEW_TOKENS or ids[-1] in TOKENIZER.eos_token_ids for ids in expected)
    for index in range(0, min(10, len(PROMPTS)), 3):
        assert expected[index] == generate(PROMPTS[index], NEW_TOKENS)


SETTINGS: list[dict[str, Any]] = [
    {"chunked_prefill_size": 16, "page_size": 1},
    {"chunked_prefill_size": 64, "page_size": 4, "disable_overlap_schedule": True},
    {"chunked_prefill_size": 512, "page_size": 16, "schedule_policy": "fcfs"},
    {"chunked_prefill_size": 64, "page_size": 16, "disable_radix_cache": True, "disable_overlap_schedule": True},
    {"chunked_prefill_size": 512, "page_size": 1, "enable_mixed_chunk": True},
]


@pytest.mark.parametrize(("settings", "half"), crossed(SETTINGS, [0, 1], each=1), ids=str)
def test_in_batches(settings: dict[str, Any], half: int, expected: list[list[int]]) -> None:
    """Every other prompt."""
    engine = InProcessEngine(**settings)
    chosen = slice(half % len(PROMPTS), None, 2)
    assert engine.generate(PROMPTS[chosen]) == expected[chosen]
    if not settings.get("disable_radix_cache"):
        few = slice(half % len(PROMPTS), None, 14)
        assert engine.generate(PROMPTS[few]) == expected[few], "from the cache"


@pytest.mark.parametrize("overlap", [True, False])
def test_after_forced_retraction(overlap: bool, expected: list[list[int]]) -> None:
    """A pool so small that running requests take one another's room."""
    chosen = [index for index, prompt in enumerate(PROMPTS) if len(prompt) < 40]
    assert len(chosen) >= 8
    engine = InProcessEngine(
        max_total_tokens=max(len(PROMPTS[index]) for index in chosen) + NEW_TOKENS + 24,
        page_size=1,
        schedule_conservativeness=0.01,
        disable_overlap_schedule=not overlap,
    )
    assert engine.generate([PROMPTS[index] for index in chosen]) == [expected[index] for index in chosen]
    assert engine.num_retractions > 0


@pytest.mark.skipif(
    cpu_extension.load() is None or not can_pack(torch.empty(1, 1)), reason="no build of csrc/cpu, or no oneDNN"
)
def test_on_linear_layers_of_onednn() -> None:
    """Each prompt alone, then in batches and chunks. Rounding may decide between two tokens of equal logits."""
    chosen = PROMPTS[::10] if ALL_CASES else PROMPTS[5:20:5]
    assert max(map(len, chosen)) > 2 * 64, "no prompt has several chunks"
    alone = InProcessEngine(onednn=True, disable_radix_cache=True)
    outputs = [alone.generate([prompt])[0] for prompt in chosen]
    assert all(is_greedy(prompt, ids) for prompt, ids in zip(chosen, outputs, strict=True))
    batched = InProcessEngine(onednn=True, chunked_prefill_size=64, page_size=16)
    assert batched.generate(chosen) == outputs

"""The scheduler on a real, tiny model: token streams are the same in both loops, launched or from graphs.

TERCET_SCHEDULES=500 python -m pytest tests/managers/test_scheduler_on_a_model.py plays that many random schedules.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from fake_accelerator import FakeAccelerator, use_fake
from runners import make_runner
from scheduler_rig import Rig

from tercet.managers.ngram_proposer import NgramProposer
from tercet.model_executor import cpu_extension
from tercet.srt.io_struct import AbortFinish, LengthFinish
from tercet.srt.logprobs import LogprobOptions, Logprobs
from tercet.srt.model_files.model_config import ModelConfig

NUM_SCHEDULES = int(os.environ.get("TERCET_SCHEDULES", "24"))
VOCAB_SIZE, CONTEXT_LEN, MOST_SLOTS = 41, 128, 320
EOS_IDS = frozenset({7})
LOGPROBS = LogprobOptions(top_logprobs_num=2)
TOY = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=VOCAB_SIZE,
    context_len=CONTEXT_LEN,
    sliding_windows=(None, 9),
)
SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.0, "frequency_penalty": 0.7, "min_new_tokens": 4},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.3},
    {"temperature": 1.2, "top_p": 0.8, "logit_bias": {"3": 1.5}},
    {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 0.5},
)


class Runners:
    """Runners by their number of rows: the same weights, and any pool of slots fits."""

    def __init__(self, monkeypatch, backend="torch", **settings):
        """`settings`: more fields of ServerArgs."""
        if backend == "torch":
            # Sums of another order differ by 1e-16: no draw and no best token will ever depend on that.
            monkeypatch.setattr("tercet.model_executor.runner.settings.resolve_dtype", lambda *_: torch.float64)
        monkeypatch.setattr("tercet.model_executor.weights.loader._DUMMY_STD", 0.5)
        self.backend = backend
        self._settings = settings
        self._made = {}

    def __call__(self, num_rows):
        if num_rows not in self._made:
            self._made[num_rows] = make_runner(
                TOY,
                max_running_requests=num_rows,
                max_total_tokens=MOST_SLOTS,
                dtype="float32",
                attention_backend=self.backend,
                **self._settings,
            )
        return self._made[num_rows]


@pytest.fixture(params=["torch", "cpu"])
def runners(request, monkeypatch):
    """The compiled operations of a CPU need no help from float64: what they compute has the same bits in any step."""
    if request.param == "cpu" and cpu_extension.load() is None:
        pytest.skip("no build of csrc/cpu for this processor")
    return Runners(monkeypatch, request.param)


@pytest.fixture
def runners_with_graphs(monkeypatch):
    runners = Runners(monkeypatch)
    runners.accelerator = FakeAccelerator(lag=5)
    use_fake(monkeypatch, runners.accelerator)
    return runners


def draw_schedule(seed):
    """Options of a rig, and (rid, prompt, sampling, turn of arrival, turn of abort or None) of its requests."""
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 1, 4, 16]))
    options = {
        "page_size": page_size,
        "pool_size": int(rng.choice([64, 80, 96, 304])),
        "max_running": int(rng.choice([1, 3, 8, 8])),
        "max_prefill_tokens": int(rng.choice([16, 24, 64, 200])),
        "chunked_prefill_size": int(rng.choice([16, 20, 64])),
        "radix": bool(rng.random() < 0.7),
        "policy": str(rng.choice(["fcfs", "lpm"])),
        "conservativeness": float(rng.choice([0.1, 1.0])),
        "mixed": bool(rng.random() < 0.5),
    }
    families = [rng.integers(0, VOCAB_SIZE, rng.integers(2, 25)).tolist() for _ in range(rng.integers(1, 4))]
    requests = []
    for index in range(rng.integers(1, 13)):
        family = families[rng.integers(len(families))]
        prompt = family[: rng.integers(1, len(family) + 1)] + rng.integers(0, VOCAB_SIZE, rng.integers(0, 12)).tolist()
        sampling = {
            **SAMPLING[rng.integers(len(SAMPLING))],
            "max_new_tokens": int(rng.integers(4, min(56, options["pool_size"] - len(prompt)))),
            "sampling_seed": int(rng.integers(4)),
            "ignore_eos": bool(rng.random() < 0.6),
        }
        if rng.random() < 0.3:
            sampling["stop"] = str(rng.integers(VOCAB_SIZE))
        if rng.random() < 0.2:
            sampling["stop_token_ids"] = [int(rng.integers(VOCAB_SIZE))]
        abort_at = int(rng.integers(30)) if rng.random() < 0.2 else None
        requests.append((f"r{index}", prompt, sampling, int(rng.integers(8)), abort_at))
    return options, requests


def play(runners, options, requests, overlap, proposer=None):
    """(heard by request, state of the scheduler at the end)"""

    rig = Rig(
        overlap=overlap,
        proposer=proposer,
        eos_ids=EOS_IDS,
        vocab_size=VOCAB_SIZE,
        context_len=CONTEXT_LEN,
        make_runner=lambda: runners(options["max_running"]),
        **options,
    )
    turn = 0
    while rig.is_busy or turn < 30:
        for rid, prompt, sampling, arrives, abort_at in requests:
            if arrives == turn:
                rig.add(rid, prompt, logprobs=LOGPROBS if "logprobs" in rid else None, **sampling)
            if abort_at == turn:
                rig.abort(rid)
        rig.turn()
        turn += 1
        assert turn < 3000, "hung"
    rig.kv.audit([])
    state = rig.scheduler.state()
    assert state.num_kv_repairs == 0
    return rig.heard, state


def same_streams(one, other, requests):
    for rid, _, sampling, _, abort_at in requests:
        first, second = one[rid], other[rid]
        aborted = [heard for heard in (first, second) if isinstance(heard.finish, AbortFinish)]
        if aborted:
            # When the abort comes, one loop has made another number of tokens than the other: but no other tokens.
            assert abort_at is not None and abort_at >= 0, first.finish
            short, long = sorted((first.ids, second.ids), key=len)
            assert long[: len(short)] == short
        else:
            assert first.ids == second.ids and first.finish == second.finish
            assert len(first.ids) == sampling["max_new_tokens"] or not isinstance(first.finish, LengthFinish)


def test_both_loops_stream_the_same_tokens(runners):
    seen = {"retractions": 0, "aborts": 0, "tokens": 0, "stops": 0}
    for seed in range(NUM_SCHEDULES):
        options, requests = draw_schedule(seed)
        normal, state = play(runners, options, requests, overlap=False)
        overlapped, other_state = play(runners, options, requests, overlap=True)
        try:
            same_streams(normal, overlapped, requests)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}") from error
        seen["retractions"] += state.num_retractions + other_state.num_retractions
        seen["aborts"] += sum(isinstance(heard.finish, AbortFinish) for heard in normal.values())
        seen["stops"] += sum(not isinstance(h.finish, AbortFinish | LengthFinish) for h in normal.values())
        seen["tokens"] += sum(len(heard.ids) for heard in normal.values())
    # The schedules were worth playing. Retractions are rare, and depend on what the model says: its float32 weights are
    # other ones.
    assert min(count for what, count in seen.items() if what != "retractions" or runners.backend == "torch") > 0, seen
    assert seen["tokens"] > 50 * NUM_SCHEDULES, seen


class Oracle:
    """A proposer that knows what each request will return. Some of its drafts are wrong."""

    def __init__(self, heard, seed):
        self._heard = heard
        self._rng = np.random.default_rng(seed)

    def propose(self, reqs, limits):
        return [self._of(req, limit) for req, limit in zip(reqs, limits, strict=True)]

    def observe(self, num_reqs, num_tokens, seconds):
        pass

    def _of(self, req, limit):
        start = len(req.output_ids)
        ids = self._heard[req.rid].ids[start : start + min(limit, int(self._rng.integers(6)))]
        return [(id + 1) % VOCAB_SIZE if self._rng.random() < 0.15 else id for id in ids]


@pytest.mark.parametrize("recorded", [False, True])
def test_drafts_change_no_token(runners, recorded, monkeypatch):
    """Greedy and drawn tokens, with and without a grammar, and their log probabilities. The runner of these settings
    records steps with drafts."""
    seen = dict.fromkeys(("verifications", "drafts", "accepted"), 0)
    drafting = Runners(monkeypatch, runners.backend, speculative_algorithm="NGRAM") if recorded else runners
    for seed in range(NUM_SCHEDULES // 2):
        options, requests = draw_schedule(2_000_000 + seed)
        requests = [
            (f"{rid} logprobs" if index % 3 == 0 else rid, *rest) for index, (rid, *rest) in enumerate(requests)
        ]
        for index, (_, _, sampling, *_) in enumerate(requests):
            if index % 4 < 2:
                sampling["regex"] = str(index)
        plain, _ = play(runners, options, requests, overlap=False)
        ngrams, oracle = NgramProposer(max_drafts=5, max_tokens=16), Oracle(plain, seed)
        for proposer in (ngrams, oracle):
            drafted, state = play(drafting, options, requests, overlap=False, proposer=proposer)
            try:
                same_streams(plain, drafted, requests)
                same_logprobs(plain, drafted)
            except AssertionError as error:
                raise AssertionError(f"schedule {seed}, {proposer}") from error
            seen["verifications"] += state.speculation.num_verifications
            seen["drafts"] += state.speculation.num_drafts
            seen["accepted"] += state.speculation.num_accepted_drafts
    assert seen["drafts"] > seen["verifications"] > 5 * NUM_SCHEDULES, seen
    assert 0.3 * seen["drafts"] < seen["accepted"] < 0.95 * seen["drafts"], seen


def same_logprobs(one, other):
    for rid in one:
        first, second = (Logprobs.concat([part.output for part in side[rid].logprobs]) for side in (one, other))
        num = min(len(first), len(second))  # one of them may be aborted earlier
        for name, width in (("own", 1), ("top", 2)) if num else ():
            values = [np.frombuffer(getattr(part, name), np.float32)[: num * width] for part in (first, second)]
            np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-6)


def test_graphs_stream_the_same_tokens(runners_with_graphs, monkeypatch):
    """A table of the device's own, pinned memory, late copies home, padded and replayed decode steps."""
    streams = []
    for seed in range(NUM_SCHEDULES // 4):
        options, requests = draw_schedule(1_000_000 + seed)
        streams.append((options, requests, play(runners_with_graphs, options, requests, overlap=True)[0]))
    assert runners_with_graphs.accelerator.num_replays > 0
    monkeypatch.undo()
    plain = Runners(monkeypatch)
    for options, requests, heard in streams:
        same_streams(heard, play(plain, options, requests, overlap=False)[0], requests)

"""Random schedules of the scheduler on a real, tiny model, and whether two of them have streamed the same tokens."""

from __future__ import annotations

import numpy as np
import torch
from runners import make_runner
from scheduler_rig import Rig

from tercet.srt.io_struct import AbortFinish, LengthFinish
from tercet.srt.logprobs import LogprobOptions, Logprobs
from tercet.srt.model_files.model_config import ModelConfig

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


def play(runners, options, requests, overlap, proposer=None, watch=None):
    """(heard by request, state of the scheduler at the end). `watch`: called with the rig after each turn."""

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
        if watch is not None:
            watch(rig)
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


class Oracle:
    """A proposer that knows what each request will return. Some of its drafts are wrong."""

    def __init__(self, heard, seed, wrong=0.15):
        """`wrong`: the share of wrong drafts."""
        self._heard = heard
        self._rng = np.random.default_rng(seed)
        self._wrong = wrong

    def propose(self, reqs, limits):
        return [self._of(req, limit) for req, limit in zip(reqs, limits, strict=True)]

    def observe(self, num_reqs, num_tokens, seconds):
        pass

    def _of(self, req, limit):
        start = max(len(req.output_ids), req.kv_len + 1 - len(req.prompt_ids))  # also with a token in flight
        ids = self._heard[req.rid].ids[start : start + min(limit, int(self._rng.integers(6)))]
        return [(id + 1) % VOCAB_SIZE if self._rng.random() < self._wrong else id for id in ids]


def same_logprobs(one, other):
    for rid in one:
        first, second = (Logprobs.concat([part.output for part in side[rid].logprobs]) for side in (one, other))
        num = min(len(first), len(second))  # one of them may be aborted earlier
        for name, width in (("own", 1), ("top", 2)) if num else ():
            values = [np.frombuffer(getattr(part, name), np.float32)[: num * width] for part in (first, second)]
            np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-6)

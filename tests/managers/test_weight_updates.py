"""Updates of the weights in the scheduler. The new "weights" of the fake runner are another random hash."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scheduler_rig import Rig
from tier_asks import settle_copies

from tercet.managers.weight_updates import LoadedWeights, WeightUpdates
from tercet.srt.io_struct import TokenOut
from tercet.srt.logprobs import LogprobOptions
from tercet.srt.pause_messages import ContinueReq, PauseReq
from tercet.srt.plain_values import as_utf8
from tercet.srt.weight_messages import UpdateWeightsReply, UpdateWeightsReq, WeightFacts

PROMPT = list(range(1, 42))
FACTS = WeightFacts("bfloat16", 7)


class Loader:
    """Loads nothing, and gives the identity of the version. Raises `error`, if there is one."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.error: Exception | None = None

    def __call__(self, message: UpdateWeightsReq) -> LoadedWeights:
        if self.error is not None:
            raise self.error
        self.loaded.append(message.model_path)
        return LoadedWeights(message.weight_version.encode(), FACTS)


def update(rig: Rig, version: str = "2", path: str | None = None) -> UpdateWeightsReply:
    rig.inbox.messages.append(UpdateWeightsReq(9, path or f"/w/{version}", "auto", version))
    rig.turn()
    (reply,) = [one for one in rig.tokenizer.messages if isinstance(one, UpdateWeightsReply)]
    rig.tokenizer.messages.clear()
    assert reply.call_id == 9
    return reply


def pause(rig: Rig, *, retract: bool = False) -> None:
    rig.inbox.messages.append(PauseReq(1, retract))
    rig.turn()
    while rig.in_flight is not None:
        rig.turn()


def test_all_kv_of_the_old_weights_is_forgotten(tmp_path: Path) -> None:
    loader = Loader()
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path, load_weights=loader)

    def ask(rid: str) -> tuple[int, int, int]:
        rig.add(rid, PROMPT, max_new_tokens=2)
        rig.run()
        settle_copies(rig)
        counts = rig.heard[rid].last.counts
        return counts.cached_tokens, counts.host_tokens, counts.storage_tokens

    assert ask("a") == (0, 0, 0) and ask("b")[0] == 40
    for number, version in enumerate(("2", "3")):
        pause(rig)
        assert update(rig, version) == UpdateWeightsReply(9, facts=FACTS)
        rig.inbox.messages.append(ContinueReq(2))
        rig.turn()
        assert ask(f"new {number}") == (0, 0, 0)
        assert ask(f"again {number}")[0] == 40
    assert loader.loaded == ["/w/2", "/w/3"]


def test_a_retracted_request_goes_on_without_kv_of_the_old_weights(tmp_path: Path) -> None:
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path, load_weights=Loader())
    rig.add("earlier", PROMPT)
    rig.run()
    settle_copies(rig)
    rig.add("a", PROMPT, max_new_tokens=30)
    while len(rig.heard["a"].ids) < 10:
        rig.turn()
    pause(rig, retract=True)
    assert update(rig) == UpdateWeightsReply(9, num_waiting=1, facts=FACTS)
    steps = len(rig.runner.steps)
    rig.inbox.messages.append(ContinueReq(2))
    rig.run()
    computed = sum(len(step.out_cache_loc) for step in rig.runner.steps[steps:])
    assert len(rig.heard["a"].ids) == 30 and computed == len(PROMPT) + 29


def outputs(first_weights: int) -> list[TokenOut]:
    """Those of requests whose first chunks these weights compute, and all other weights the rest."""
    rig = Rig(chunked_prefill_size=16, max_prefill_tokens=16, load_weights=Loader())
    rig.runner.weights = first_weights
    scored = {"logprobs": LogprobOptions(logprob_start_len=0), "hidden": True, "max_new_tokens": 1}
    asked: dict[str, dict[str, Any]] = {"embeds": {"pooling": "mean", "max_new_tokens": 0}, "scores": scored}
    for rid, options in asked.items():
        rig.add(rid, PROMPT, **options)
        rig.turn()
        pause(rig, retract=True)
        update(rig)
        rig.runner.weights = 2
        rig.inbox.messages.append(ContinueReq(2))
        rig.run()
        rig.runner.weights = first_weights
    assert len(rig.runner.steps) == 8, "a chunk with the first weights, and three with the others"
    return [rig.heard[rid].last for rid in asked]


def test_what_is_computed_of_a_prompt_is_of_one_model() -> None:
    assert outputs(1) == outputs(2)


def test_weights_do_not_change_under_requests_with_kv() -> None:
    loader = Loader()
    rig = Rig(load_weights=loader)
    assert "continued" in (update(rig).busy or "")
    rig.add("a", PROMPT, max_new_tokens=30)
    while len(rig.heard["a"].ids) < 3:
        rig.turn()
    rig.inbox.messages.append(PauseReq(1, True))  # the pause is beginning: a step is in flight
    assert "continued" in (update(rig).busy or "")
    rig.inbox.messages.append(ContinueReq(2))
    rig.turn()
    pause(rig)
    assert "1 requests keep KV" in (update(rig).busy or "")
    assert not loader.loaded
    rig.inbox.messages.append(ContinueReq(3))
    rig.run()
    undisturbed = Rig()
    undisturbed.add("a", PROMPT, max_new_tokens=30)
    undisturbed.run()
    assert rig.heard["a"].ids == undisturbed.heard["a"].ids


@pytest.mark.parametrize(
    ("error", "is_refused"),
    [
        (ValueError("the tensor has shape 3"), True),
        (FileNotFoundError("no such file"), True),
        (ValueError("the key \ud800"), True),
        (MemoryError("x"), False),
    ],
    ids=str,
)
def test_a_failure_keeps_weights_and_cache(error: Exception, is_refused: bool) -> None:
    loader = Loader()
    loader.error = error
    rig = Rig(load_weights=loader)
    rig.add("a", PROMPT)
    rig.run()
    pause(rig)
    reply = update(rig)
    assert (reply.refusal == as_utf8(str(error))) == is_refused and (reply.failure is None) == is_refused
    assert "x" not in (reply.failure or "").split()
    assert rig.kv.cache.match_len(np.array(PROMPT, np.int32)) == 41


@pytest.mark.parametrize("error", [None, ValueError("the tensor has shape 3"), MemoryError("x")], ids=str)
def test_a_path_of_a_client_forges_no_line_of_the_log(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    loader = Loader()
    loader.error = error
    rig = Rig(load_weights=loader)
    pause(rig)
    with caplog.at_level(logging.INFO, "tercet.managers.weight_updates"):
        update(rig, path="/w/a\n[00:00:00 http] ERROR forged")
    (message,) = [one for one in caplog.messages if "forged" in one]
    assert "\n" not in message


def test_an_engine_without_a_loader_refuses() -> None:
    rig = Rig()
    assert isinstance(rig.scheduler._weights, WeightUpdates)
    pause(rig)
    assert "no other weights" in (update(rig).refusal or "")


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_weights_that_were_refused_leave_no_memory_to_return(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next update needs it. The error that says why they were refused holds what was read of them."""
    read: list[weakref.ref[np.ndarray]] = []
    left: list[object] = []

    def load(message: UpdateWeightsReq) -> LoadedWeights:
        tensor = np.zeros(8)
        read.append(weakref.ref(tensor))
        raise error("the last tensor has shape 3")

    monkeypatch.setattr("tercet.managers.weight_updates.trim_heap", lambda: left.extend(one() for one in read))
    caplog.set_level(logging.CRITICAL, "tercet.managers.weight_updates")  # pytest keeps errors that are logged
    rig = Rig(load_weights=load)
    pause(rig)
    update(rig)
    assert left == [None]

"""LoRA adapters in the scheduler. The tokens of the fake runner depend on the adapter of each row."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from scheduler_rig import Rig
from tier_asks import settle

from fakes import adapter_number, expected_output, fingerprint_of
from tercet.managers.adapters import Adapters
from tercet.srt.adapters import AdapterRef, AdapterReply, LoadAdapterReq, UnloadAdapterReq
from tercet.srt.errors import InvalidRequest, StreamChanged
from tercet.srt.io_struct import AbortFinish, LengthFinish, Resumed

PROMPT = list(range(1, 20))
VOCAB = 97


def ref(name: str, number: int) -> AdapterRef:
    return AdapterRef(name, fingerprint_of(number))


def right(number: int, max_new_tokens: int = 8, prompt: list[int] = PROMPT) -> list[int]:
    return expected_output(prompt, 1, max_new_tokens, VOCAB, adapter=number)


def load(rig: Rig, name: str, number: int) -> AdapterReply:
    rig.inbox.messages.append(LoadAdapterReq(3, name, f"/adapters/{number}"))
    rig.turn()
    return take_reply(rig)


def take_reply(rig: Rig) -> AdapterReply:
    (reply,) = replies(rig)
    assert reply.call_id == 3
    return reply


def replies(rig: Rig) -> list[AdapterReply]:
    found = [one for one in rig.tokenizer.messages if isinstance(one, AdapterReply)]
    rig.tokenizer.messages.clear()
    return found


def loaded_rig(**settings: object) -> Rig:
    """With the adapter a of number 1, and b of number 2."""
    rig = Rig(**{"max_loras": 2, **settings})
    rig.adapters.begin({"a": "/adapters/1", "b": "/adapters/2"}, is_restart=False)
    return rig


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_of_several_adapters_share_a_batch(overlap: bool) -> None:
    rig = loaded_rig(overlap=overlap)
    rig.add("a", PROMPT, adapter=ref("a", 1))
    rig.add("b", PROMPT, adapter=ref("b", 2))
    rig.add("none", PROMPT)
    rig.run()
    assert max(len(step.rows) for step in rig.runner.steps) == 3
    assert [rig.heard[rid].ids for rid in ("a", "b", "none")] == [right(1), right(2), right(0)]
    assert len({tuple(right(number)) for number in range(3)}) == 3


def test_no_prefix_of_an_adapter_serves_another() -> None:
    rig = loaded_rig()
    for rid, adapter in (("a", ref("a", 1)), ("b", ref("b", 2)), ("none", None), ("again", ref("a", 1))):
        rig.add(rid, PROMPT, adapter=adapter)
        rig.run()
    cached = {rid: rig.heard[rid].last.counts.cached_tokens for rid in rig.heard}
    assert cached == {"a": 0, "b": 0, "none": 0, "again": len(PROMPT) - 1}


def test_a_client_reaches_no_prefix_of_an_adapter_by_its_salt() -> None:
    rig = loaded_rig()
    rig.add("a", PROMPT, adapter=ref("a", 1))
    rig.run()
    (namespace,) = rig.kv.cache._root.children
    rig.add("thief", PROMPT, salt=namespace.decode())
    rig.run()
    assert rig.heard["thief"].ids == right(0) and rig.heard["thief"].last.counts.cached_tokens == 0


def test_prefixes_survive_a_reload_of_the_same_files_under_another_name() -> None:
    rig = loaded_rig(page_size=4, host_blocks=32)
    rig.add("before", PROMPT, adapter=ref("a", 1))
    rig.run()
    rig.inbox.messages.append(UnloadAdapterReq(3, "a"))
    rig.turn()
    assert take_reply(rig).adapter is not None and load(rig, "c", 1).refusal is None
    rig.add("after", PROMPT, adapter=ref("c", 1))
    rig.run()
    assert rig.heard["after"].ids == right(1) and rig.heard["after"].last.counts.cached_tokens == 16


def test_a_retracted_request_keeps_its_adapter() -> None:
    rig = loaded_rig(pool_size=64, max_running=4, conservativeness=0.01)
    for number in range(4):
        rig.add(f"r{number}", [number, *PROMPT[:8]], adapter=ref("a", 1), max_new_tokens=30)
    rig.run()
    assert rig.planner.num_retractions
    for number in range(4):
        assert rig.heard[f"r{number}"].ids == right(1, 30, [number, *PROMPT[:8]])


def test_files_of_an_adapter_serve_neither_another_one_nor_the_model(tmp_path: Path) -> None:
    def cached(adapter: AdapterRef | None, number: int) -> int:
        """Of which the first tokens come from files, in a new engine."""
        rig = loaded_rig(page_size=4, host_blocks=16, storage=tmp_path)
        rig.add("r", PROMPT, adapter=adapter)
        rig.run()
        assert rig.heard["r"].ids == right(number)
        settle(rig)
        return rig.heard["r"].last.counts.storage_tokens

    found = [cached(*one) for one in ((ref("a", 1), 1), (ref("b", 2), 2), (None, 0), (ref("a", 1), 1))]
    assert found == [0, 0, 0, 16]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_unload_waits_for_its_requests_and_refuses_new_ones(overlap: bool) -> None:
    rig = loaded_rig(overlap=overlap)
    rig.add("old", PROMPT, adapter=ref("a", 1))
    rig.turn()
    rig.inbox.messages.append(UnloadAdapterReq(3, "a"))
    rig.add("new", PROMPT, adapter=ref("a", 1))
    rig.add("other", PROMPT, adapter=ref("b", 2), max_new_tokens=30)
    rig.turn()
    assert not replies(rig) and 1 in rig.runner.adapters
    assert rig.heard["new"].finish == AbortFinish.of(
        InvalidRequest("the adapter 'a' is no longer loaded", param="lora_path")
    )
    while rig.heard["old"].finish is None:
        assert not replies(rig)
        rig.turn()
    while not (found := replies(rig)):
        rig.turn()
    assert found[0].adapter is not None and found[0].adapter.name == "a"
    assert rig.heard["other"].finish is None, "it waits for its own requests only"
    assert rig.heard["old"].ids == right(1) and 1 not in rig.runner.adapters
    rig.run()
    assert rig.heard["other"].ids == right(2, 30)


def test_a_slot_is_used_again() -> None:
    rig = loaded_rig()
    refused = load(rig, "c", 3)
    assert refused.refusal == "--max-loras 2 adapters are loaded; unload one first"
    rig.inbox.messages.append(UnloadAdapterReq(3, "a"))
    rig.turn()
    assert take_reply(rig).adapter is not None
    loaded = load(rig, "c", 3).adapter
    assert loaded is not None and loaded.number == 3 and [one.name for one in rig.adapters.facts] == ["b", "c"]
    rig.add("c", PROMPT, adapter=ref("c", 3))
    rig.run()
    assert rig.heard["c"].ids == right(3)


def test_the_slot_of_an_adapter_that_still_has_requests_is_not_free() -> None:
    rig = loaded_rig()
    rig.add("old", PROMPT, adapter=ref("a", 1), max_new_tokens=30)
    rig.turn()
    rig.inbox.messages.append(UnloadAdapterReq(4, "a"))
    assert load(rig, "c", 3).refusal == "--max-loras 2 adapters are loaded; unload one first"
    rig.run()
    assert rig.heard["old"].ids == right(1, 30)


def test_loads_and_unloads_that_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    rig = loaded_rig(max_loras=3)
    assert load(rig, "a", 3).refusal == "the adapter 'a' is loaded already; unload it first"
    rig.inbox.messages.append(LoadAdapterReq(3, "c", "/adapters/none"))
    rig.turn()
    assert take_reply(rig).refusal == "/adapters/none has no adapter"
    rig.inbox.messages.append(UnloadAdapterReq(3, "c"))
    rig.turn()
    assert take_reply(rig).refusal == "the adapter 'c' is not loaded"
    rig.add("a", PROMPT, adapter=ref("a", 1))
    rig.inbox.messages += [UnloadAdapterReq(3, "a"), UnloadAdapterReq(3, "a")]
    rig.turn()
    assert take_reply(rig).refusal == "the adapter 'a' is being unloaded already"
    assert load(rig, "a", 3).refusal == "the adapter 'a' is loaded already; unload it first"


@pytest.mark.parametrize("error", [None, ValueError("no adapter"), MemoryError("too large")], ids=str)
def test_a_path_of_a_client_forges_no_line_of_the_log(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = loaded_rig(max_loras=3)

    def load_or_fail(slot: int, path: str) -> str:
        if error is not None:
            raise error
        return fingerprint_of(3)

    monkeypatch.setattr(rig.runner, "load_adapter", load_or_fail)
    rig.inbox.messages.append(LoadAdapterReq(3, "c", "/adapters/a\n[00:00:00 http] ERROR forged"))
    with caplog.at_level(logging.INFO, "tercet.managers.adapters"):
        rig.turn()
    (message,) = [one for one in caplog.messages if "forged" in one]
    assert "\n" not in message


def test_any_reason_fits_into_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name in a file may be long, and JSON may have a lone surrogate in it."""
    rig = loaded_rig(max_loras=3)

    def refuse(slot: int, path: str) -> str:
        raise ValueError(f"key \ud800 {'x' * 10**7} is not known")

    monkeypatch.setattr(rig.runner, "load_adapter", refuse)
    refusal = load(rig, "c", 3).refusal
    assert refusal is not None and refusal.startswith("key \\ud800 xxx") and len(refusal) < 10_000


def test_no_defect_in_a_load_ends_a_restart(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(max_loras=2)
    load_adapter = rig.runner.load_adapter

    def fail_for_a(slot: int, path: str) -> str:
        if path == "/adapters/1":
            raise MemoryError("too large")
        return load_adapter(slot, path)

    monkeypatch.setattr(rig.runner, "load_adapter", fail_for_a)
    with pytest.raises(MemoryError):
        rig.adapters.begin({"a": "/adapters/1"}, is_restart=False)
    rig.adapters.begin({"a": "/adapters/1", "b": "/adapters/2"}, is_restart=True)
    assert [one.name for one in rig.adapters.facts] == ["b"]
    assert "without the adapter a: too large" in caplog.text


def test_a_defect_in_a_load_leaves_the_slot_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = loaded_rig(max_loras=3)

    def fail(slot: int, path: str) -> str:
        raise MemoryError("too large")

    with monkeypatch.context() as patch:
        patch.setattr(rig.runner, "load_adapter", fail)
        assert load(rig, "c", 3).failure == "the adapter could not be loaded"
    assert load(rig, "c", 3).adapter is not None


def test_a_request_of_replaced_files_is_refused_and_its_stream_does_not_go_on() -> None:
    rig = loaded_rig()
    rig.add("new", PROMPT, adapter=ref("a", 2))
    rig.add("stream", PROMPT, adapter=ref("a", 2), resumed=Resumed([], None, 0))
    rig.add("same", PROMPT, adapter=ref("a", 1), resumed=Resumed(right(1, 3), 0, 0))
    rig.run()
    error = AbortFinish.of(StreamChanged("the adapter 'a' has been replaced by another one of this name"))
    assert rig.heard["new"].finish == rig.heard["stream"].finish == error
    assert rig.heard["same"].finish == LengthFinish(8) and rig.heard["same"].ids == right(1)


def test_without_adapters_a_request_of_one_is_refused() -> None:
    rig = Rig()
    rig.add("a", PROMPT, adapter=ref("a", 1))
    rig.run()
    assert isinstance(rig.heard["a"].finish, AbortFinish) and rig.heard["a"].finish.status_code == 400


def test_an_adapter_of_the_start_that_cannot_be_used_ends_the_start_but_no_restart() -> None:
    rig = Rig(max_loras=2)
    paths = {"a": "/adapters/none", "b": "/adapters/2"}
    with pytest.raises(ValueError, match=r"^--lora-paths: 'a' cannot be used: /adapters/none has no adapter$"):
        rig.adapters.begin(paths, is_restart=False)
    rig = Rig(max_loras=2)
    rig.adapters.begin(paths, is_restart=True)
    assert [one.name for one in rig.adapters.facts] == ["b"]


def test_fingerprints_name_adapters() -> None:
    rig = Rig(max_loras=3)
    rig.adapters.begin({"a": "/adapters/1", "b": "/other/1", "c": "/adapters/3"}, is_restart=False)
    assert isinstance(rig.scheduler.adapters, Adapters)
    found = rig.adapters.with_fingerprint(fingerprint_of(1))
    assert found is not None and found.name == "a" and adapter_number(found.path) == 1
    assert rig.adapters.with_fingerprint(fingerprint_of(2)) is None


def test_an_unload_waits_for_the_step_in_flight() -> None:
    """A request that ends by a stop token takes part in one more step. The fake runner checks that slots are unused."""
    rig = loaded_rig(overlap=True)
    rig.add("a", PROMPT, adapter=ref("a", 1), stop_token_ids=[right(1)[4]])
    rig.turn()
    rig.inbox.messages.append(UnloadAdapterReq(3, "a"))
    while rig.heard["a"].finish is None:
        rig.turn()
    assert rig.in_flight is not None and not replies(rig)
    rig.turn()
    assert take_reply(rig).adapter is not None
    assert rig.heard["a"].ids == right(1, 5)

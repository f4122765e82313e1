"""The checks of the endurance runs can fail: each sees what it is for."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import shutil
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from endurance import chaos, soak
from endurance.answers import Failed, Incomplete, difference, recoveries, streamed_answer, whole_answer
from endurance.cases import make_cases, new_schema_cases
from endurance.excuses import by_fault, silent_times, unexcused
from endurance.faults import Event
from endurance.findings import Findings, check
from endurance.fuzz import Pace, parse, slow
from endurance.hooks import STALL_S, Hooks, Stall
from endurance.hostile_bodies import BodyMaker
from endurance.hostile_http import RawRequest, make_raw
from endurance.hostile_tls import TlsRequest, client_hello, make_tls
from endurance.pipes import make_certificate
from endurance.raw_clients import send_raw, send_tls
from endurance.report import finish, silence_beyond
from endurance.resources import Use, slopes
from endurance.server_under_test import wrong_state
from endurance.soak import changed
from endurance.tally import Failure, StreamRecord, Tally, Wait
from hypothesis import given, settings
from hypothesis import strategies as st
from random_steps.command import main as random_steps

from tercet.srt.entrypoints.endpoints import ENDPOINTS
from tercet.srt.entrypoints.openapi import openapi_document


def stream(*events: object, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"] * done
    return ": restarting\n\n".join(lines).encode()


def native(text: str, ids: list[int], **meta: object) -> dict[str, object]:
    return {"text": text, "output_ids": ids, "meta_info": {"id": "a", "num_recoveries": 0, **meta}}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=3), st.integers(0, 9)), min_size=1, max_size=8), st.data())
def test_a_stream_says_the_same_however_it_is_cut(parts: list[tuple[str, int]], data: st.DataObject) -> None:
    whole = native("".join(text for text, _ in parts), [token for _, token in parts], completion_tokens=len(parts))
    at = data.draw(st.integers(0, len(parts)))
    pieces = [part for part in (parts[:at], parts[at:]) if part]
    counts = [len(pieces[0]), len(parts)]
    cut = [
        native("".join(text for text, _ in piece), [token for _, token in piece], completion_tokens=count)
        for piece, count in zip(pieces, counts, strict=False)
    ]
    assert streamed_answer(stream(*cut)) == streamed_answer(stream(whole))


def test_what_is_wrong_about_an_answer() -> None:
    error = {"error": {"message": "no", "code": "engine_dead"}}
    with pytest.raises(Incomplete, match="without"):
        streamed_answer(stream(native("a", [1]), done=False))
    with pytest.raises(Failed, match="engine_dead: no"):
        streamed_answer(stream(native("a", [1]), error))
    with pytest.raises(Failed, match="engine_dead: no"):
        whole_answer(503, json.dumps(error).encode())
    with pytest.raises(Incomplete, match="without a reason"):
        whole_answer(500, b"{}")
    with pytest.raises(Incomplete, match="not JSON"):
        whole_answer(500, b"oops")
    one, other = whole_answer(200, b'{"a": [1, {"id": 2}]}'), whole_answer(200, b'{"a": [2, {"id": 3}]}')
    assert difference(one, other) == "a.0 is '1', and was '2'"
    assert whole_answer(200, b'{"id": 1}') == whole_answer(200, b'{"id": 2}')
    assert recoveries(stream(native("a", [1]), native("b", [2], num_recoveries=2))) == 2
    assert recoveries(stream(native("a", [1]), native("b", [2]))) == 0, "/generate tells the number"
    assert recoveries(stream({"choices": []}, {"choices": []})) == 1, "the others have only the comment"
    assert recoveries(b'data: {"choices": []}\n\n: waiting\n\ndata: [DONE]\n\n') == 0


@pytest.mark.parametrize("kind", [None, "internal_server_error", "service_unavailable", "invalid_logits", "a_new_one"])
def test_a_server_error_inside_a_stream_is_seen(kind: str | None) -> None:
    with pytest.raises(Failed, match="status 500: no"):
        check(200, stream(native("a", [1]), {"error": {"message": "no", "type": kind, "code": "engine_dead"}}))
    failed = {"error": {"message": "no", "code": "server_error"}}
    with pytest.raises(Failed, match="status 500: no"):
        check(200, stream({"type": "response.created"}, {"type": "response.failed", "response": failed}))


def test_a_mistake_of_the_client_inside_a_stream_is_no_server_error() -> None:
    check(200, stream(native("a", [1]), {"error": {"message": "no", "type": "invalid_request_error"}}))
    check(200, stream({"error": {"message": "no", "type": "service_unavailable", "code": "queue_full"}}))
    with pytest.raises(Incomplete, match="without a reason"):
        check(200, stream({"error": {"type": "internal_server_error"}}))


def test_silence_is_counted_without_the_faults() -> None:
    wait = Wait("a", 10.0, 20.0)
    assert silence_beyond(wait, []) == 10.0
    assert silence_beyond(wait, [(0.0, 11.0), (12.0, 14.0), (13.0, 15.0), (19.0, 99.0), (30.0, 40.0)]) == 5.0


def test_the_silence_of_a_stream_that_fails_is_recorded() -> None:
    times = iter([0.0, 5.0, 5.5, 505.5])
    record = StreamRecord("a", clock=lambda: next(times))
    record.on_data(b"data: 1\n\n")
    record.on_data(b": waiting\n\n")
    assert record.end() == 505.5
    assert [wait.lasted_s for wait in record.waits.silences] == [500.0]
    assert [wait.lasted_s for wait in record.waits.pauses] == [500.5]


def failure(error: str, *, lost: bool = True, began: float = 10.0, ended: float = 20.0) -> Failure:
    return Failure("a", f"{error}: no", lost, began, ended)


NOT_FINITE = "server_error: the model's logits for this request are not finite"
INTERNAL = "internal_server_error: internal error; the server's log has the details"


def test_a_fault_allows_only_its_own_errors() -> None:
    def wrong(error: str, *kinds: str, **more: Any) -> list[str]:
        return unexcused([failure(error, **more)], [Event(kind, 12.0, 13.0) for kind in kinds])

    for kind in ("kill the scheduler", "stop the detokenizer", "full disk", "clock jumps", "second server"):
        for error in ("engine_dead", "fatal_request", INTERNAL, NOT_FINITE):
            assert wrong(error, kind) and wrong(error, kind, lost=False), (kind, error)
    assert not wrong(NOT_FINITE, "invalid logits", "kill the scheduler")
    assert not wrong(INTERNAL, "short memory")
    assert wrong("fatal_request", "hanging step"), "one death convicts nobody"
    assert not wrong("fatal_request", "hanging step", "failed allocation")
    assert wrong("fatal_request", "hanging step", "failed allocation", ended=11.0), "they came after its end"
    assert "kill the scheduler" in wrong("engine_dead", "kill the scheduler")[0]
    skipped = [Event("invalid logits", 12.0, 13.0, "no step was computed")]
    assert unexcused([failure(NOT_FINITE)], skipped)


def test_only_two_faults_of_the_grammar_worker_may_refuse_a_grammar() -> None:
    refused = failure(
        "grammar_not_checked: two grammar workers gave no result, and the last one was killed", lost=False
    )
    kill, stop = Event("kill the grammar worker", 11.0, 11.0), Event("stop the grammar worker", 12.0, 13.0)
    assert unexcused([refused], [kill, stop]) == []
    assert by_fault([refused], [kill, stop]) == {"stop the grammar worker": {"refused": 1}}
    assert unexcused([refused], [kill, Event("kill the scheduler", 11.0, 11.0)])
    assert unexcused([dataclasses.replace(refused, had_begun=True)], [kill, stop])


def test_invalid_logits_lose_one_request_each() -> None:
    events = [Event("invalid logits", 12.0, 13.0), Event("invalid logits", 14.0, 15.0)]
    lost = [failure(NOT_FINITE)] * 2
    assert unexcused(lost, events) == []
    assert "3 requests failed" in unexcused([*lost, failure(NOT_FINITE)], events)[0]
    assert by_fault(lost, events) == {"invalid logits": {"lost": 2}}


def test_equal_requests_are_refused_after_a_conviction() -> None:
    again = Failure("a", "fatal_request: the engine died twice on an equal request", False, 90.0, 90.1)
    events = [Event("hanging step", 12.0, 13.0), Event("short memory", 14.0, 15.0)]
    assert unexcused([again], events) == []
    assert unexcused([again], events[:1])


def test_only_a_stopped_http_process_and_a_hanging_step_excuse_silence() -> None:
    events = [Event("stop the HTTP process", 1.0, 2.0), Event("stop the scheduler", 3.0, 9.0)]
    assert silent_times([*events, Event("hanging step", 10.0, 22.0)]) == [(1.0, 2.0), (10.0, 22.0)]
    (down,) = silent_times([Event("kill the server", 1.0, 4.0)])
    assert down[0] == 1.0 and down[1] > 4.0, "a continued stream waits for its next event like a new request"


def test_refused_and_lost_are_counted_by_their_texts() -> None:
    tally = Tally(failures=[failure("a 1"), failure("a 2"), failure("b", lost=False)])
    assert (tally.lost, tally.refused, tally.requests) == ({"a N: no": 2}, {"b: no": 1}, 3)


def test_leaks_are_seen() -> None:
    small, large = Use(100, 10, 3), Use(100, 20, 99)
    assert changed({"http": small}, {"http": small}) == []
    assert len(changed({"http": small, "grammar": small}, {"http": large, "spare": small})) == 4
    series = [(number, {"http": Use(1000 + 5 * number, 1, 1)}) for number in range(0, 1000, 100)]
    assert slopes(series) == {"http": pytest.approx(5.0)}
    idle = {"num_running": 0, "num_waiting": 0, "num_protected_tokens": 0, "num_private_tokens": 0, "num_kv_repairs": 0}
    state = {**idle, "num_free_tokens": 90, "num_evictable_tokens": 10, "max_total_num_tokens": 100}
    assert wrong_state({"internal_states": [state]}) == []
    assert len(wrong_state({"internal_states": [{**state, "num_running": 1, "num_free_tokens": 89}]})) == 2


def test_a_report_fails_if_anything_was_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert finish({"seed": 1}, [], tmp_path / "a.json") == 0
    assert finish({"seed": 1}, ["something"], tmp_path / "b.json") == 1
    assert json.loads((tmp_path / "b.json").read_text()) == {"seed": 1, "wrong": ["something"]}
    assert "WRONG: something" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_run() -> None:
    document = openapi_document(ENDPOINTS)

    def drawn() -> list[object]:
        rng = random.Random(5)
        cases = make_cases(rng, 10)
        bodies = BodyMaker(document, cases)
        hostile = [[make(rng) for _ in range(200)] for make in (make_raw, make_tls)]
        new = [case.drawn(rng) for case in new_schema_cases(rng)]
        return [cases, new, [bodies.make(rng) for _ in range(200)], hostile]

    first = drawn()
    assert first == drawn()
    paths = {path for path, _ in first[2]}
    assert "/pause_generation" in document["paths"] and "/pause_generation" not in paths
    assert paths >= {"/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"}


def test_a_new_schema_is_another_one_in_each_request() -> None:
    rng = random.Random(1)
    for case in new_schema_cases(rng):
        one, other = case.drawn(rng), case.drawn(rng)
        assert len({case.encoded(False), one.encoded(False), other.encoded(False)}) == 3
        assert (one.name, one.has_new_schema) == (case.name, True), "its answer is that of the case"
        assert case.drawn(random.Random(2)) == case.drawn(random.Random(2))
    assert all(case.drawn(rng) is case for case in make_cases(rng, 10))


def test_a_fault_hits_one_step_and_stalls_are_noted(tmp_path: Path) -> None:
    hooks = Hooks(tmp_path / "hooks").create()
    hooks.ask_for("nan")
    assert [hooks.take_step_fault(), hooks.take_step_fault()] == ["nan", None]
    assert hooks.stalls() == []
    loop = hooks.watch_loop(uvloop.new_event_loop)()

    def burn() -> None:
        """Uses a core for longer than a stall."""
        until = time.thread_time() + 3 * STALL_S
        while time.thread_time() < until:
            os.getpid()
        loop.call_later(0.1, loop.stop)

    loop.call_later(0.05, burn)
    loop.run_forever()
    loop.close()
    assert any(stall.is_own_fault for stall in hooks.stalls())


def test_wrong_answers_to_raw_requests_are_seen() -> None:
    """A server that answers everything, also a ClientHello, by two answers."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 500 Oops\r\n\r\n")
        writer.close()

    async def ask() -> Findings:
        findings = Findings()
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            await send_raw(url, RawRequest("raw", b"GET"), findings)
            await send_tls(url, TlsRequest("bare", b"\x16"), findings)
            await send_tls(url, TlsRequest("inside", inside=(b"GET",)), findings)
        return findings

    wrong = asyncio.run(ask()).wrong
    expected = ["raw: status 500", "raw: 2 answers", "bare: the answer is not TLS", "inside: no handshake"]
    assert [text for one, text in zip(wrong, expected, strict=True) if not one.startswith(text)] == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl program is not installed")
def test_a_server_goes_on_with_the_handshake_of_a_hostile_client(tmp_path: Path) -> None:
    """Otherwise nothing after its first bytes would be tested."""
    _, certificate, _, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    for seed in range(20):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = context.wrap_bio(incoming, outgoing, server_side=True)
        incoming.write(client_hello(random.Random(seed)))
        with pytest.raises(ssl.SSLWantReadError):
            server.do_handshake()
        assert outgoing.read()[0] == 22, "the type of a record of a handshake"


def test_what_is_slow_fails_a_fuzz_run() -> None:
    stalls = [Stall(0.0, 1.0, busy_s, "here") for busy_s in (0.1, 0.3)]
    assert slow(stalls, 3.0, parse([])) == ["the loop was busy for 0.3 s: here"], "without --rate, no ratio is wrong"
    assert len(slow(stalls, 3.0, parse(["--rate", "20"]))) == 2
    assert slow(stalls, 1.9, parse(["--rate", "20", "--max-stall", "1"])) == []


def test_requests_begin_at_a_rate() -> None:
    async def wait(pace: Pace) -> float:
        began = time.monotonic()
        await asyncio.gather(*(pace.wait() for _ in range(21)))
        return time.monotonic() - began

    assert asyncio.run(wait(Pace(200.0))) >= 0.1
    assert Pace(None).interval_s == 0


@pytest.mark.parametrize(
    ("parse_it", "argv", "message"),
    [
        (chaos.parse, ["--faults", "0"], "--faults: must be at least 1, got 0"),
        (soak.parse, ["--requests", "0"], "--requests: must be at least 1, got 0"),
        (parse, ["--requests", "-1"], "--requests: must be at least 1, got -1"),
        (soak.parse, ["--clients", "0"], "--clients: must be at least 1, got 0"),
        (random_steps, ["--steps", "0"], "--steps: must be at least 1, got 0"),
        (chaos.parse, ["--max-silence", "nan"], "--max-silence: must be above 0 and finite, got nan"),
        (chaos.parse, ["--max-stop", "inf"], "--max-stop: must be finite and not negative, got inf"),
        (parse, ["--max-stall", "nan"], "--max-stall: must be above 0 and finite, got nan"),
        (parse, ["--rate", "0"], "--rate: must be above 0 and finite, got 0"),
        (random_steps, ["--time-limit", "nan"], "--time-limit: must be above 0 and finite, got nan"),
        (chaos.parse, ["--report", "nowhere/x.json"], "--report: must name a file in a folder that exists"),
        (random_steps, ["--report", "/"], "--report: must name a file in a folder that exists, got '/'"),
        (chaos.parse, ["--only", "kill all"], "--only: 'kill all' is none of kill the scheduler,"),
        (chaos.parse, ["--only", "kill the server"], "--only: 'kill the server' needs --server-faults"),
    ],
)
def test_a_run_that_would_check_nothing_is_refused(
    parse_it: Callable[[list[str]], object], argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_it(argv)
    assert caught.value.code == 2 and message in capsys.readouterr().err

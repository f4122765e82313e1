"""Streams that outlive their server: the next one goes on with the next event, and gives the earlier ones again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from breakable_http import Connection, events_in
from fake_http import Site, loaded_weights
from resumed_sites import LAST, SETTINGS, WORDS, ask, begun, go_on, kill, make_site, read, said, saved_of

from tercet.srt.weight_messages import UpdateWeightsReq

CHAT = {"messages": [{"role": "user", "content": "a"}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "abc", "max_tokens": 9, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 6, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 9, "n": 2, "logprobs": True, "return_token_ids": True}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 30, "tools": [TOOL], "stop": ["zzz"]}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 9}),
    ("/v1/messages", {**CHAT, "max_tokens": 9}),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 9, "n": 2}, "return_logprob": True}),
    (
        "/generate",
        {
            "input_ids": [5, 6],
            "rid": "mine",
            "sampling_params": {"max_new_tokens": 9, "sampling_seed": 2**63 - 1, "n": 2},
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("cuts", [(1, 1), (3, 1), (2, 3)], ids=str)
def test_a_stream_goes_on_after_the_death_of_its_server(
    tmp_path: Path, path: str, body: dict[str, Any], cuts: tuple[int, int]
) -> None:
    """`cuts`: how many events come before the two deaths."""
    file = tmp_path / "streams"
    site = make_site(file)
    site.scheduler.gate = True

    async def first_life() -> tuple[bytes, list[tuple[bytes, bytes]]]:
        connection = Connection(site, "POST", path, {**body, "stream": True})
        events = await read(site, connection, cuts[0])
        return connection.headers[b"x-stream-id"], events

    name, got = site.run(first_life())
    file = kill(site, file)
    assert got[0][0].startswith(name)
    for cut in (cuts[1], 1000):
        site = make_site(file)
        site.scheduler.gate = True

        got += site.run(go_on(site, got, cut))
        file = kill(site, file)
    numbers = [int(one.partition(b"/")[2]) for one, _ in got]
    assert numbers == list(range(1, len(got) + 1)) and got[-1][1].endswith(LAST)
    plain = Site(resume_grace=60.0)
    plain.scheduler.words = WORDS
    plain.scheduler.gate = True

    async def undisturbed() -> list[tuple[bytes, bytes]]:
        return await read(plain, Connection(plain, "POST", path, {**body, "stream": True}), 1000)

    expected = plain.run(undisturbed())
    assert said(got) == said(expected)
    plain.close()


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_stream_that_has_ended_is_given_again_with_its_times(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    site = make_site(tmp_path / "streams", enable_metrics=True)

    async def first_life() -> list[tuple[bytes, bytes]]:
        connection = Connection(site, "POST", path, {**body, "stream": True})
        await connection.done
        return events_in(connection.data)

    events = site.run(first_life())
    file = kill(site, tmp_path / "streams")
    site = make_site(file, enable_metrics=True)
    status, data = ask(site, events[0][0].partition(b"/")[0] + b"/0")
    assert status == 200 and events_in(data) == events
    assert not site.scheduler.received
    kill(site, file)


@pytest.mark.parametrize("path_and_body", [BODIES[1], BODIES[4]], ids=["completions", "responses"])
@pytest.mark.parametrize("num_missing", [0, 1, 2])
def test_the_client_of_a_stream_that_has_ended_may_lack_only_the_end(
    tmp_path: Path, path_and_body: tuple[str, dict[str, Any]], num_missing: int
) -> None:
    """No output is the cause of the last events, so none is recorded with them."""
    path, body = path_and_body
    site = make_site(tmp_path / "streams")

    async def whole(method: str, path: str, **headers: str) -> Connection:
        connection = Connection(site, method, path, {**body, "stream": True} if method == "POST" else None, **headers)
        await connection.done
        return connection

    events = events_in(site.run(whole("POST", path)).data)
    file = kill(site, tmp_path / "streams")
    site = make_site(file)
    last = events[-1 - num_missing][0].decode()
    assert site.run(whole("HEAD", "/v1/streams", last_event_id=last)).status == 200
    rest = site.run(whole("GET", "/v1/streams", last_event_id=last))
    assert rest.status == 200 and events_in(rest.data) == events[len(events) - num_missing :]
    kill(site, file)


def test_the_client_of_a_long_stream_waits_until_its_events_are_there_again(tmp_path: Path) -> None:
    """Other streams make progress while they are repeated."""
    file, events = begun(tmp_path / "streams", num_events=80, fields={"max_tokens": 200})
    site = make_site(file)
    status, data = ask(site, events[-1][0])
    assert status == 200 and len(events) == 80
    numbers = [int(name.partition(b"/")[2]) for name, _ in events + events_in(data)]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 80
    kill(site, file)


def test_another_model_refuses_by_name(tmp_path: Path) -> None:
    file, events = begun(tmp_path / "streams")
    site = make_site(file, {**SETTINGS, "model": "other"})
    status, data = ask(site, events[-1][0])
    assert status == 409 and b"stream_changed" in data and b"other settings (model)" in data
    assert not site.scheduler.received
    file = kill(site, file)
    site = make_site(file)
    assert ask(site, events[-1][0])[0] == 200, "the mistake can be undone"
    kill(site, file)


def test_a_stream_needs_the_weights_that_began_it(tmp_path: Path) -> None:
    """The settings of the server do not tell them: an update may have changed them since."""
    file, events = begun(tmp_path / "streams", weight_version="old")
    site = make_site(file, weight_version="old")
    update_weights(site, "new")
    status, data = ask(site, events[-1][0])
    assert status == 409 and b"other settings (weight_version)" in data
    file = kill(site, file)
    site = make_site(file, weight_version="old")
    assert ask(site, events[-1][0])[0] == 200
    kill(site, file)


def test_a_restored_stream_does_not_go_on_with_other_weights(tmp_path: Path) -> None:
    """Its samples have not been sent, so the update did not wait for them."""
    file, events = begun(tmp_path / "streams", weight_version="old")
    site = make_site(file, weight_version="old")

    async def restore() -> int:
        look = Connection(site, "HEAD", "/v1/streams", last_event_id=events[-1][0].decode())
        await look.done
        return look.status

    assert site.run(restore()) == 200
    update_weights(site, "new")
    status, data = ask(site, events[-1][0])
    assert status == 200 and b"stream_changed" in data and data.endswith(b"[DONE]\n\n")
    assert not site.scheduler.received
    kill(site, file)


def test_a_stream_that_outlives_an_update_of_the_weights_ends_with_its_server(tmp_path: Path) -> None:
    site = make_site(tmp_path / "streams")
    site.scheduler.gate = True

    async def run() -> None:
        connection = Connection(site, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 9, "stream": True})
        await read(site, connection, 2)
        await site.manager.pause.begin("retract")
        await site.manager.weights.update("/w/2", "auto", None, dtype="float32", abort_all=False)
        await site.manager.pause.end()
        assert saved_of(site)._journal.ids()
        site.scheduler.release()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not saved_of(site)._journal.ids()
        site.manager.fail("the engine was shut down")
        await connection.done
        assert b"engine_dead" in connection.data and connection.data.endswith(b"[DONE]\n\n")

    take_weights(site)
    site.run(run())
    kill(site, tmp_path / "streams")


def test_repeated_events_name_their_weights(tmp_path: Path) -> None:
    site = make_site(tmp_path / "streams", weight_version="v1")
    site.scheduler.gate = True

    async def run() -> list[tuple[bytes, bytes]]:
        return await read(site, Connection(site, "POST", "/generate", {"text": "a", "stream": True}), 2)

    events = site.run(run())
    file = kill(site, tmp_path / "streams")
    assert b'"weight_version":"v1"' in events[0][1]
    site = make_site(file, weight_version="v1")
    assert events_in(ask(site, events[0][0].partition(b"/")[0] + b"/0")[1])[:2] == events
    kill(site, file)


def take_weights(site: Site) -> None:
    """The scheduler loads all weights at once."""
    site.scheduler.answers[UpdateWeightsReq] = loaded_weights


def update_weights(site: Site, version: str) -> None:
    take_weights(site)
    site.run(site.manager.weights.update("/w/2", "auto", version, dtype="float32", abort_all=False))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"radix_eviction_policy": "lru", "enable_priority_scheduling": False}, ("", None, 0)),
        ({"disable_radix_cache": True}, ("", None, 2)),
        ({"max_retention_s": 5.0}, ("s", 5.0, 2)),
    ],
)
def test_a_server_that_allows_less_keeps_to_its_settings(
    tmp_path: Path, flags: dict[str, Any], expected: tuple[str, float | None, int]
) -> None:
    """A scheduler whose cache retains nothing would fail at the end of the request."""
    fields = {"session_id": "s", "retention_seconds": 9, "priority": 2}
    file, events = begun(tmp_path / "streams", fields=fields)
    site = make_site(file, **flags)
    assert ask(site, events[-1][0])[0] == 200
    options = site.scheduler.received[0].options
    assert (options.session_id, options.retention_seconds, options.priority) == expected
    kill(site, file)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["sesame", "pomegranate"], ["pomegranate", "sesame"]),
        (["sesame"], ["pomegranate", "sesame"]),
        (["sesame", "pomegranate"], ["sesame"]),
        (["sesame"], ["sesame"]),
    ],
    ids=["another order", "one more", "one less", "one"],
)
def test_only_the_same_key_gets_the_stream(tmp_path: Path, before: list[str], after: list[str]) -> None:
    file, events = begun(tmp_path / "streams", api_key=before)
    assert b"sesame" not in file.read_bytes()
    site = make_site(file, api_key=after)
    for key in after:
        status = 200 if key == "sesame" else 404
        assert ask(site, events[-1][0], authorization=f"Bearer {key}")[0] == status
    kill(site, file)


def test_a_client_that_has_more_than_the_file(tmp_path: Path) -> None:
    """The machine has lost power, and the last records with it."""
    file, events = begun(tmp_path / "streams")
    file.write_bytes(file.read_bytes()[:-1])
    site = make_site(file)
    status, data = ask(site, events[-1][0])
    assert status == 410 and b"the events after 2 are lost" in data
    assert not site.scheduler.received, "nothing runs before a client reads it"
    assert ask(site, events[1][0])[0] == 200
    kill(site, file)


def test_a_stream_whose_first_outputs_are_lost_begins_again(tmp_path: Path) -> None:
    file, events = begun(tmp_path / "streams", num_events=1)
    file.write_bytes(file.read_bytes()[:-1])
    name = events[0][0].partition(b"/")[0]
    for _ in range(2):  # the first server records it again, and the second one repeats it
        site = make_site(file)
        status, data = ask(site, name + b"/0")
        assert status == 200 and b"error" not in data
        assert [one for one in events_in(data) if one[0] == events[0][0]] == events
        file = kill(site, file)


def test_nobody_asks_in_time(tmp_path: Path) -> None:
    file, events = begun(tmp_path / "streams")
    site = make_site(file, grace_s=0.01)

    async def wait() -> None:
        saved_of(site).begin_grace()
        while saved_of(site)._journal.ids():
            await asyncio.sleep(0.01)

    site.run(wait())
    assert ask(site, events[-1][0])[0] == 404 and not site.scheduler.received
    file = kill(site, file)
    site = make_site(file)
    assert not saved_of(site)._journal.ids()
    kill(site, file)


def test_two_clients_at_once_get_one_stream(tmp_path: Path) -> None:
    file, events = begun(tmp_path / "streams")
    site = make_site(file)

    async def run() -> None:
        name = events[0][0].decode()
        both = [Connection(site, "GET", "/v1/streams", last_event_id=name) for _ in range(2)]
        await asyncio.gather(*(one.done for one in both))
        assert [one.status for one in both] == [200, 200]
        assert both[1].data.endswith(b"[DONE]\n\n") and len(site.scheduler.received) == 1

    site.run(run())
    kill(site, file)


@pytest.mark.parametrize("ending", ["shutdown", "death"])
def test_the_end_of_the_engine_is_not_the_end_of_a_stream(tmp_path: Path, ending: str) -> None:
    file = tmp_path / "streams"
    site = make_site(file)
    site.scheduler.gate = True

    async def run() -> list[tuple[bytes, bytes]]:
        body = {"prompt": "a", "max_tokens": 9, "stream": True}
        left = Connection(site, "POST", "/v1/completions", body)
        stays = Connection(site, "POST", "/v1/completions", body)
        await read(site, left, 1)
        got = await read(site, stays, 2)
        left.leave()
        await left.done
        if ending == "shutdown":
            saved_of(site).streams.drain()
            site.manager.draining = True
            while not site.scheduler.aborted:  # a request without a client does not delay the end
                await asyncio.sleep(0)
            assert len(site.scheduler.running) == 1
            again = Connection(site, "GET", "/v1/streams", last_event_id=got[0][0].decode())
            while not again.data:  # this server still runs it
                await asyncio.sleep(0)
            gone = Connection(site, "GET", "/v1/streams", last_event_id=events_in(left.data)[0][0].decode())
            await gone.done
            assert gone.status == 503 and b"the next one will continue" in gone.data
        site.manager.fail("the engine was shut down")
        await stays.done
        assert b"error" not in stays.data and b"[DONE]" not in stays.data
        late = Connection(site, "GET", "/v1/streams", last_event_id=got[0][0].decode())
        await late.done
        assert late.status == 503
        return [*got, *events_in(left.data)]

    events = site.run(run())
    file = kill(site, file)
    site = make_site(file)
    for name in (events[1][0], events[-1][0]):
        status, data = ask(site, name)
        assert status == 200 and data.count(b"[DONE]") == 1
    kill(site, file)


def test_the_end_of_the_engine_before_the_first_event_has_a_status(tmp_path: Path) -> None:
    site = make_site(tmp_path / "streams")
    site.scheduler.words, site.scheduler.gate = ("", "x"), True

    async def run() -> None:
        body = {"prompt": "a", "max_tokens": 9, "stream": True}
        connection = Connection(site, "POST", "/v1/completions", body)
        while not site.scheduler.held:
            await asyncio.sleep(0)
        site.scheduler.release()
        while not saved_of(site)._journal.ids():
            await asyncio.sleep(0)
        site.manager.fail("the engine was shut down")
        await connection.done
        assert connection.status == 503 and not saved_of(site)._journal.ids()

    site.run(run())
    kill(site, tmp_path / "streams")

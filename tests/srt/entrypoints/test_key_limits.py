"""Limits for each API key or client address: requests in a minute, and unanswered requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_http import Site, error_of
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fakes import FakeClock
from tercet.srt.entrypoints.key_limits import KeyLimits, TokenBucket
from tercet.srt.entrypoints.limited_requests import LIMIT_HEADERS, LimitedRequests, name_of
from tercet.srt.entrypoints.routing import BoundEndpoint
from tercet.srt.server_args import ServerArgs

BODY: dict[str, Any] = {"prompt": "abc", "max_tokens": 4}
KEYS = ["sesame", "pomegranate"]


def as_client(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Replaces the clock of every app that a test makes."""
    clock = FakeClock()
    make = KeyLimits.of
    monkeypatch.setattr(KeyLimits, "of", lambda args, _: make(args, clock))
    return clock


def test_requests_per_minute(clock: FakeClock) -> None:
    site = Site(api_key=KEYS, requests_per_minute_per_key=3)

    def post(key: str) -> tuple[int, list[str]]:
        answer = site.post("/v1/completions", BODY, headers=as_client(key))
        if answer.status_code == 429:
            error = error_of(answer)
            assert error["code"] == "rate_limit_exceeded" and "3 requests per minute" in error["message"]
        return answer.status_code, [answer.headers[name] for name in LIMIT_HEADERS]

    assert [post(KEYS[0]) for _ in range(3)] == [
        (200, ["3", "2", "20s"]),
        (200, ["3", "1", "40s"]),
        (200, ["3", "0", "1m0s"]),
    ]
    clock.now += 5.5
    refused = site.post("/v1/completions", BODY, headers=as_client(KEYS[0]))
    assert refused.status_code == 429 and refused.headers["retry-after"] == "15"
    assert post(KEYS[1]) == (200, ["3", "2", "20s"]), "another key has limits of its own"
    clock.now += float(refused.headers["retry-after"])
    assert post(KEYS[0]) == (200, ["3", "0", "59.5s"]), "a refused request takes nothing"
    assert post(KEYS[0])[0] == 429
    clock.now += 3600
    assert post(KEYS[0]) == (200, ["3", "2", "20s"])
    site.close()


@pytest.mark.parametrize("stream", [False, True])
def test_concurrent_requests(clock: FakeClock, stream: bool) -> None:
    site = Site(api_key=KEYS, max_concurrent_requests_per_key=2)
    site.scheduler.gate = True
    body = {**BODY, "stream": stream}

    async def run() -> None:
        def post(key: str) -> asyncio.Task[Any]:
            return asyncio.create_task(site.client.post("/v1/completions", json=body, headers=as_client(key)))

        running = [post(KEYS[0]) for _ in range(2)]
        while len(site.scheduler.received) < 2:
            await asyncio.sleep(0)
        refused = await post(KEYS[0])
        assert refused.status_code == 429 and error_of(refused)["code"] == "rate_limit_exceeded"
        assert refused.headers["retry-after"] == "1" and LIMIT_HEADERS[0] not in refused.headers
        assert len(site.scheduler.received) == 2, "the engine hears nothing of it"
        running.append(post(KEYS[1]))
        while len(site.scheduler.received) < 3:
            await asyncio.sleep(0)
        site.scheduler.gate = False
        while site.scheduler.held:
            site.scheduler.release()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 3
        assert (await post(KEYS[0])).status_code == 200

    site.run(run())
    site.close()


def test_the_wait_for_a_running_request_is_the_mean_of_the_last_ones(clock: FakeClock) -> None:
    limits = LimitedRequests(KeyLimits(2, None, clock), has_keys=False)
    scope: Scope = {"type": "http", "client": ("192.0.2.1", 1), "headers": []}
    told: list[bytes] = []

    async def nothing() -> Message:
        return {"type": "http.disconnect"}

    async def tell(message: Message) -> None:
        told.extend(value for name, value in message.get("headers", ()) if name == b"retry-after")

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        clock.now += 20.0

    async def nested(scope: Scope, receive: Receive, send: Send) -> None:
        await limits.serve(still_nested, scope, receive, send)

    async def still_nested(scope: Scope, receive: Receive, send: Send) -> None:
        await limits.serve(slow, scope, receive, send)

    async def run() -> None:
        for _ in range(60):
            await limits.serve(slow, scope, nothing, tell)
        await limits.serve(nested, scope, nothing, tell)

    asyncio.run(run())
    assert told == [b"10"]


@pytest.mark.parametrize("failure", [RuntimeError("a defect"), asyncio.CancelledError()])
def test_a_request_that_fails_is_no_longer_running(failure: BaseException) -> None:
    limits = LimitedRequests(KeyLimits(1, None, FakeClock()), has_keys=False)
    scope: Scope = {"type": "http", "client": ("192.0.2.1", 1), "headers": []}
    statuses = []

    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise failure

    async def nothing() -> Message:
        return {"type": "http.disconnect"}

    async def note(message: Message) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    async def run() -> None:
        with pytest.raises(type(failure)):
            await limits.serve(fail, scope, nothing, note)
        await limits.serve(PlainTextResponse("done"), scope, nothing, note)

    asyncio.run(run())
    assert statuses == [200]


def test_every_endpoint_that_runs_a_model_is_limited_and_no_other() -> None:
    site = Site(requests_per_minute_per_key=1)
    limited = set()
    for route in site.app.routes:
        assert isinstance(route, Route) and isinstance(route.app, BoundEndpoint)
        if route.app._limits is not None:
            limited.add(route.path)
    paths = {"/generate", *(f"/v1/{name}" for name in ("completions", "chat/completions", "responses", "messages"))}
    paths |= {"/v1/embeddings", "/v1/score", "/v1/rerank"}
    assert limited == paths
    assert site.post("/generate", {"text": "a"}).status_code == 200
    for path in ("/health", "/v1/models", "/get_load", "/health_generate"):
        assert site.get(path).status_code == 200, "no limit for these"
    for path in paths:
        assert site.post(path, b"no JSON").status_code == 429, "refused before the body is decoded"
    site.close()


def test_without_limits_nothing_is_counted() -> None:
    site = Site()
    answer = site.post("/v1/completions", BODY)
    assert answer.status_code == 200 and not [name for name in answer.headers if name.startswith("x-ratelimit")]
    site.close()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("2001:db8::1", "2001:db8::2:3:4:5", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        (None, None, True),
        (None, "192.0.2.1", False),
    ],
)
def test_without_keys_a_client_is_its_address(one: str | None, other: str | None, same: bool) -> None:
    def name(address: str | None) -> str:
        return name_of({"client": address and (address, 1234)}, has_keys=False)

    assert (name(one) == name(other)) is same


def test_one_key_is_one_client_from_any_address() -> None:
    names = {name_of({"client": (f"192.0.2.{host}", 1)}, has_keys=True) for host in range(5)}
    assert len(names) == 1


def test_the_number_of_remembered_clients_is_bounded() -> None:
    clock = FakeClock()
    limits = KeyLimits(None, 2, clock, max_clients=50)
    limited = LimitedRequests(limits, has_keys=False)
    statuses: list[int] = []

    async def nothing() -> Message:
        return {"type": "http.disconnect"}

    async def note(message: Message) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    async def ask(host: int) -> int:
        scope: Scope = {"type": "http", "client": (f"10.0.{host // 256}.{host % 256}", 1), "headers": []}
        await limited.serve(PlainTextResponse("done"), scope, nothing, note)
        return statuses[-1]

    async def run() -> None:
        for host in range(1000):
            assert await ask(host) == 200
            assert len(limits) <= 50
        assert [await ask(999) for _ in range(2)] == [200, 429], "a client that came lately is remembered"
        clock.now += 3600
        for host in range(2000, 2040):
            await ask(host)
        assert len(limits) <= 40, "clients that have all of their limits are forgotten"
        assert [await ask(2000) for _ in range(2)] == [200, 429], "the others are not"

    asyncio.run(run())


def test_a_client_is_remembered_while_its_request_runs() -> None:
    limits = KeyLimits(1, None, FakeClock(), max_clients=5)
    limited = LimitedRequests(limits, has_keys=False)
    statuses: list[int] = []

    async def nothing() -> Message:
        return {"type": "http.disconnect"}

    async def note(message: Message) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    async def ask(host: int, app: ASGIApp) -> None:
        await limited.serve(app, {"type": "http", "client": (f"192.0.2.{host}", 1), "headers": []}, nothing, note)

    async def others(scope: Scope, receive: Receive, send: Send) -> None:
        for host in (1, 2, 3, 4, 5, 6, 0):
            await ask(host, PlainTextResponse("done"))
            assert len(limits) <= 5

    async def run() -> None:
        await ask(0, others)
        assert statuses == [200] * 6 + [429]
        for host in (1, 2):
            await ask(host, PlainTextResponse("done"))
        assert statuses[7:] == [200] * 2 and len(limits) <= 4

    asyncio.run(run())


@given(
    st.integers(1, 1000),
    st.lists(st.floats(0.0, 30.0), max_size=60),
)
def test_a_bucket_gives_its_capacity_and_what_flows_in(capacity: int, pauses: list[float]) -> None:
    clock = FakeClock()
    bucket = TokenBucket(capacity, clock)
    start, num_taken = clock.now, 0
    for pause in pauses:
        clock.now += pause
        num_taken += sum(bucket.take() for _ in range(3))
        assert num_taken <= capacity * (1 + (clock.now - start) / 60) + 1e-6
        assert -1e-6 <= bucket.level <= capacity
        wait_s = bucket.wait_s
        if wait_s:
            assert not bucket.take()
            clock.now += wait_s
            assert bucket.take(), "the time that is told is enough"
            num_taken += 1


@pytest.mark.parametrize("name", ["max_concurrent_requests_per_key", "requests_per_minute_per_key"])
def test_a_limit_is_at_least_1(name: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ServerArgs(model_path="m", **{name: 0})

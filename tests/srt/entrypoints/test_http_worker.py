"""An HTTP worker and its side in the parent, in one event loop: real links and a real app, and a fake scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
from fake_adapters import PIRATE
from fake_http import FakeScheduler, make_manager, text_of

from tercet.managers.tokenizer_manager import TokenizerManager
from tercet.srt.entrypoints import http_worker, routing
from tercet.srt.entrypoints.endpoints import ENDPOINTS
from tercet.srt.entrypoints.forwarded import WHOLE_SERVER, ParentEndpoints
from tercet.srt.entrypoints.http_server import make_server
from tercet.srt.entrypoints.http_worker import HttpWorker
from tercet.srt.entrypoints.page import SCRIPT_PATHS
from tercet.srt.entrypoints.watchdog import HangDetector
from tercet.srt.entrypoints.worker_link import ServedEngine, Worker
from tercet.srt.errors import EngineDead, InvalidRequest
from tercet.srt.grammar_spec import GrammarSpec
from tercet.srt.io_struct import BrokenMessage
from tercet.srt.ipc import RunDir
from tercet.srt.server_args import ServerArgs

LOCAL = {
    *("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/score"),
    *(
        "/v1/rerank",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/streams",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
        "/v1/models",
        "/v1/models/{model:path}",
        "/tokenize",
        "/detokenize",
        "/version",
    ),
    *("/tokenizer_info", "/", "/web/style.css", SCRIPT_PATHS[0]),
}
"""The endpoints that each worker answers itself."""


class Judge:
    """Refuses the grammar "bad", and cannot check "dead" and "lost"."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def check(self, spec: GrammarSpec) -> None:
        self.asked.append(spec.text)
        if spec.text == "bad":
            raise InvalidRequest("this grammar is bad", param=spec.kind)
        if spec.text == "dead":
            raise EngineDead("no grammar worker")
        if spec.text == "lost":
            raise OSError("too many open files")


class Listener:
    app: Any = None


class Rig:
    """A worker of two, with the number 1."""

    def __init__(
        self,
        scheduler: FakeScheduler,
        manager: TokenizerManager,
        client: httpx.AsyncClient,
        parent: Worker,
        worker: HttpWorker,
    ) -> None:
        self.parent = parent
        self.worker = worker
        self.scheduler = scheduler
        self.manager = manager
        self.client = client
        self.judge = Judge()
        manager.grammars = self.judge

    async def generate(self, **body: Any) -> httpx.Response:
        return await self.client.post(
            "/generate", json={"text": "hi", "sampling_params": {"max_new_tokens": 3}, **body}
        )

    async def generating(self) -> asyncio.Task[httpx.Response]:
        """A request that the scheduler has received, and does not answer."""
        self.scheduler.mute = True
        answer = asyncio.create_task(self.generate())
        while not self.scheduler.received:
            await asyncio.sleep(0.001)
        return answer


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    """Runs a test with a Rig, and with further settings."""

    async def body(work: Callable[[Rig], Awaitable[None]], settings: dict[str, Any]) -> None:
        scheduler = FakeScheduler()
        manager = make_manager(scheduler, tokenizer_worker_num=2, tool_call_parser="hermes", **settings)
        context: zmq.Context[Any] = zmq.Context()
        run_dir, listener = RunDir(tmp_path, 1), Listener()
        parent = Worker(None, None, context, run_dir, HangDetector(300.0, None))  # type: ignore[arg-type]
        make: Any = lambda: listener  # noqa: E731
        worker = HttpWorker(
            manager.server_args, manager.model_config, manager.inputs.tokenizer, make(), make, context, run_dir, None
        )
        server = make_server(manager)
        engine = ServedEngine(
            manager, server, ParentEndpoints(server, [e for e in ENDPOINTS if e.path in WHOLE_SERVER])
        )
        parent.open(engine, lambda: None)
        parent.sender.send(engine.news())
        while listener.app is None:
            await asyncio.sleep(0.001)
        transport = httpx.ASGITransport(listener.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await work(Rig(scheduler, manager, client, parent, worker))
        parent.close()
        worker.close()
        context.destroy(linger=0)

    return lambda work, **settings: asyncio.run(asyncio.wait_for(body(work, settings), 30))


@pytest.mark.parametrize(
    "flags",
    [
        {"resume_grace": 1.0},
        {"resume_grace": 1.0, "resume_file": "f"},
        {"response_store_mib": 1},
    ],
)
def test_what_needs_one_process_is_refused_with_more(flags: dict[str, Any]) -> None:
    ServerArgs(model_path="m", **flags)
    name = [*flags][-1].replace("_", "-")
    with pytest.raises(ValueError, match=f"--{name} needs --tokenizer-worker-num 1, got 2"):
        ServerArgs(model_path="m", tokenizer_worker_num=2, **flags)


@pytest.mark.parametrize("number", [0, 65])
def test_the_number_of_workers_has_bounds(number: int) -> None:
    with pytest.raises(ValueError, match=f"--tokenizer-worker-num must be in .1, 64., got {number}"):
        ServerArgs(model_path="m", tokenizer_worker_num=number)


def test_each_endpoint_is_answered_in_one_place() -> None:
    assert {endpoint.path for endpoint in ENDPOINTS} == WHOLE_SERVER | LOCAL
    assert not WHOLE_SERVER & LOCAL
    assert not [one.path for one in ENDPOINTS if one.path in WHOLE_SERVER and (one.streams or one.runs_model)]


def test_a_worker_tokenises_and_renders(run: Any) -> None:
    async def work(rig: Rig) -> None:
        messages = [{"role": "user", "content": "hello"}]
        assert (await rig.generate()).json()["text"] == text_of(3)
        chat = await rig.client.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": messages, "max_tokens": 2}
        )
        assert chat.json()["choices"][0]["message"]["content"] == text_of(2)
        assert rig.scheduler.prompt_texts() == ["hi", "<user>hello\n<assistant>"]
        assert [request.rid for request in rig.scheduler.received] == ["1-0", "1-1"]
        assert (await rig.client.post("/tokenize", json={"prompt": "hi"})).json()["count"] == 2

    run(work)


def test_the_workers_share_the_limit_on_bodies(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_HELD_BYTES", 400)

    async def work(rig: Rig) -> None:
        assert [(await rig.generate(text="x" * length)).status_code for length in (10, 200)] == [200, 503]

    run(work)


def test_the_parent_judges_grammars(run: Any) -> None:
    async def work(rig: Rig) -> None:
        answers = [
            await rig.generate(sampling_params={"regex": text, "max_new_tokens": 1}) for text in ("a", "bad", "a")
        ]
        assert [answer.status_code for answer in answers] == [200, 400, 200]
        assert answers[1].json()["error"]["message"] == "this grammar is bad"
        assert answers[1].json()["error"]["param"] == "sampling_params.regex"
        assert rig.judge.asked == ["a", "bad"]  # the worker keeps verdicts
        for _ in range(2):  # but no failures
            dead = await rig.generate(sampling_params={"regex": "dead", "max_new_tokens": 1})
            assert dead.status_code == 503 and dead.json()["error"]["message"] == "no grammar worker"
        lost = await rig.generate(sampling_params={"regex": "lost", "max_new_tokens": 1})
        assert lost.status_code == 500 and lost.json()["error"]["message"] == "the grammar could not be checked"
        assert rig.judge.asked == ["a", "bad", "dead", "dead", "lost"]

    run(work)


def test_a_worker_that_has_caught_up_knows_the_news(run: Any) -> None:
    async def work(rig: Rig) -> None:
        rig.manager.adapters.use([PIRATE])
        assert rig.parent._engine is not None
        rig.parent.sender.send(rig.parent._engine.news())
        await rig.parent.catch_up()
        assert [one["id"] for one in (await rig.client.get("/v1/models")).json()["data"]] == ["tiny", "pirate"]

    run(work)


def test_a_tool_call_is_retained(run: Any) -> None:
    async def work(rig: Rig) -> None:
        rig.scheduler.say('<tool_call>{"name": "f", "arguments": {}}</tool_call>')
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "max_tokens": 9}
        answer = await rig.client.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
        while not rig.scheduler.retained:
            await asyncio.sleep(0.001)

    run(work)


def test_an_error_of_the_engine_arrives_whole(run: Any) -> None:
    async def work(rig: Rig) -> None:
        answer = await rig.generating()
        rig.manager.on_message(BrokenMessage(["1-0"], "the message broke"))
        assert (await answer).status_code == 500
        assert (await answer).json()["error"]["message"] == "the message broke"

    run(work)


def test_a_worker_answers_probes_itself_while_its_parent_is_silent(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(rig: Rig) -> None:
        own = rig.worker._manager
        assert own is not None and (await rig.client.get("/health")).status_code == 200
        rig.scheduler.mute = True
        waiting = asyncio.create_task(rig.client.get("/health_generate"))
        while not rig.scheduler.received:
            await asyncio.sleep(0.001)
        stalls: list[str | None] = []
        own.on_stall.add(lambda: stalls.append(own.stall))
        with monkeypatch.context() as patch:
            patch.setattr(http_worker, "_SILENT_S", -1.0)
            rig.worker.look_at_parent()
            assert own.stall is None  # this process may have been stopped itself
            rig.worker.look_at_parent()
            rig.worker.look_at_parent()
            assert stalls == ["waiting"]
            for answer in (await waiting, await rig.client.get("/health"), await rig.client.get("/ready")):
                assert answer.status_code == 503 and "does not answer" in answer.json()["error"]["message"]
            change = rig.client.post("/abort_request", json={"rid": "x"})  # it waits for its answer
            assert (await change).json() == {"aborted": False}
        rig.worker.look_at_parent()
        assert own.stall is None
        assert (await rig.client.get("/ready")).status_code == 200

    run(work)


def test_the_parent_counts_the_requests_of_clients(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(rig: Rig) -> None:
        waiting = await rig.generating()
        assert rig.parent._engine is not None and rig.parent._engine.limits is not None
        of_other_worker = rig.parent._engine.limits.take_now("127.0.0.1")
        assert of_other_worker.refusal is not None, "one request of this client runs in the first worker"
        refused = await rig.generate()
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.headers["retry-after"] == "1" and refused.headers["x-ratelimit-remaining-requests"] == "8"
        rig.scheduler.mute = False
        rig.manager.abort_all()
        assert (await waiting).headers["x-ratelimit-limit-requests"] == "9"
        assert (await rig.generate()).status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(http_worker, "_SILENT_S", -1.0)
            for _ in range(2):
                rig.worker.look_at_parent()
            assert (await rig.generate()).status_code == 503
        assert (await rig.client.get("/v1/models")).status_code == 200, "it has no limit"

    run(work, max_concurrent_requests_per_key=1, requests_per_minute_per_key=9)


def test_a_worker_whose_link_is_closed_has_no_running_requests(run: Any) -> None:
    async def work(rig: Rig) -> None:
        waiting = await rig.generating()
        assert rig.parent._engine is not None and rig.parent._engine.limits is not None
        rig.parent.close()
        assert rig.parent._engine.limits.take_now("127.0.0.1").refusal is None
        waiting.cancel()

    run(work, max_concurrent_requests_per_key=1)


@pytest.mark.parametrize(("path", "status"), [("/flush_cache", 200), ("/start_profile", 403), ("/stop_profile", 403)])
def test_a_get_that_changes_something_waits_for_a_silent_parent(
    run: Any, monkeypatch: pytest.MonkeyPatch, path: str, status: int
) -> None:
    """With 503 it would have no effect, but the parent carries it out later."""

    async def work(rig: Rig) -> None:
        with monkeypatch.context() as patch:
            sent: list[Any] = []
            patch.setattr(rig.worker._parent, "send", sent.append)
            changing = asyncio.create_task(rig.client.get(path))
            while not sent:
                await asyncio.sleep(0.001)
        monkeypatch.setattr(http_worker, "_SILENT_S", -1.0)
        for _ in range(2):
            rig.worker.look_at_parent()
        rig.worker._parent.send(*sent)
        assert (await changing).status_code == status

    run(work)

"""The TokenizerManager of an HTTP worker: a list is the link to the parent, and the test tells the news."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from fake_grammars import FakeGrammars
from fake_http import FakeScheduler, make_manager

from tercet.managers.request_registry import Prompt
from tercet.managers.worker_manager import WorkerManager
from tercet.srt.adapters import AdapterFacts
from tercet.srt.errors import EngineDead
from tercet.srt.io_struct import AbortFinish
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.worker_messages import EngineNews, SampleReq


class Parent:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def make_worker(number: int = 3) -> tuple[WorkerManager, Parent, EngineNews]:
    pattern, parent = make_manager(FakeScheduler(), random_seed=5), Parent()
    news = EngineNews(
        facts=pattern.facts,
        model_path=pattern.server_args.model_path,
        load_format=pattern.server_args.load_format,
        dtype=pattern.server_args.dtype,
        weight_version="default",
        stall=None,
        failure=None,
        draining=False,
        started=1,
    )
    args, config, tokenizer = pattern.server_args, pattern.model_config, pattern.inputs.tokenizer
    return WorkerManager(args, config, tokenizer, news, parent, FakeGrammars(), number), parent, news


def prompt(text: str = "hello", rid: str | None = None) -> Prompt:
    return Prompt(content=text, options=RequestOptions(sampling=SamplingParams(max_new_tokens=4)), rid=rid)


def test_no_two_workers_use_one_key_or_one_seed() -> None:
    async def body() -> list[SampleReq]:
        sent = []
        for number in (0, 1, 64):
            worker, parent, _ = make_worker(number)
            for _ in range(2):
                await worker.submit("hello", prompt().options)
            sent += parent.sent
        return sent

    sent = asyncio.run(body())
    assert len({request.rid for request in sent}) == len({r.options.sampling.sampling_seed for r in sent}) == 6


def test_the_parent_learns_what_the_client_knows_a_sample_by() -> None:
    async def body() -> list[SampleReq]:
        worker, parent, _ = make_worker()
        options = RequestOptions(sampling=SamplingParams(max_new_tokens=4, n=2))
        await worker.submit("hello", options, rid="mine")
        await worker.submit("hello", options, rid="other")
        return parent.sent

    sent = asyncio.run(body())
    assert [(one.name, one.index) for one in sent] == [("mine", 0), ("mine", 1), ("other", 0), ("other", 1)]
    assert [one.request.rid for one in sent] == [one.rid for one in sent] == ["3-0", "3-1", "3-2", "3-3"]


def test_a_worker_hears_which_weights_are_in_use() -> None:
    worker, _, news = make_worker()
    before = worker.server_args
    worker.hear(news)
    assert worker.server_args is before and worker.weights.num_updates == 0
    worker.hear(msgspec.structs.replace(news, model_path="/new", weight_version="2", dtype="float32"))
    args = worker.server_args
    assert (args.model_path, args.weight_version, args.dtype) == ("/new", "2", "float32")
    assert (args.random_seed, args.model_name) == (before.random_seed, before.model_name)


def test_news_changes_what_requests_see() -> None:
    async def body() -> None:
        worker, _, news = make_worker()
        request = worker.open([prompt()])
        stalls: list[str | None] = []
        worker.on_stall.add(lambda: stalls.append(worker.stall))
        facts = msgspec.structs.replace(news.facts, max_total_num_tokens=20, context_len=20, max_req_input_len=19)
        worker.hear(msgspec.structs.replace(news, stall="restarting", weight_version="new", facts=facts))
        worker.hear(msgspec.structs.replace(news, stall="paused", weight_version="new", facts=facts))
        assert stalls == ["restarting"] and worker.stall == "paused"
        assert request.prompts[0].generations[0].weight_version == "new"
        assert worker.open([prompt()]).prompts[0].generations[0].weight_version == "new"
        with pytest.raises(ValueError, match="20 tokens"):
            await worker.submit("x" * 30, prompt().options)
        worker.hear(news)
        assert worker.stall is None

    asyncio.run(body())


def test_a_server_that_shuts_down_lets_requests_end() -> None:
    async def body() -> None:
        worker, parent, news = make_worker()
        (running,) = await worker.submit("hello", prompt().options)
        opened = worker.open([prompt()])
        worker.hear(msgspec.structs.replace(news, draining=True))
        with pytest.raises(EngineDead, match="shutting down"):
            worker.open([prompt()])
        await worker.start(opened.prompts[0])
        assert len(parent.sent) == 2 and worker.num_unfinished == 2
        worker.hear(msgspec.structs.replace(news, failure="it has died"))
        finish = (await running.result()).finish
        assert isinstance(finish, AbortFinish) and finish.message == "it has died"
        with pytest.raises(EngineDead, match="it has died"):
            worker.open([prompt()])

    asyncio.run(body())


def test_aborts_by_name() -> None:
    async def body() -> None:
        worker, _, _ = make_worker()
        for name in ("a", "b", "c"):
            worker.open([prompt(rid=name)])
        assert worker.abort_by_name("b") and not worker.abort_by_name("b")
        assert worker.num_unfinished == 2
        assert worker.abort_by_name(None) and not worker.abort_by_name(None)
        assert not worker.num_unfinished

    asyncio.run(body())


def test_news_names_the_adapters() -> None:
    worker, _, news = make_worker()
    facts = AdapterFacts("pirate", "/p", "f1", 1)
    assert worker.adapters.usable == []
    worker.hear(msgspec.structs.replace(news, facts=msgspec.structs.replace(news.facts, adapters=[facts])))
    assert worker.adapters.find("pirate") == facts.ref
    worker.hear(news)
    assert worker.adapters.find("pirate") is None

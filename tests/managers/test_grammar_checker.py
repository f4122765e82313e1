"""The judge of grammars: one compilation for equal grammars, bounded memory of verdicts, errors that are its own."""

from __future__ import annotations

import asyncio

import pytest

from tercet.managers.grammar_checker import GrammarChecker
from tercet.srt.errors import EngineDead, InvalidRequest
from tercet.srt.grammar_spec import GrammarSpec


class FakeWorker:
    """Finds grammars whose text begins with `bad` bad, once `go` is set."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.go = asyncio.Event()
        self.go.set()

    async def compile(self, spec: GrammarSpec) -> str | None:
        self.compiled.append(spec.text)
        await self.go.wait()
        if spec.text == "dead":
            raise EngineDead("no worker")
        return f"{spec.text} is bad" if spec.text.startswith("bad") else None


def spec(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


def test_equal_grammars_wait_for_one_compilation_even_if_the_first_client_goes() -> None:
    async def work() -> None:
        worker = FakeWorker()
        worker.go.clear()
        checker = GrammarChecker(worker)
        first, second = asyncio.create_task(checker.check(spec("a"))), asyncio.create_task(checker.check(spec("a")))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        worker.go.set()
        await second
        await checker.check(spec("a"))
        assert worker.compiled == ["a"]
        await checker.check(GrammarSpec("ebnf", "a"))
        assert worker.compiled == ["a", "a"]

    asyncio.run(work())


def test_a_bad_grammar_is_remembered_too() -> None:
    async def work() -> None:
        worker = FakeWorker()
        checker = GrammarChecker(worker)
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="bad one is bad") as caught:
                await checker.check(spec("bad one"))
            assert caught.value.param == "regex"
        assert worker.compiled == ["bad one"]

    asyncio.run(work())


def test_verdicts_take_bounded_memory_and_the_oldest_goes_first() -> None:
    async def work() -> None:
        worker = FakeWorker()
        checker = GrammarChecker(worker, max_bytes=30)
        for text in ("a" * 10, "b" * 10, "c" * 10, "a" * 10, "d" * 10, "a" * 10, "b" * 10):
            await checker.check(spec(text))
        assert [text[0] for text in worker.compiled] == ["a", "b", "c", "d", "b"]

    asyncio.run(work())


def test_a_failure_of_the_worker_is_no_verdict() -> None:
    async def work() -> None:
        worker = FakeWorker()
        checker = GrammarChecker(worker)
        for _ in range(2):
            with pytest.raises(EngineDead):
                await checker.check(spec("dead"))
        assert worker.compiled == ["dead", "dead"]

    asyncio.run(work())


def test_an_engine_without_grammars_asks_no_worker() -> None:
    worker = FakeWorker()
    with pytest.raises(InvalidRequest, match="no library"):
        asyncio.run(GrammarChecker(worker, unusable="no library").check(spec("a")))
    assert not worker.compiled

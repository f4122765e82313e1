"""The judge of grammars: one compilation for equal grammars, bounded memory of verdicts, errors that are its own."""

from __future__ import annotations

import asyncio

import pytest

from tercet.managers.grammar_checker import GrammarChecker, check_grammar
from tercet.srt.errors import EngineDead, GrammarNotChecked, InvalidRequest, QueueFull, TercetError
from tercet.srt.grammar_spec import GrammarSpec


class FakeWorker:
    """Finds grammars whose text begins with `bad` bad, once `go` is set."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.go = asyncio.Event()
        self.go.set()
        self.num_running = 0

    async def compile(self, spec: GrammarSpec) -> str | None:
        assert not self.num_running, "one at a time"
        self.compiled.append(spec.text)
        self.num_running += 1
        await self.go.wait()
        self.num_running -= 1
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


@pytest.mark.parametrize(
    ("error", "says", "param"),
    [
        (
            InvalidRequest("structural_tag cannot be used: x", param="structural_tag"),
            "tools cannot be used: x",
            "tools",
        ),
        (GrammarNotChecked("structural_tag could not be checked: x"), "tools could not be checked: x", None),
        (GrammarNotChecked("the machine is busy"), "the machine is busy", None),
    ],
)
def test_an_error_names_the_field_of_the_request(error: TercetError, says: str, param: str | None) -> None:
    """A client that sends `tools` has never heard of structural tags."""

    class Refusing:
        async def check(self, spec: GrammarSpec) -> None:
            raise error

    with pytest.raises(type(error)) as caught:
        asyncio.run(check_grammar(Refusing(), GrammarSpec("structural_tag", "{}"), "tools"))
    assert (caught.value.message, caught.value.param) == (says, param) and caught.value is not error


def test_verdicts_take_bounded_memory_and_the_oldest_goes_first() -> None:
    async def work() -> None:
        worker = FakeWorker()
        checker = GrammarChecker(worker, max_bytes=300_000)
        for text in ("a", "b", "c", "a", "d", "a", "b"):
            await checker.check(spec(text * 99_000))
        assert [text[0] for text in worker.compiled] == ["a", "b", "c", "d", "b"]

    asyncio.run(work())


def test_verdicts_of_short_grammars_take_bounded_memory_too() -> None:
    """The objects of a verdict take more than its texts."""

    async def work() -> None:
        worker = FakeWorker()
        checker = GrammarChecker(worker, max_bytes=10_000)
        for i in (*range(100), 0):
            await checker.check(spec(f"{i:02}"))
        assert worker.compiled[-1] == "00" and len(worker.compiled) == 101

    asyncio.run(work())


def test_a_grammar_whose_clients_have_gone_is_not_compiled() -> None:
    async def work() -> None:
        worker = FakeWorker()
        worker.go.clear()
        checker = GrammarChecker(worker)
        requests = [asyncio.create_task(checker.check(spec(text))) for text in ("a", "b", "b", "c", "d", "d")]
        await asyncio.sleep(0)
        for gone in (0, 1, 2, 4):  # a has begun, nobody waits for b, and somebody still waits for d
            requests[gone].cancel()
        await asyncio.sleep(0)
        worker.go.set()
        await asyncio.gather(requests[3], requests[5])
        assert worker.compiled == ["a", "c", "d"]
        await checker.check(spec("a"))
        await checker.check(spec("b"))
        assert worker.compiled == ["a", "c", "d", "b"]

    asyncio.run(work())


def test_only_so_many_grammars_wait() -> None:
    async def work() -> None:
        worker = FakeWorker()
        worker.go.clear()
        checker = GrammarChecker(worker, max_waiting=2)
        requests = [asyncio.create_task(checker.check(spec(text))) for text in ("a", "b", "c", "b")]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="2 grammars wait for their compilation"):
            await requests[2]
        worker.go.set()
        await asyncio.gather(requests[0], requests[1], requests[3])
        await checker.check(spec("c"))
        assert worker.compiled == ["a", "b", "c"]

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

"""The grammar worker as a process: it judges, it dies of bad grammars, and it is started again."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import fake_child
import psutil
import pytest
import zmq
from default_model import model_path
from patience import PATIENCE_S
from toy_engine import is_gone

from tercet.managers.grammar_worker import grammar_vocabulary, run_grammar_worker
from tercet.srt.entrypoints.grammar_process import GrammarProcess
from tercet.srt.errors import EngineDead, GrammarNotChecked
from tercet.srt.grammar_spec import CheckGrammarReply, CheckGrammarReq, GrammarSpec
from tercet.srt.io_struct import BrokenMessage
from tercet.srt.ipc import RunDir
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.server_args import ServerArgs
from tercet.srt.text.tokenizer import load_tokenizer

CHAIN = '{"$defs":{' + ",".join(f'"a{i}":{{"$ref":"#/$defs/a{i + 1}"}}' for i in range(4000)) + '},"$ref":"#/$defs/a0"}'
"""References that a library follows by recursion."""


@pytest.fixture(autouse=True)
def run_dirs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("r")
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path


def with_process(work: Callable[[GrammarProcess], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        run_dir = RunDir.create()
        context: zmq.Context[Any] = zmq.Context()
        process = GrammarProcess(ServerArgs(model_path=str(model_path())), run_dir, context, **settings)
        try:
            await work(process)
        finally:
            await process.stop()
            context.destroy(linger=0)
            run_dir.remove()

    asyncio.run(run())


def stop(pid: int) -> None:
    """Stops a process, and waits until it has."""
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def spec(text: str) -> GrammarSpec:
    return GrammarSpec("json_schema", text)


def test_it_judges_and_survives_what_kills_it() -> None:
    async def work(process: GrammarProcess) -> None:
        assert process.pid is None, "no grammar, no worker"
        assert await process.compile(spec('{"type": "object"}')) is None
        first = process.pid
        assert first is not None
        assert "Unimplemented keys" in (await process.compile(spec('{"not": {}}')) or "")
        chain = await process.compile(spec(CHAIN))
        assert chain is None or "cannot be used" in chain
        assert await process.compile(spec('{"type": "array"}')) is None
        # A crash is the end of that grammar alone.
        pid = process.pid
        assert pid is not None
        stop(pid)
        waiting = asyncio.create_task(process.compile(spec('{"type": "string"}')))
        await asyncio.sleep(0.05)
        for signum in (signal.SIGABRT, signal.SIGCONT):
            os.kill(pid, signum)
        assert "crashed the compiler" in (await waiting or "")
        assert await process.compile(spec('{"type": "string"}')) is None
        assert process.pid != pid
        last = process.pid
        await process.stop()
        assert last is not None and is_gone(last)
        with pytest.raises(EngineDead):
            await process.compile(spec("{}"))

    with_process(work)


def test_the_folder_of_its_sockets_may_be_removed_at_any_time(run_dirs: Path) -> None:
    def remove_folders() -> None:
        for path in run_dirs.iterdir():
            shutil.rmtree(path)

    async def work(process: GrammarProcess) -> None:
        remove_folders()
        assert await process.compile(spec('{"type": "object"}')) is None
        remove_folders()
        assert await process.compile(spec('{"type": "array"}')) is None
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        assert await process.compile(spec('{"type": "string"}')) is None

    with_process(work)
    assert os.listdir(run_dirs) == []


def test_a_worker_cannot_take_much_memory() -> None:
    limited = "from tercet.managers.grammar_worker import limit_resources; limit_resources()"
    code = f"import sys; {limited}; bytearray(1 << 28); sys.stdout.write('enough'); bytearray(1 << 31)"
    ran = subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, capture_output=True, text=True)
    assert ran.stdout == "enough" and ran.stderr.endswith("MemoryError\n")


def test_a_worker_that_somebody_kills_is_no_verdict() -> None:
    """Verdicts are kept, so a good grammar would be refused for ever."""

    async def kill(process: GrammarProcess) -> None:
        assert process.pid is not None
        stop(process.pid)
        await asyncio.sleep(0.05)  # the grammar is on its way
        os.kill(process.pid, signal.SIGKILL)

    async def work(process: GrammarProcess) -> None:
        assert await process.compile(spec("{}")) is None
        answer, _ = await asyncio.gather(process.compile(spec('{"type": "string"}')), kill(process))
        assert answer is None

    with_process(work, wait_s=PATIENCE_S)


def test_a_worker_that_somebody_kills_while_it_starts_is_replaced() -> None:
    async def work(process: GrammarProcess) -> None:
        answer = asyncio.create_task(process.compile(spec("true")))
        while (pid := process.pid) is None:
            await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        assert await answer is None and process.pid != pid

    with_process(work, child_module=fake_child.MODULE, wait_s=PATIENCE_S)


def test_no_verdict_comes_of_processes_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    async def work(process: GrammarProcess) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("tercet.srt.entrypoints.grammar_process.ChildProcess.start", no_memory)
            with pytest.raises(GrammarNotChecked, match="could not be started: Cannot allocate memory"):
                await process.compile(spec("true"))
        assert await process.compile(spec("true")) is None

    with_process(work, child_module=fake_child.MODULE)


def test_a_compilation_that_does_not_end_is_ended() -> None:
    async def work(process: GrammarProcess) -> None:
        assert await process.compile(spec("true")) is None
        pid = process.pid
        slow = await process.compile(spec("endless"))
        assert slow == "json_schema cannot be used: its compilation took more than 0.2 s of processor time"
        assert pid is not None and is_gone(pid)
        assert await process.compile(spec("true")) is None

    with_process(work, child_module=fake_child.MODULE, timeout_s=0.2, wait_s=PATIENCE_S)


def test_a_worker_that_gets_no_processor_time_is_no_verdict() -> None:
    """A good grammar would be refused for ever, because the machine was busy for a moment."""

    async def work(process: GrammarProcess) -> None:
        assert await process.compile(spec("true")) is None
        pid = process.pid
        assert pid is not None
        stop(pid)
        process.wait_s = 0.1
        waiting = asyncio.create_task(process.compile(spec("false")))
        while process.pid == pid:
            await asyncio.sleep(0)
        process.wait_s = PATIENCE_S
        assert await waiting is None
        assert is_gone(pid)

    with_process(work, child_module=fake_child.MODULE)


def test_a_grammar_whose_workers_are_killed_twice_has_no_verdict() -> None:
    async def work(process: GrammarProcess) -> None:
        with pytest.raises(GrammarNotChecked, match="two grammar workers gave no result, and the last one was killed"):
            await process.compile(spec("killed"))
        assert "crashed the compiler" in (await process.compile(spec("crash")) or "")

    with_process(work, child_module=fake_child.MODULE)


def test_a_worker_that_does_not_start_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(process: GrammarProcess) -> None:
        monkeypatch.setenv("FAKE_CHILD", "slow start")
        with pytest.raises(GrammarNotChecked, match="the last one did not start within"):
            await process.compile(spec("true"))
        assert process.pid is None
        monkeypatch.delenv("FAKE_CHILD")
        process.start_s = PATIENCE_S
        assert await process.compile(spec("true")) is None

    with_process(work, child_module=fake_child.MODULE, start_s=0.1)


class Inbox:
    """Gives its messages at once, and a broken one."""

    def __init__(self, messages: list[CheckGrammarReq | BrokenMessage]) -> None:
        self.messages = messages

    def wait(self, timeout_s: float) -> bool:
        return True

    def drain(self) -> list[CheckGrammarReq | BrokenMessage]:
        messages, self.messages = self.messages, []
        return messages


class Outbox:
    def __init__(self) -> None:
        self.replies: list[CheckGrammarReply] = []

    def send(self, message: CheckGrammarReply) -> None:
        self.replies.append(message)


class Failing:
    """A library that fails in the way that the text of the grammar says."""

    def compile(self, spec: GrammarSpec) -> Any:
        raise {"memory": MemoryError, "defect": RuntimeError}[spec.text]()


def test_a_failing_library_is_an_answer() -> None:
    inbox = Inbox([BrokenMessage([], "x"), CheckGrammarReq(1, spec("memory")), CheckGrammarReq(2, spec("defect"))])
    outbox = Outbox()
    run_grammar_worker(inbox, outbox, Failing(), 1, lambda: len(outbox.replies) == 2)
    assert [reply.reason for reply in outbox.replies] == [
        "json_schema cannot be used: it takes too much memory",
        "json_schema cannot be used: its compilation failed",
    ]


def test_the_vocabulary_is_that_of_the_models_logits() -> None:
    path = str(model_path())
    tokenizer, config = load_tokenizer(path), load_model_config(path)
    vocabulary = grammar_vocabulary(tokenizer, config)
    assert len(vocabulary.tokens) == config.vocab_size and vocabulary.eos_ids == {2}
    text = "Grammar: \u00e9\U0001f600"
    assert b"".join(vocabulary.tokens[i] for i in tokenizer.encode(text)) == text.encode()
    assert vocabulary.special_texts["<|im_start|>"] in vocabulary.special_ids


def test_a_late_answer_about_another_grammar_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may have sent it just before it was ended at its limit."""

    async def work(process: GrammarProcess) -> None:
        loop = asyncio.get_running_loop()

        def send(question: CheckGrammarReq) -> None:
            for reply in (CheckGrammarReply(question.call_id - 1, "no"), CheckGrammarReply(question.call_id, None)):
                loop.call_soon(process._on_message, reply)

        async def start() -> Any:
            child = types.SimpleNamespace(pid=os.getpid(), ended=loop.create_future())
            return child, types.SimpleNamespace(send=send)

        monkeypatch.setattr(process, "_start", start)
        assert await process.compile(spec("{}")) is None

    with_process(work)

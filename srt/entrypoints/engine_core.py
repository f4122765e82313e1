"""A running engine in one event loop: the TokenizerManager, and the processes behind it with their restarts.

The HTTP server runs an EngineCore in its own event loop, and `tercet.Engine` in the event loop of a private thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from ...managers.generation import Generation
from ...managers.grammar_backends import why_no_grammars
from ...managers.grammar_checker import GrammarChecker
from ...managers.tokenizer_manager import TokenizerManager
from ..errors import EngineDead
from ..ipc import RunDir
from ..machine.oom import num_oom_kills
from ..machine.process_state import is_stopped
from ..model_files.load_config import load_model_config
from ..model_files.lora_limits import with_lora_limits
from ..model_files.recurrence_limits import check_recurrence
from ..server_args import ServerArgs
from ..step_journal import Journal, read_journal
from ..text.tokenizer import tokenizer_of
from .allowed_paths import check_recording
from .engine_life import EngineLife
from .forks import ForkServerDied
from .grammar_process import GrammarProcess
from .processes import CHILD_MODULE, ChildProcess, DiedAtStart, Role, stop_children
from .restarts import Death, RestartBudget, crash_report, retry_pause_s, start_limit_s, write_report
from .watchdog import HangDetector, Verdict, report_hang

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_NAMES = 20
"""Requests that the log names after a death. The report has more."""


class EngineCore:
    """A running engine. It belongs to the event loop in which it was started; call its methods only from there.

    When a process dies, the core ends the other one, starts both again, and gives the unfinished requests to them. If
    that is not allowed or fails, the engine has failed.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        tokenizer_manager: TokenizerManager,
        life: EngineLife,
        context: zmq.Context[Any],
        child_module: str,
        grammars: GrammarProcess,
        start_s: float,
    ) -> None:
        """`start_s`: how long the start of the processes took."""
        self.tokenizer_manager = tokenizer_manager
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when a child process has died and is not started again. The result says how it died. By then, every
        waiting client has its error."""
        self._context = context
        self._child_module = child_module
        self._grammars = grammars
        self._budget = RestartBudget(server_args.engine_restarts, server_args.engine_restart_window)
        self._stopping = False
        self._restart: asyncio.Task[None] | None = None
        self._start_limit_s = start_limit_s(server_args.watchdog_timeout, start_s)
        self._oom_kills = self._latest_oom_kills = num_oom_kills()
        """The machine's count at the last but one look, and at the last. Older kills do not explain a death."""
        self._hung: ChildProcess | None = None
        self._stacks = ""
        """Those of the threads of `_hung`."""
        self._spares: dict[Role, ChildProcess] = {}
        """Fork servers, and for the scheduler, if it has none, a process that has only imported its modules."""
        self._no_spare_because: str | None = None
        """Why the last spare could not be started, which is logged; None: it could."""
        self._begin(life)
        self._watchdog = asyncio.create_task(self._watch())

    @classmethod
    async def start(cls, server_args: ServerArgs, *, child_module: str = CHILD_MODULE) -> EngineCore:
        """Starts the processes and waits until they are ready. Leaves nothing behind when it fails or is cancelled.

        Raises ValueError or OSError for a mistake of the user (the message says what to change), EngineDead when a
        process fails. `child_module`: the module that a child process runs; tests replace it.
        """
        check_recording(server_args)
        model_config = load_model_config(server_args.model_path, server_args.load_format)
        check_recurrence(server_args, model_config)
        # Before the children start, so that all processes have the same seed and the same tables of adapters.
        server_args = with_lora_limits(server_args).with_seed()
        run_dir = RunDir.create()
        context: zmq.Context[Any] = zmq.Context()
        life: EngineLife | None = None
        began = time.monotonic()
        try:
            tokenizer_loads = _in_daemon_thread(lambda: tokenizer_of(server_args))
            life = await EngineLife.start(server_args, run_dir, context, child_module, meanwhile=tokenizer_loads)
            start_s = time.monotonic() - began
            logger.info("The random seed is %d", server_args.random_seed)
            if life.facts.device.startswith("cuda"):
                # With `auto`, a restart after a failure of the GPU would choose the CPU.
                server_args = dataclasses.replace(server_args, device="cuda")
            grammars = GrammarProcess(server_args, run_dir, context, child_module=child_module)
            checker = GrammarChecker(grammars, unusable=why_no_grammars(server_args.grammar_backend))
            manager = TokenizerManager(
                server_args, model_config, tokenizer_loads.result(), life.facts, life.sender, checker
            )
            life.listen(manager.on_message)
        except BaseException:
            if life is not None:
                await stop_children(life.processes)
            context.destroy(linger=0)
            run_dir.remove()
            raise
        return cls(server_args, manager, life, context, child_module, grammars, start_s)

    @property
    def child_pids(self) -> dict[str, int]:
        """The processes of this life by role. They have ended if the engine is being restarted."""
        return {child.role: child.pid for child in self._life.children}

    async def stop(self) -> None:
        """Ends all requests with an error, stops the processes, and removes the sockets. A second call does nothing."""
        if self._stopping:
            return
        self._stopping = True
        self.tokenizer_manager.fail("the engine was shut down")
        self._watchdog.cancel()
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.wait([self._restart])
        children = [*self._life.children, *self._spares.values()]
        await asyncio.gather(stop_children(children), self._grammars.stop())
        self._life.disconnect()
        self._context.destroy(linger=0)
        self._life.run_dir.remove()

    def _begin(self, life: EngineLife) -> None:
        self._life = life
        for child in life.children:
            child.ended.add_done_callback(functools.partial(self._on_child_ended, child))
        self._spares = {server.role: server for server in life.fork_servers}
        self._num_updates = self.tokenizer_manager.weights.num_updates
        self._renew_spares()

    def _renew_spares(self) -> None:
        """Starts a spare scheduler if there is none: the next life need not wait for the import of torch."""
        self._drop_old_spares()
        if self._budget.limit and "scheduler" not in self._spares:
            try:
                self._spares["scheduler"] = ChildProcess.start("scheduler", self._child_module, may_fork=True)
            except OSError as error:  # for example no memory, or too many open files
                reason = error.strerror or str(error)
                if reason != self._no_spare_because:  # the watchdog tries again twice a second
                    logger.warning("Could not start a spare process: %s; trying again", reason)
                self._no_spare_because = reason
            else:
                self._no_spare_because = None

    def _drop_old_spares(self) -> None:
        """Drops spares that have died, and ends fork servers with replaced weights, whose memory they keep."""
        for spare in list(self._spares.values()):
            if spare.launched_with is not None and self._are_replaced(spare):
                spare.kill()
                del self._spares[spare.role]
            elif spare.ended.done():
                del self._spares[spare.role]

    def _are_replaced(self, fork_server: ChildProcess) -> bool:
        """Whether other weights are in use than those that it holds. A path may hold other weights than before, so
        equal settings do not suffice. It holds no adapters."""
        weights = self.tokenizer_manager.weights
        assert fork_server.launched_with is not None
        now = weights.server_args
        launched_with = dataclasses.replace(fork_server.launched_with, device=now.device, lora_paths=now.lora_paths)
        return launched_with != weights.server_args or self._num_updates != weights.num_updates

    def _on_child_ended(self, child: ChildProcess, ended: asyncio.Future[str]) -> None:
        is_restarting = self._restart is not None and not self._restart.done()
        if self._stopping or self.died.done() or is_restarting or child not in self._life.children:
            return
        was_oom = num_oom_kills() != self._oom_kills
        was_hung = child is self._hung
        stacks = self._stacks if was_hung else ""
        has_new_weights = self._num_updates != self.tokenizer_manager.weights.num_updates
        death = Death(child.role, ended.result(), child.returncode, was_hung, was_oom, stacks, has_new_weights)
        if self._budget.take():
            self._restart = asyncio.create_task(self._restart_after(death))
            self._restart.add_done_callback(self._on_restart_ended)
        else:
            self._give_up(death.message)

    def _on_restart_ended(self, restart: asyncio.Task[None]) -> None:
        """After a defect of the restart, no client waits forever."""
        if not restart.cancelled() and restart.exception() is not None and not self.died.done():
            logger.error("The restart has failed", exc_info=restart.exception())
            self._die(f"the engine could not be restarted: {restart.exception()}")

    def _give_up(self, message: str) -> None:
        if self._budget.limit:
            message += f"; --engine-restarts {self._budget.limit} is used up"
        self._die(message)

    def _die(self, message: str) -> None:
        logger.error("The engine has failed: %s", message)
        self.tokenizer_manager.fail(message)
        self.died.set_result(message)

    async def _restart_after(self, death: Death) -> None:
        """Ends this life of the engine, and begins the next one."""
        manager, began = self.tokenizer_manager, time.monotonic()
        journal = read_journal(self._life.run_dir.journal)
        samples = [one for one in manager.live_samples() if one.is_sent]
        loads_weights = manager.pause.is_on and manager.weights.is_updating
        blame = death.blame(journal, loads_weights=loads_weights or manager.adapters.is_loading)
        has_culprit = manager.on_death(blame, journal.begun)
        logger.error(
            "The engine has failed: %s; restarting it (%d of %d)",
            death.message,
            self._budget.num_taken,
            self._budget.limit,
        )
        if has_culprit:
            self._budget.give_back()
        self._life.disconnect()
        await self._life.kill()
        ended = time.monotonic()
        self._report(death, journal, samples)
        self._drop_unfit_spares(death)
        life = await self._next_life(death)
        if life is None:
            return
        life.listen(manager.on_message)
        self._begin(life)
        manager.resume(life.sender, life.facts)
        now = time.monotonic()
        logger.info(
            "The engine runs again after %.1f s (%.2f s to end the old processes, %.2f s to start the new ones); "
            "%d samples continue",
            now - began,
            ended - began,
            now - ended,
            manager.num_unfinished,
        )

    def _drop_unfit_spares(self, death: Death) -> None:
        """Ends the spares that the next life must not begin with."""
        self._drop_old_spares()
        for role, spare in list(self._spares.items()):
            # A new process is ready before a stopped one would answer. After SIGBUS, a file that all forks map may be
            # damaged.
            if is_stopped(spare.pid) or death.returncode == -signal.SIGBUS:
                self._spares.pop(role).kill()
        if death.was_oom and "scheduler" in self._spares:
            # A fork would have a KV pool of the same size. A new process plans with the memory of now.
            self._spares.pop("scheduler").kill()

    async def _next_life(self, death: Death) -> EngineLife | None:
        """Starts the processes, and tries again if that fails. None: no attempt is left, and the engine has failed."""
        run_dir, num_failures = self._life.run_dir, 0
        while True:
            try:
                run_dir = run_dir.next_life()
                spares, self._spares = self._spares, {}
                return await self._start_life(run_dir, spares)
            except DiedAtStart as error:
                if not self._budget.take():
                    self._give_up(error.message)
                    return None
                logger.error("The engine has failed: %s; restarting it again", error)
                self.tokenizer_manager.on_death(None)
            except Exception as error:
                if isinstance(error, ForkServerDied) and spares:
                    logger.error("%s, too; starting new processes", str(error).capitalize())
                    continue
                if not self._budget.take():
                    self._die(f"{death.message}; it could not be restarted: {error}")
                    return None
                num_failures += 1
                pause_s = retry_pause_s(num_failures)
                logger.error("The engine could not be restarted: %s; trying again in %g s", error, pause_s)
                await asyncio.sleep(pause_s)

    async def _start_life(self, run_dir: RunDir, spares: dict[Role, ChildProcess]) -> EngineLife:
        """Raises as `EngineLife.start` does, and EngineDead when it takes too long."""
        args = self.tokenizer_manager.server_args
        deadline = asyncio.timeout(self._start_limit_s)
        try:
            async with deadline:
                return await EngineLife.start(args, run_dir, self._context, self._child_module, spares=spares)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise EngineDead(f"its processes were not ready within {self._start_limit_s:.0f} s") from None

    def _report(self, death: Death, journal: Journal, samples: list[Generation]) -> None:
        manager = self.tokenizer_manager
        num_earlier = manager.recovery.num_restarts - 1
        last = None if manager.last_state is None else manager.last_state.state
        try:
            report = crash_report(death, journal, manager.server_args, last, samples, num_earlier)
            fatal = [one["id"] for one in report["requests"] if one["in_fatal_step"]][:_MOST_NAMES]
            logger.error("Requests in the fatal step: %s", ", ".join(fatal) or "none is known")
            logger.error("Wrote a report about this to %s", write_report(report))
        except OSError as error:
            logger.warning("Could not write a report about this: %s", error.strerror or error)
        except Exception:
            logger.exception("Could not write a report about this")

    async def _watch(self) -> None:
        """Reports a process whose loop hangs, and kills it, so that the engine is restarted."""
        manager = self.tokenizer_manager
        args = manager.server_args
        detectors = {
            role: HangDetector(args.watchdog_timeout, args.soft_watchdog_timeout)
            for role in ("scheduler", "detokenizer")
        }
        while not self.died.done():
            await asyncio.sleep(detectors["scheduler"].interval_s)
            if not manager.is_restarting:
                self._renew_spares()
                self._oom_kills, self._latest_oom_kills = self._latest_oom_kills, num_oom_kills()
                manager.heartbeats.is_stopped = any(is_stopped(child.pid) for child in self._life.children)
                if manager.stall == "waiting":
                    manager.tell_stall()
            for child in self._life.children:
                silent_s = 0.0 if manager.is_restarting else manager.heartbeats.silent_s(child.role)
                verdict = detectors[child.role].look(silent_s)
                if verdict is not None:
                    await self._on_hang(child, verdict, silent_s)

    async def _on_hang(self, child: ChildProcess, verdict: Verdict, silent_s: float) -> None:
        life, heartbeats = self._life, self.tokenizer_manager.heartbeats
        stacks = await report_hang(child, life.run_dir.stacks(child.role), silent_s, verdict)
        is_still_silent = heartbeats.silent_s(child.role) > self.tokenizer_manager.server_args.watchdog_timeout
        if verdict is Verdict.END and life is self._life and is_still_silent:
            # Whoever has stopped a process (SIGSTOP) is to blame for its silence, and not a request.
            self._hung, self._stacks = None if is_stopped(child.pid) else child, stacks
            child.kill()


def _in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Like `asyncio.to_thread`, but exit does not wait for the thread, so Ctrl-C during start-up works at once."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
            future.exception()  # retrieves it: nobody awaits the future if the start fails for another reason, too
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        try:
            loop.call_soon_threadsafe(deliver, result, failure)
        except RuntimeError:
            return  # the loop is closed, so nothing waits for the result

    threading.Thread(target=run, daemon=True).start()
    return future

"""The TokenizerManager: it tokenises prompts, sends them to the scheduler, and hands outputs to their readers.

It runs in one event loop: that of the HTTP server, or that of the Engine's thread. Call all methods in that thread. It
imports no torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Sequence

from ..srt.errors import EngineBusy, EngineDead, EngineRestarting, InvalidRequest, TercetError
from ..srt.io_struct import (
    AbortReq,
    BatchTextOut,
    BrokenMessage,
    EngineView,
    FlushCacheReply,
    FlushCacheReq,
    GenerateReq,
    Heartbeat,
    Reply,
    RetainReq,
    SchedulerState,
    StateReply,
    StateReq,
    ToTokenizer,
    ViewReply,
    ViewReq,
)
from ..srt.model_files.model_config import ModelConfig
from ..srt.request_options import RequestOptions
from ..srt.server_args import ServerArgs
from ..srt.start_reports import SchedulerReady
from ..srt.text.tokenizer import Tokenizer
from .adapter_control import AdapterControl
from .calls import Calls, KnownState, SchedulerLink
from .generation import Generation
from .grammar_checker import GrammarChecks, check_grammar
from .heartbeats import Heartbeats
from .held_requests import HeldRequests
from .input_processor import InputProcessor
from .pause_control import PauseControl
from .profile_control import ProfileControl
from .recovery import Blame, Recovery, watched
from .request_metrics import RequestMetrics
from .request_registry import Prompt, PromptSamples, Request, RequestRegistry
from .tool_call_retention import retention_of
from .weight_control import WeightControl


class TokenizerManager:
    """Checks, tokenises and sends requests, and hands each output to its Generation."""

    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        facts: SchedulerReady,
        scheduler: SchedulerLink,
        grammars: GrammarChecks | None = None,
        *,
        key_prefix: str = "",
    ) -> None:
        """`grammars`: None refuses every request with a grammar. `key_prefix`: begins the keys of samples."""
        self.model_config = model_config
        self.facts = facts
        self.draining = False
        """True: running requests may finish, and new requests get status 503."""
        self.failure: str | None = None
        """Why the engine is gone for good; None: it is not."""
        self.recovery = Recovery(server_args.engine_restart_window)
        self.heartbeats = Heartbeats()
        self.on_stall: set[Callable[[], None]] = set()
        """Called when `stall` is set."""
        self._scheduler: SchedulerLink | None = scheduler
        """None: the engine is being restarted."""
        self.grammars = grammars
        self._calls = Calls()
        self.inputs = InputProcessor(server_args, model_config, tokenizer, facts)
        """The tokenizer, and the defaults and checks of requests."""
        self.metrics = RequestMetrics() if server_args.enable_metrics else None
        """What /metrics tells about requests; None without --enable-metrics."""
        make_generation = Generation if self.metrics is None else self.metrics.generation
        self._requests = RequestRegistry(self._send_abort, self.inputs, make_generation, key_prefix)
        self.pause = PauseControl(self._calls, self._link, self.abort_all, self.tell_stall)
        self._held = HeldRequests(server_args, self._requests, self.pause.now, self.recovery.restart_left_s)
        self.profile = ProfileControl(self._calls, self._link)
        self.weights = WeightControl(
            server_args, facts.weights, self._calls, self._link, self.pause, self._requests, self._send_held
        )
        self.adapters = AdapterControl(self._calls, self._link, self._requests, self.weights, facts.adapters)
        self._last_state: tuple[SchedulerState, float] | None = None

    @property
    def server_args(self) -> ServerArgs:
        """The settings, with those of the weights in use. They change with an update of the weights."""
        return self.weights.server_args

    # Requests

    def open(self, prompts: Sequence[Prompt], *, name: str | None = None) -> Request:
        """Accepts a request. From now on it can be aborted by name, and ends with the engine.

        `name`: the name of a request with several prompts. A single prompt has only its `rid`. The caller must `start`
        each prompt, read all samples, and close the request after an error. Raises InvalidRequest for a name that is in
        use or too long, and EngineDead.
        """
        self.check_accepting()
        request = self._requests.open(prompts, name)
        for prompt in request.prompts:
            for generation in prompt.generations:
                generation.weight_version = self.weights.version
        return request

    async def start(self, prompt: PromptSamples) -> None:
        """Prepares the prompt, and sends all of its samples."""
        await self.prepare(prompt)
        for generation in prompt.generations:
            self.send(prompt, generation)

    async def prepare(self, prompt: PromptSamples) -> None:
        """Makes and checks the token ids of a prompt, and checks its grammar. Returns early if the samples end.

        Raises InvalidRequest, with the name of the field, for a prompt that is empty, invalid or too long.
        """
        if prompt.is_over or prompt.prompt_ids:
            return
        given, options = prompt.prompt, prompt.options
        try:
            with prompt.unless_over():
                if (grammar := options.sampling.grammar) is not None:
                    await check_grammar(self.grammars, grammar, given.grammar_param or grammar.kind)
                ids = await self.inputs.prompt_ids(
                    given.content, add_special_tokens=given.add_special_tokens, truncates=given.truncates
                )
                self.inputs.check_options(options)
                self.inputs.check_logprobs(options, len(ids))
                self.inputs.check_hidden_states(options, len(ids), prompt.request.num_samples)
                prompt.on_prepared(ids)
        except InvalidRequest as error:
            if error.param in ("prompt", None):
                error.param = given.param
            raise

    def send(self, prompt: PromptSamples, generation: Generation) -> None:
        """Sends one sample of a prepared prompt to the scheduler, unless it has ended.

        `max_new_tokens` is limited to the room in the context and the KV pool.
        """
        if generation.is_over:
            return
        seed = prompt.first_seed + generation.index
        generation.hold(self.inputs.generate_req(generation.key, prompt.packed_ids, prompt.options, seed))
        self._send_or_hold(generation)

    def restore(self, generation: Generation, packed_ids: bytes, options: RequestOptions, age_s: float) -> None:
        """Sends a sample that another server process began `age_s` seconds ago. It continues after its outputs.

        `options`: those in the request of the first sample of its prompt.
        """
        if generation.is_over:
            return
        generation.hold(self.inputs.sample_req(generation.key, packed_ids, options, generation.index), age_s)
        generation.num_recoveries += 1
        self._send_or_hold(generation)

    def adopt(self, request: GenerateReq, name: str, index: int) -> Generation:
        """Takes a sample that another process has checked and tokenised. The caller reads its outputs."""
        generation = self._requests.adopt(request, name, index)
        generation.hold(request)
        self._send_or_hold(generation)
        return generation

    def _send_or_hold(self, generation: Generation) -> None:
        assert generation.request is not None
        generation.waits_since = self.pause.now()
        error = self.recovery.refusal(generation.request) if self.failure is None else EngineDead(self.failure)
        if error is not None:
            generation.fail(error)
        elif self.is_recovering or self.weights.holds(generation):
            self._held.add(generation)
        elif self.recovery.suspect_again(generation):
            self._try_next()
        else:
            self._resend(generation)

    async def submit(
        self, content: str | Sequence[int], options: RequestOptions, *, rid: str | None = None
    ) -> list[Generation]:
        """Opens and starts a request with one prompt. Returns `sampling.n` Generations. Raises as those do."""
        request = self.open([Prompt(content=content, options=options, rid=rid)])
        (prompt,) = request.prompts
        try:
            await self.start(prompt)
        except BaseException:
            request.close()
            raise
        return prompt.generations

    def abort(self, name: str) -> bool:
        """Aborts the request or prompt of exactly this name, which keeps its tokens. Returns whether there is one."""
        return self._requests.abort(name)

    def on_tool_call(self, generation: Generation) -> None:
        """The answer of this sample is a tool call."""
        self.retain(retention_of(generation, self.server_args))

    def retain(self, request: RetainReq | None) -> None:
        if request is not None and self._scheduler is not None:
            self._scheduler.send(request)

    def abort_all(self) -> None:
        self._requests.abort_all()

    @property
    def num_unfinished(self) -> int:
        """The number of samples that have not ended."""
        return len(self._requests)

    def live_samples(self) -> list[Generation]:
        """All samples that have not ended."""
        return self._requests.live()

    # The engine as a whole

    @property
    def is_restarting(self) -> bool:
        """The engine has died, and a new one is starting. New requests wait for it."""
        return self._scheduler is None and self.failure is None

    @property
    def is_recovering(self) -> bool:
        """Samples that had begun wait for a new engine, or for their turn in it."""
        return self.is_restarting or (self.recovery.is_isolating and self.failure is None)

    @property
    def stall(self) -> str | None:
        """Why samples that have begun may get no tokens for a while: "restarting", "paused", "waiting", or None.

        Waiting: a process is stopped, or its step takes very long (`Heartbeats.is_late`)."""
        if self.failure is not None:
            return None
        if self.pause.is_on and not self.is_restarting:  # also while suspects wait: their trials wait for its end
            return "paused"
        return "restarting" if self.is_recovering else "waiting" if self.heartbeats.is_late else None

    def tell_stall(self) -> None:
        """Tells the streams that they have to wait. They learn from `stall` when that is over."""
        for listener in list(self.on_stall):
            listener()

    def check_accepting(self) -> None:
        """Raises EngineDead if the engine is gone for good or the server is shutting down."""
        if self.failure is not None:
            raise EngineDead(self.failure)
        if self.draining:
            raise EngineDead("the server is shutting down and takes no new requests")

    @property
    def is_healthy(self) -> bool:
        """Whether all processes are alive, and have sent a heartbeat within `watchdog_timeout`."""
        is_up = self.failure is None and self._scheduler is not None
        return is_up and self.heartbeats.longest_silence_s < self.server_args.watchdog_timeout

    async def flush_cache(self, timeout_s: float = 0.0) -> None:
        """Empties the prefix cache. Raises EngineBusy if requests still run or wait after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while num_busy := (await self._calls.ask(self._link(), FlushCacheReq, FlushCacheReply)).num_busy:
            if time.monotonic() >= deadline:
                raise EngineBusy(f"the cache was not flushed: {num_busy} requests are running or waiting")
            await asyncio.sleep(0.05)

    async def scheduler_state(self, timeout_s: float) -> KnownState:
        """The scheduler's state, or its last known one if it does not answer in time, as in a long step or a restart.

        Raises EngineDead if there is no known state, and if the engine is neither healthy nor being restarted.
        """
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._calls.ask(self._link(), StateReq, StateReply)
                return KnownState(reply.state, 0.0)
        except (TimeoutError, EngineRestarting) as error:
            last = self.last_state
            if last is None or not (self.is_healthy or self.is_restarting):
                raise EngineDead(str(error) or f"the scheduler did not answer within {timeout_s:g} s") from None
            return last

    @property
    def last_state(self) -> KnownState | None:
        """The last state that the scheduler told; None before it has told one."""
        last = self._last_state
        return None if last is None else KnownState(last[0], time.monotonic() - last[1])

    async def engine_view(self, after_step: int, timeout_s: float) -> EngineView:
        """The steps, requests and hottest prefixes of the engine. Raises EngineDead if there is no answer in time."""
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._calls.ask(self._link(), lambda call_id: ViewReq(call_id, after_step), ViewReply)
        except TimeoutError:
            raise EngineDead(f"the scheduler did not answer within {timeout_s:g} s") from None
        return reply.view

    def on_death(self, blame: Blame | None, begun: Container[str] = ()) -> bool:
        """A process of the engine is gone, and a new engine will be given to `resume`.

        Samples that are being aborted end now. So do those of a request that is proved to be the cause; then it returns
        True. All others wait. `begun`: as of `Generation.lose`.
        """
        was_up, self._scheduler = self._scheduler is not None, None
        lost = [generation for generation in self._requests.live() if generation.lose(begun, self.pause.now())]
        has_culprit = self.recovery.on_death(lost, blame, self._requests.live())
        self._held.watch(lost)
        self._calls.fail(EngineRestarting("the engine is being restarted; try again in a moment"))
        if was_up:
            self.tell_stall()
        return has_culprit

    def resume(self, scheduler: SchedulerLink, facts: SchedulerReady) -> None:
        """A new engine is ready: it gets every waiting sample, with the tokens that have come."""
        self.facts = facts
        self.inputs.update(facts)
        self.adapters.use(facts.adapters)
        self._scheduler = scheduler
        self.recovery.on_restart()
        self.pause.carry_over(scheduler)
        self.heartbeats.reset()
        self._send_held()

    def fail(self, message: str) -> None:
        """Called when a process of the engine is gone. Every waiting client gets an error."""
        if self.failure is not None:
            return
        self.failure = message
        self._requests.fail(EngineDead(message))
        self._calls.fail(EngineDead(message))

    def on_message(self, message: ToTokenizer | BrokenMessage) -> None:
        """Handles a message of the detokenizer or the scheduler."""
        if isinstance(message, BrokenMessage):
            self._requests.fail(TercetError(message.reason), message.rids)
            self.recovery.on_end(*message.rids)
            return
        self.heartbeats.hear(message)
        if isinstance(message, BatchTextOut):
            if self.metrics is not None:
                self.metrics.begin_message()
            for out in message.outs:
                if (generation := self._requests.generation(out.rid)) is not None:  # otherwise it was closed here
                    generation.push(out)
                if out.finish is not None:
                    self.recovery.on_end(out.rid)
            if self.metrics is not None:
                self.metrics.end_message()
        elif isinstance(message, Heartbeat | StateReply):
            self._last_state = message.state, time.monotonic()
        self._try_next()  # also without an output: the suspect may have been closed here
        if isinstance(message, Reply):
            self._calls.on_reply(message)

    def _send_held(self) -> None:
        """Sends the samples that wait for the engine, and of the suspects the one whose turn it is."""
        if self._scheduler is None:
            return
        waiting = [one for one in self._requests.live() if one.waits_for_engine and not self.weights.holds(one)]
        for generation in self.recovery.take_innocent(waiting):
            self._resend(generation)
        self._try_next()

    def _try_next(self) -> None:
        """Sends the next suspect, if it is its turn. After the last trial, sends what has waited for its end."""
        if self._scheduler is None or not self.recovery.is_isolating:
            return
        self.recovery.end_late(self.pause.now())
        if (generation := self.recovery.next_trial()) is not None:
            self._resend(generation, is_suspect=True)
        elif not self.recovery.is_isolating:
            self._send_held()

    def _resend(self, generation: Generation, *, is_suspect: bool = False) -> None:
        assert self._scheduler is not None
        request = self._held.release(generation, self.inputs.fitted(generation.resumption()))
        self.recovery.num_resumed += request.resumed is not None
        generation.mark_sent(self.pause.now())
        self._scheduler.send(watched(request) if is_suspect else request)

    def _link(self) -> SchedulerLink:
        """The scheduler. Raises EngineDead, EngineRestarting."""
        if self.failure is not None:
            raise EngineDead(self.failure)
        if self._scheduler is None:
            raise EngineRestarting("the engine is being restarted; try again in a moment")
        return self._scheduler

    def _send_abort(self, key: str) -> None:
        if self.failure is None and self._scheduler is not None:
            self.recovery.on_stop(self._requests.generation(key))
            self._scheduler.send(AbortReq(key))

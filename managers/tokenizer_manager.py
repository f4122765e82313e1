"""The client's side of the engine: prompts become token ids on their way in, outputs find their waiting coroutine.

Lives in one event loop (that of the HTTP server, or the Engine's own thread); none of its methods may be called from
another thread. It imports no torch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from ..srt.errors import EngineDead, InvalidRequest, TercetError
from ..srt.io_struct import (
    AbortReq,
    BatchTextOut,
    BrokenMessage,
    FlushCacheReply,
    FlushCacheReq,
    Heartbeat,
    SchedulerReady,
    SchedulerState,
    StateReply,
    StateReq,
    ToScheduler,
    ToTokenizer,
    pack_ids,
)
from ..srt.model_files.model_config import ModelConfig
from ..srt.request_options import RequestOptions
from ..srt.sampling_params import SamplingParams
from ..srt.server_args import ServerArgs
from ..srt.text.tokenizer import Tokenizer
from .generation import Generation
from .input_processor import InputProcessor
from .request_registry import Prompt, PromptSamples, Request, RequestRegistry

logger = logging.getLogger(__name__)

R = TypeVar("R", FlushCacheReply, StateReply)

_TOKENISE_OFF_LOOP_CHARS = 20_000
"""A longer text is tokenised in a thread, so that it delays nobody's stream."""


class SchedulerLink(Protocol):
    """Where requests go: an `ipc.Sender`, or a test's fake."""

    def send(self, message: ToScheduler) -> None: ...


class KnownState(NamedTuple):
    """What is known of the scheduler. `age_s`: seconds since it told; 0 when it has just answered."""

    state: SchedulerState
    age_s: float


class TokenizerManager:
    """Validates, tokenises, sends, and hands each output to its Generation."""

    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        facts: SchedulerReady,
        scheduler: SchedulerLink,
    ) -> None:
        self.server_args = server_args
        self.model_config = model_config
        self.facts = facts
        self.draining = False
        """True: running requests finish, new ones are refused with 503."""
        self.failure: EngineDead | None = None
        self._scheduler = scheduler
        self._calls: dict[int, asyncio.Future[FlushCacheReply | StateReply]] = {}
        self._call_ids = itertools.count(1)
        self.inputs = InputProcessor(server_args, model_config, tokenizer, facts)
        self._requests = RequestRegistry(self._send_abort, self.inputs.draw_seed)
        self._last_heartbeat = time.monotonic()
        self._last_state: SchedulerState | None = None
        self._last_state_at = 0.0

    # Requests

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with `--skip-tokenizer-init`."""
        return self.inputs.tokenizer

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """Sampling parameters that requests get from the model where they give none."""
        return self.inputs.default_sampling

    def make_sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        """`given` over the model's defaults (`--sampling-defaults`); raises InvalidRequest with the field's name."""
        return self.inputs.make_sampling(given)

    def open(self, prompts: Sequence[Prompt], *, name: str | None = None) -> Request:
        """Accepts a request: from here on it has its names, can be aborted, fails with the engine, and is drained.

        `name`: what several prompts are known by together; a single one is known by its `rid`.
        Raises InvalidRequest (a name is in use, or too long), EngineDead. Whoever opens a request `start`s each of its
        prompts, reads all samples, and closes it when anything fails.
        """
        self.check_accepting()
        return self._requests.open(prompts, name)

    async def start(self, prompt: PromptSamples) -> None:
        """`prepare`, then `send` of every sample."""
        await self.prepare(prompt)
        for generation in prompt.generations:
            self.send(prompt, generation)

    async def prepare(self, prompt: PromptSamples) -> None:
        """Makes and checks the token ids of a prompt. Returns early when the samples end meanwhile.

        Raises InvalidRequest (empty, invalid or too long), naming the request's field.
        """
        if prompt.is_over or prompt.prompt_ids:
            return
        try:
            with prompt.unless_over():
                prompt.prompt_ids = await self._prompt_ids(prompt.prompt)
                prompt.packed_ids = pack_ids(prompt.prompt_ids)
        except InvalidRequest as error:
            if error.param in ("prompt", "input_ids", None):
                error.param = prompt.prompt.param
            raise

    def send(self, prompt: PromptSamples, generation: Generation) -> None:
        """Gives one sample of a prepared prompt to the scheduler, unless it has ended.

        `max_new_tokens` is cut to what the context and the KV pool have room for.
        """
        if generation.is_over:
            return
        request = self.inputs.generate_req(
            generation.key, prompt.packed_ids, prompt.prompt.options, prompt.first_seed + generation.index
        )
        generation.mark_sent()
        self._scheduler.send(request)

    async def submit(
        self,
        content: str | Sequence[int],
        options: RequestOptions,
        *,
        rid: str | None = None,
    ) -> list[Generation]:
        """Opens and starts a request with one prompt; the list has `sampling.n` Generations. Raises as those do."""
        request = self.open([Prompt(content=content, options=options, rid=rid)])
        (prompt,) = request.prompts
        try:
            await self.start(prompt)
        except BaseException:
            request.close()
            raise
        return prompt.generations

    def abort(self, name: str) -> bool:
        """Aborts the request of exactly this name, or one prompt of a request; whether there was one.

        Its samples end with all tokens that they have.
        """
        return self._requests.abort(name)

    def abort_all(self) -> None:
        self._requests.abort_all()

    @property
    def num_unfinished(self) -> int:
        """Samples of all open requests that have not ended."""
        return len(self._requests)

    # The engine as a whole

    def check_accepting(self) -> None:
        """Raises EngineDead when a process is gone or the server is about to stop."""
        if self.failure is not None:
            raise self.failure
        if self.draining:
            raise EngineDead("the server is shutting down and takes no new requests")

    @property
    def is_healthy(self) -> bool:
        """Every process is alive, and the scheduler's loop has turned within the watchdog's time."""
        silent_s = time.monotonic() - self._last_heartbeat
        return self.failure is None and silent_s < self.server_args.watchdog_timeout

    async def flush_cache(self, timeout_s: float = 0.0) -> FlushCacheReply:
        """Empties the prefix cache, waiting up to `timeout_s` for the engine to be idle."""
        deadline = time.monotonic() + timeout_s
        while True:
            reply = await self._call(FlushCacheReq, FlushCacheReply)
            if reply.ok or time.monotonic() >= deadline:
                return reply
            await asyncio.sleep(0.05)

    async def scheduler_state(self, timeout_s: float) -> KnownState:
        """The scheduler's state. When it does not answer in time, as in a long step, the last state that it told.

        Raises EngineDead when it has told none yet, when its loop has not turned within the watchdog's time, and when
        a process is gone.
        """
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._call(StateReq, StateReply)
                return KnownState(reply.state, 0.0)
        except TimeoutError:
            if self._last_state is None or not self.is_healthy:
                raise EngineDead(f"the scheduler did not answer within {timeout_s:g} s") from None
            return KnownState(self._last_state, time.monotonic() - self._last_state_at)

    def fail(self, message: str) -> None:
        """A process of the engine is gone: every waiting client gets an error now."""
        if self.failure is not None:
            return
        self.failure = EngineDead(message)
        self._requests.fail(self.failure)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(self.failure)

    def on_message(self, message: ToTokenizer | BrokenMessage) -> None:
        """What the detokenizer and the scheduler send."""
        if isinstance(message, BrokenMessage):
            self._fail_named(message)
            return
        self._last_heartbeat = time.monotonic()
        if isinstance(message, BatchTextOut):
            for out in message.outs:
                generation = self._requests.generation(out.rid)
                if generation is not None:  # else it was closed here, while its last outputs were under way
                    generation.push(out)
            return
        if isinstance(message, Heartbeat | StateReply):
            self._last_state, self._last_state_at = message.state, time.monotonic()
        if isinstance(message, FlushCacheReply | StateReply):
            call = self._calls.get(message.call_id)
            if call is not None and not call.done():
                call.set_result(message)

    # Inside

    def _fail_named(self, message: BrokenMessage) -> None:
        for rid in message.rids:
            generation = self._requests.generation(rid)
            if generation is not None:
                generation.fail(TercetError(message.reason))

    async def _call(self, request: Callable[[int], FlushCacheReq | StateReq], reply_type: type[R]) -> R:
        """Sends the scheduler `request(call_id)` and waits for the reply to it. Raises EngineDead."""
        if self.failure is not None:
            raise self.failure
        call_id = next(self._call_ids)
        call = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._scheduler.send(request(call_id))
            reply = await call
        finally:
            del self._calls[call_id]
        assert isinstance(reply, reply_type)
        return reply

    def _send_abort(self, key: str) -> None:
        if self.failure is None:
            self._scheduler.send(AbortReq(key))

    async def _prompt_ids(self, prompt: Prompt) -> Sequence[int]:
        content = prompt.content
        if callable(content):
            content = await content()
        if isinstance(content, str):
            ids: Sequence[int] = await self.encode(content, prompt.add_special_tokens)
        else:
            ids = content
        return self.inputs.check_ids(ids, is_text=isinstance(content, str))

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; raises InvalidRequest without a tokenizer or on text that is not Unicode."""
        tokenizer = self.inputs.tokenizer_for(text)
        if len(text) < _TOKENISE_OFF_LOOP_CHARS:
            return tokenizer.encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, tokenizer.encode, text, add_special_tokens)

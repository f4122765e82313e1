"""The client's side of the engine: prompts become token ids on their way in, outputs find their waiting coroutine.

Lives in one event loop (that of the HTTP server, or the Engine's own thread); none of its methods may be called from
another thread. It imports no torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from ..srt.errors import EngineDead, InvalidRequest, PromptTooLong, TercetError
from ..srt.io_struct import (
    AbortReq,
    BatchTextOut,
    BrokenMessage,
    FlushCacheReply,
    FlushCacheReq,
    GenerateReq,
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
from .request_registry import Prompt, PromptSamples, Request, RequestRegistry

logger = logging.getLogger(__name__)

R = TypeVar("R", FlushCacheReply, StateReply)

_TOKENISE_OFF_LOOP_CHARS = 20_000
"""A longer text is tokenised in a thread, so that it delays nobody's stream."""
_MAX_TOKENS_SHOWN = 5


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
        self.tokenizer = tokenizer
        self.facts = facts
        self.default_sampling = self._sampling_defaults()
        self._max_total_tokens = min(facts.context_len, facts.max_total_num_tokens)
        self.draining = False
        """True: running requests finish, new ones are refused with 503."""
        self.failure: EngineDead | None = None
        self._scheduler = scheduler
        self._calls: dict[int, asyncio.Future[FlushCacheReply | StateReply]] = {}
        self._call_ids = itertools.count(1)
        self._seeds = random.Random(server_args.random_seed)
        self._requests = RequestRegistry(self._send_abort, self._draw_seed)
        self._last_heartbeat = time.monotonic()
        self._last_state: SchedulerState | None = None
        self._last_state_at = 0.0
        self._warn_of_tokens_without_rows()

    # Requests

    def make_sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        """`given` over the model's defaults (`--sampling-defaults`); raises InvalidRequest with the field's name."""
        values = {**self.default_sampling, **{key: value for key, value in given.items() if value is not None}}
        if "max_new_tokens" in given:
            values["max_new_tokens"] = given["max_new_tokens"]
        try:
            sampling = msgspec.convert(values, SamplingParams)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidRequest):
                raise error.__cause__ from None
            raise InvalidRequest(f"sampling parameters: {error}") from error
        sampling.check_vocab(self.facts.vocab_size)
        if self.tokenizer is None and sampling.stop_strings:
            raise InvalidRequest(
                "stop needs a tokenizer, but this engine runs with --skip-tokenizer-init", param="stop"
            )
        return sampling

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
        options = prompt.prompt.options
        sampling = options.sampling
        room = self._max_total_tokens - len(prompt.prompt_ids)
        max_new = room if sampling.max_new_tokens is None else min(sampling.max_new_tokens, room)
        params = msgspec.structs.replace(
            sampling,
            n=1,
            max_new_tokens=max_new,
            min_new_tokens=min(sampling.min_new_tokens, max_new),
            sampling_seed=_wrap_int64(prompt.first_seed + generation.index),
        )
        generation.mark_sent()
        options = msgspec.structs.replace(options, sampling=params)
        self._scheduler.send(GenerateReq(generation.key, prompt.packed_ids, options))

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

    def _draw_seed(self) -> int:
        return self._seeds.getrandbits(62)

    async def _prompt_ids(self, prompt: Prompt) -> Sequence[int]:
        content = prompt.content
        if callable(content):
            content = await content()
        if isinstance(content, str):
            ids: Sequence[int] = await self.encode(content, prompt.add_special_tokens)
        else:
            ids = content
        if not ids:
            raise InvalidRequest("the prompt is empty; at least one token is required", param="prompt")
        limit = self.facts.max_req_input_len
        if len(ids) > limit:
            if not self.server_args.allow_auto_truncate:
                raise PromptTooLong(
                    f"the prompt has {len(ids)} tokens; at most {limit} fit (context {self.facts.context_len}, "
                    f"KV pool {self.facts.max_total_num_tokens} tokens)",
                    param="prompt",
                )
            ids = ids[-limit:]
        self._check_rows(ids, is_text=isinstance(content, str))
        return ids

    def _check_rows(self, ids: Sequence[int], *, is_text: bool) -> None:
        """Raises InvalidRequest for a token that the model has no embedding of. A tokenizer may know such tokens."""
        vocab_size = self.facts.vocab_size
        if 0 <= min(ids) <= max(ids) < vocab_size:
            return
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        if not is_text:
            raise InvalidRequest(f"token ids must be in [0, {vocab_size}), got {wrong}", param="input_ids")
        assert self.tokenizer is not None
        raise InvalidRequest(
            f"the text contains the token {self.tokenizer.id_to_token(wrong)!r} (id {wrong}), but the model's "
            f"vocabulary has only {vocab_size} tokens",
            param="prompt",
        )

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; raises InvalidRequest without a tokenizer or on text that is not Unicode."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidRequest("this engine has no tokenizer (--skip-tokenizer-init); send token ids", param="prompt")
        # A token of text has at most a few dozen bytes, so this bound refuses only what could never fit.
        most_chars = 256 * max(self.facts.context_len, 1)
        if len(text) > most_chars and not self.server_args.allow_auto_truncate:
            raise PromptTooLong(f"the prompt has {len(text)} characters; at most {most_chars} can fit", param="prompt")
        if len(text) < _TOKENISE_OFF_LOOP_CHARS:
            return tokenizer.encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, tokenizer.encode, text, add_special_tokens)

    def _warn_of_tokens_without_rows(self) -> None:
        tokens = self.tokenizer.tokens_beyond(self.facts.vocab_size) if self.tokenizer is not None else []
        if tokens:
            logger.warning(
                "The tokenizer has %d tokens that are not in the model's vocabulary (%s%s); such prompts are refused",
                len(tokens),
                ", ".join(map(repr, tokens[:_MAX_TOKENS_SHOWN])),
                ", ..." if len(tokens) > _MAX_TOKENS_SHOWN else "",
            )

    def _sampling_defaults(self) -> dict[str, Any]:
        if self.server_args.sampling_defaults != "model":
            return {}
        given = dataclasses.asdict(self.model_config.generation)
        defaults = {key: value for key, value in given.items() if value is not None}
        if defaults.get("top_k") == 0:  # transformers' way of saying "all tokens"
            defaults["top_k"] = -1
        if defaults:
            logger.info("Default sampling parameters from the model's generation_config: %s", defaults)
        return defaults


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63

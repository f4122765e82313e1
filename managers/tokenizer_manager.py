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
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ..srt.errors import BY_TYPE, EngineDead, InvalidRequest, PromptTooLong, TercetError
from ..srt.io_struct import (
    AbortFinish,
    AbortReq,
    BatchTextOut,
    FinishReason,
    FlushCacheReply,
    FlushCacheReq,
    GenerateReq,
    Heartbeat,
    SchedulerReady,
    SchedulerState,
    StateReply,
    StateReq,
    TextOut,
    ToScheduler,
    ToTokenizer,
    pack_ids,
)
from ..srt.model_config import ModelConfig
from ..srt.sampling_params import SamplingParams
from ..srt.server_args import ServerArgs
from ..srt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_TOKENISE_OFF_LOOP_CHARS = 20_000
"""A longer text is tokenised in a thread, so that it delays nobody's stream."""
_MAX_RID_CHARS = 256
_MAX_SALT_CHARS = 256


class SchedulerLink(Protocol):
    """Where requests go: an `ipc.Sender`, or a test's fake."""

    def send(self, message: ToScheduler) -> None: ...


class Generation:
    """One sample of one prompt on its way: iterate over its outputs, or `result()` for all at once.

    Outputs that arrive while nobody looks are merged, so a slow reader sees fewer, larger ones and loses nothing.
    """

    def __init__(self, manager: TokenizerManager, rid: str, index: int, prompt_ids: Sequence[int]) -> None:
        self.rid = rid
        """The client's name for the request; the samples of one prompt share it."""
        self.index = index
        """Which of the `n` samples this is."""
        self.prompt_ids = prompt_ids
        self.created = time.monotonic()
        self.first_token_s: float | None = None
        """Seconds from submission to the first token."""
        self.finished_s: float | None = None
        self._manager = manager
        self._key = uuid.uuid4().hex
        self._waiting: TextOut | None = None
        self._arrived = asyncio.Event()
        self._done = False

    async def __aiter__(self) -> AsyncIterator[TextOut]:
        """Yields each increment; the last one has `finish` set. Closing the iterator early aborts the request."""
        try:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                out, self._waiting = self._waiting, None
                if out is None:
                    continue
                yield out
                if out.finish is not None:
                    return
        finally:
            self.abort()

    async def result(self) -> TextOut:
        """Everything, once it is finished. Cancelling it aborts the request."""
        whole: TextOut | None = None
        async for out in self:
            whole = out if whole is None else _merge(whole, out)
        assert whole is not None
        return whole

    def abort(self) -> None:
        """Ends the request wherever it is; harmless when it has ended."""
        if not self._done:
            self._manager._abort(self)

    def _push(self, out: TextOut) -> None:
        now = time.monotonic()
        if self.first_token_s is None and out.completion_tokens:
            self.first_token_s = now - self.created
        if out.finish is not None:
            self._done = True
            self.finished_s = now - self.created
        self._waiting = out if self._waiting is None else _merge(self._waiting, out)
        self._arrived.set()

    def _fail(self, error: TercetError) -> None:
        finish = AbortFinish(error.message, error.status, type(error).__name__)
        self._push(TextOut("", "", [], finish, len(self.prompt_ids), 0, 0, 0))


def _merge(first: TextOut, second: TextOut) -> TextOut:
    """Two increments in a row, as one."""
    failed_here = second.completion_tokens < first.completion_tokens
    counts = first if failed_here else second
    return TextOut(
        first.rid,
        first.text + second.text,
        first.token_ids + second.token_ids,
        second.finish,
        counts.prompt_tokens,
        counts.completion_tokens,
        counts.cached_tokens,
        counts.num_retractions,
    )


def error_of(finish: FinishReason | None) -> TercetError | None:
    """The error that a finish stands for; None for a regular end and for an abort that the client asked for."""
    if not isinstance(finish, AbortFinish) or finish.status_code is None:
        return None
    return BY_TYPE.get(finish.err_type or "", TercetError)(finish.message)


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
        self.draining = False
        """True: running requests finish, new ones are refused with 503."""
        self.failure: EngineDead | None = None
        self._scheduler = scheduler
        self._generations: dict[str, Generation] = {}
        self._by_rid: dict[str, list[Generation]] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._seeds = random.Random(server_args.random_seed)
        self._last_heartbeat = time.monotonic()

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
                "stop needs a tokenizer, and this engine runs with --skip-tokenizer-init", param="stop"
            )
        return sampling

    async def submit(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        rid: str | None = None,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        stream: bool = True,
    ) -> list[Generation]:
        """Starts `sampling.n` samples of one prompt; the list has `n` Generations.

        `stream` False: only `result()` will be asked for, which saves the engine the increments.

        Raises InvalidRequest (empty or invalid prompt, `rid` in use), PromptTooLong, EngineDead.
        `max_new_tokens` is cut to what the context and the KV pool have room for.
        """
        self.check_accepting()
        if rid is not None:
            self._check_rid(rid)
        if len(cache_salt) > _MAX_SALT_CHARS:
            raise InvalidRequest(f"cache_salt must have at most {_MAX_SALT_CHARS} characters", param="cache_salt")
        ids = await self._prompt_ids(prompt, add_special_tokens)
        room = min(self.facts.context_len, self.facts.max_total_num_tokens) - len(ids)
        max_new = room if sampling.max_new_tokens is None else min(sampling.max_new_tokens, room)
        first_seed = sampling.sampling_seed
        if first_seed is None:
            first_seed = self._seeds.getrandbits(62)
        rid = rid or uuid.uuid4().hex
        if rid in self._by_rid:  # it may have come into use while this prompt was tokenised
            self._check_rid(rid)
        packed = pack_ids(ids)
        group = [Generation(self, rid, index, ids) for index in range(sampling.n)]
        self._by_rid[rid] = list(group)
        for generation in group:
            seed = _wrap_int64(first_seed + generation.index)
            params = msgspec.structs.replace(
                sampling,
                n=1,
                max_new_tokens=max_new,
                min_new_tokens=min(sampling.min_new_tokens, max_new),
                sampling_seed=seed,
            )
            self._generations[generation._key] = generation
            self._scheduler.send(GenerateReq(generation._key, packed, params, cache_salt, stream))
        return group

    def abort(self, rid: str) -> bool:
        """Aborts the request of exactly this name; whether there was one."""
        group = self._by_rid.get(rid)
        for generation in list(group or ()):
            generation.abort()
        return group is not None

    def abort_all(self) -> None:
        for generation in list(self._generations.values()):
            generation.abort()

    @property
    def num_unfinished(self) -> int:
        return len(self._generations)

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
            reply: FlushCacheReply = await self._call(lambda call_id: FlushCacheReq(call_id))
            if reply.ok or time.monotonic() >= deadline:
                return reply
            await asyncio.sleep(0.05)

    async def scheduler_state(self) -> SchedulerState:
        reply: StateReply = await self._call(lambda call_id: StateReq(call_id))
        return reply.state

    def fail(self, message: str) -> None:
        """A process of the engine is gone: every waiting client gets an error now."""
        if self.failure is not None:
            return
        self.failure = EngineDead(message)
        for generation in list(self._generations.values()):
            self._forget(generation)
            generation._fail(self.failure)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(self.failure)

    def on_message(self, message: ToTokenizer) -> None:
        """What the detokenizer and the scheduler send."""
        self._last_heartbeat = time.monotonic()
        if isinstance(message, BatchTextOut):
            for out in message.outs:
                generation = self._generations.get(out.rid)
                if generation is None:
                    continue  # aborted here; the scheduler's last words for it were already under way
                if out.finish is not None:
                    self._forget(generation)
                    if isinstance(out.finish, AbortFinish) and self.failure is None:
                        # It may have failed in the detokenizer, while the scheduler still works on it.
                        self._scheduler.send(AbortReq(out.rid))
                generation._push(out)
        elif isinstance(message, FlushCacheReply | StateReply):
            call = self._calls.get(message.call_id)
            if call is not None and not call.done():
                call.set_result(message)
        else:
            assert isinstance(message, Heartbeat)

    # Inside

    async def _call(self, make: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        call_id = next(self._call_ids)
        call = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._scheduler.send(make(call_id))
            return await call
        finally:
            del self._calls[call_id]

    def _abort(self, generation: Generation) -> None:
        """Ends it for the client now, and tells the scheduler to stop working on it."""
        self._forget(generation)
        if self.failure is None:
            self._scheduler.send(AbortReq(generation._key))
        finish = AbortFinish("aborted by the client")
        generation._push(TextOut("", "", [], finish, len(generation.prompt_ids), 0, 0, 0))

    def _forget(self, generation: Generation) -> None:
        self._generations.pop(generation._key, None)
        group = self._by_rid.get(generation.rid)
        if group is not None and generation in group:
            group.remove(generation)
            if not group:
                del self._by_rid[generation.rid]

    def _check_rid(self, rid: str) -> None:
        if not 0 < len(rid) <= _MAX_RID_CHARS:
            raise InvalidRequest(f"rid must have 1 to {_MAX_RID_CHARS} characters, got {len(rid)}", param="rid")
        if rid in self._by_rid:
            raise InvalidRequest(f"rid {rid!r} is in use by a request that has not finished", param="rid")

    async def _prompt_ids(self, prompt: str | Sequence[int], add_special_tokens: bool) -> Sequence[int]:
        if isinstance(prompt, str):
            ids: Sequence[int] = await self.encode(prompt, add_special_tokens)
        else:
            ids = prompt
            vocab_size = self.facts.vocab_size
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                wrong = next(i for i in ids if not 0 <= i < vocab_size)
                raise InvalidRequest(f"token ids must be in [0, {vocab_size}), got {wrong}", param="input_ids")
        if not ids:
            raise InvalidRequest("the prompt is empty: at least one token is needed", param="prompt")
        limit = self.facts.max_req_input_len
        if len(ids) > limit:
            if self.server_args.allow_auto_truncate:
                return ids[-limit:]
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens; at most {limit} fit (context {self.facts.context_len}, "
                f"KV pool {self.facts.max_total_num_tokens} tokens)",
                param="prompt",
            )
        return ids

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; raises InvalidRequest without a tokenizer or on text that is not Unicode."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidRequest("this engine runs with --skip-tokenizer-init: send token ids", param="prompt")
        # A token of text has at most a few dozen bytes, so this bound refuses only what could never fit.
        most_chars = 256 * max(self.facts.context_len, 1)
        if len(text) > most_chars and not self.server_args.allow_auto_truncate:
            raise PromptTooLong(f"the prompt has {len(text)} characters; at most {most_chars} can fit", param="prompt")
        if len(text) < _TOKENISE_OFF_LOOP_CHARS:
            return tokenizer.encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, tokenizer.encode, text, add_special_tokens)

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

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
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ..srt.errors import EngineDead, InvalidRequest, PromptTooLong
from ..srt.io_struct import (
    AbortFinish,
    AbortReq,
    BatchTextOut,
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
from ..srt.model_config import ModelConfig
from ..srt.sampling_params import SamplingParams
from ..srt.server_args import ServerArgs
from ..srt.tokenizer import Tokenizer
from .generation import Generation

logger = logging.getLogger(__name__)

_TOKENISE_OFF_LOOP_CHARS = 20_000
"""A longer text is tokenised in a thread, so that it delays nobody's stream."""
_MAX_RID_CHARS = 256
_MAX_SALT_CHARS = 256


class SchedulerLink(Protocol):
    """Where requests go: an `ipc.Sender`, or a test's fake."""

    def send(self, message: ToScheduler) -> None: ...


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
        group = [Generation(rid, index, ids, self._on_abort) for index in range(sampling.n)]
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
            self._generations[generation.key] = generation
            self._scheduler.send(GenerateReq(generation.key, packed, params, cache_salt, stream))
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
            generation.fail(self.failure)
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
                generation.push(out)
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

    def _on_abort(self, generation: Generation) -> None:
        self._forget(generation)
        if self.failure is None:
            self._scheduler.send(AbortReq(generation.key))

    def _forget(self, generation: Generation) -> None:
        self._generations.pop(generation.key, None)
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

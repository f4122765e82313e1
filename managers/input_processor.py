"""The InputProcessor: it makes a GenerateReq of a request, with defaults, checks, limits and seeds.

The TokenizerManager and the LocalEngine both use it, so a request means the same in both. It imports no torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from ..srt.errors import InvalidRequest, PromptTooLong, UnsupportedField
from ..srt.io_struct import DecodeOptions, GenerateReq, pack_ids
from ..srt.model_files.model_config import ModelConfig
from ..srt.plain_values import converted
from ..srt.request_options import RequestOptions
from ..srt.sampling_params import SamplingParams
from ..srt.server_args import ServerArgs
from ..srt.start_reports import SchedulerReady
from ..srt.text.tokenizer import Tokenizer
from .text_stream import TextStream

logger = logging.getLogger(__name__)

TOKENISE_OFF_LOOP_CHARS = 20_000
"""Longer texts are tokenised in a thread, so that they delay no stream."""
_MAX_CHARS_PER_TOKEN = 256
"""Longer texts cannot fit: a token has at most a few dozen bytes."""
_USUAL_CHARS_PER_TOKEN = 8
"""Longer texts are counted before they are tokenised. Few texts that fit have so many characters per token."""
_PIECE_CHARS = 65_536
_MAX_TOKENS_SHOWN = 5
MAX_HIDDEN_VALUES = 1 << 23
"""Most numbers in the hidden states of one request: 32 MiB, and about 160 MB of JSON."""
_JSON_FIELDS = ("json_schema", "structural_tag")
"""Sampling parameters that are JSON. An object is taken as its text."""


class InputProcessor:
    """The checks and defaults of one engine. Logs a warning if the tokenizer has tokens outside the vocabulary."""

    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        facts: SchedulerReady,
    ) -> None:
        self.default_sampling = _sampling_defaults(server_args, model_config)
        """Sampling parameters that the model's authors recommend."""
        self.tokenizer = tokenizer
        """None with `--skip-tokenizer-init`."""
        self._has_priorities = server_args.enable_priority_scheduling
        self._max_retention_s = server_args.max_retention_s if server_args.honours_retention else None
        self._allow_auto_truncate = server_args.allow_auto_truncate
        self._has_hidden_states = server_args.enable_return_hidden_states
        self._has_drafts = server_args.speculative_algorithm is not None
        self._hidden_size = model_config.hidden_size
        self.update(facts)
        self._seeds = random.Random(server_args.random_seed)
        self._warn_of_tokens_without_rows()

    def update(self, facts: SchedulerReady) -> None:
        """A restarted engine may have less memory for KV."""
        self.facts = facts
        """Of the engine that gets the requests."""
        self._max_total_tokens = min(facts.context_len, facts.max_total_num_tokens)

    def make_sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        """The parameters of `given`, and the model's defaults (`--sampling-defaults`) for all others.

        Raises InvalidRequest with the name of the field.
        """
        values = {**self.default_sampling, **{key: value for key, value in given.items() if value is not None}}
        if "max_new_tokens" in given:
            values["max_new_tokens"] = given["max_new_tokens"]
        for name in _JSON_FIELDS:
            if isinstance(values.get(name), dict):
                values[name] = _json_text(values[name], name)
        sampling = converted(SamplingParams, values)
        sampling.check_vocab(self.facts.vocab_size)
        if self.tokenizer is None and sampling.stops_at_text:
            field = "stop" if sampling.stop_strings else "stop_regex"
            raise InvalidRequest(
                f"{field} needs a tokenizer, but this engine runs with --skip-tokenizer-init", param=field
            )
        grammar = sampling.grammar
        if self.tokenizer is None and grammar is not None:
            raise InvalidRequest(
                f"{grammar.kind} needs a tokenizer, but this engine runs with --skip-tokenizer-init", param=grammar.kind
            )
        return sampling

    def encode(
        self, text: str, *, add_special_tokens: bool = True, truncates: bool | None = None, field: str = "prompt"
    ) -> list[int]:
        """The token ids of a text. `truncates`: see `truncates_prompt`. `field`: of the body, for error messages.

        Raises InvalidRequest without a tokenizer and for invalid Unicode, and PromptTooLong for a text that can never
        fit. Other texts that do not fit are returned whole, for `check_ids`.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidRequest("this engine has no tokenizer (--skip-tokenizer-init); send token ids", param="prompt")
        if self.truncates_prompt(truncates):
            text = text[-self.max_chars :]
        else:
            self.refuse_excess(tokenizer, text, field)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def prompt_ids(
        self,
        content: str | Sequence[int] | Callable[[], Awaitable[str | Sequence[int]]],
        *,
        add_special_tokens: bool,
        truncates: bool | None = None,
    ) -> Sequence[int]:
        """The checked token ids of a prompt. `truncates`: see `truncates_prompt`. Raises as `encode` and `check_ids`
        do."""
        if callable(content):
            content = await content()
        if isinstance(content, str):
            ids = await self.encode_off_loop(content, add_special_tokens=add_special_tokens, truncates=truncates)
            return self.check_ids(ids, is_text=True, truncates=truncates)
        return self.check_ids(content, is_text=False, truncates=truncates)

    async def encode_off_loop(self, text: str, *, add_special_tokens: bool, truncates: bool | None = None) -> list[int]:
        """As `encode`. A long text is tokenised in a thread, so that it delays no stream."""
        encode = functools.partial(self.encode, text, add_special_tokens=add_special_tokens, truncates=truncates)
        return encode() if len(text) < TOKENISE_OFF_LOOP_CHARS else await asyncio.to_thread(encode)

    def prediction_ids(self, given: str | Sequence[int]) -> bytes:
        """The packed token ids of a predicted output, for `RequestOptions.prediction`.

        Raises as `encode` and `check_ids` do, and UnsupportedField on a server that makes no drafts.
        """
        field = "prediction"
        if not self._has_drafts:
            raise UnsupportedField(f"{field} needs a server with --speculative-algorithm NGRAM", param=field)
        try:
            ids, is_text = given, isinstance(given, str)
            if isinstance(ids, str):
                ids = self.encode(ids, add_special_tokens=False, truncates=False, field=field)
            return pack_ids(self.check_ids(ids, is_text=is_text, truncates=False, field=field) if ids else ())
        except InvalidRequest as error:
            error.param = field
            raise

    def truncates_prompt(self, choice: bool | None) -> bool:
        """Whether a prompt that is too long loses its first tokens. `choice`: of the request. None: as
        `--allow-auto-truncate` says."""
        return self._allow_auto_truncate if choice is None else choice

    @property
    def max_chars(self) -> int:
        return _MAX_CHARS_PER_TOKEN * max(self.facts.context_len, 1)

    def refuse_excess(self, tokenizer: Tokenizer, text: str, field: str = "prompt") -> None:
        """Raises PromptTooLong for too many characters, and for a long text with over twice the tokens that fit.

        `field`: of the request's body that has the text. Tokenising needs hundreds of bytes per token, so such a text
        is counted in pieces, one in memory at a time. A cut between two pieces changes a few tokens around it, far too
        few to double the number of a text that fits. The count decides nothing else: a text that passes is tokenised
        whole.
        """
        if len(text) > self.max_chars:
            raise self.overflow(f"the {field} has {len(text)} characters; at most {self.max_chars} can fit", field)
        limit = self.facts.max_req_input_len
        if len(text) <= _USUAL_CHARS_PER_TOKEN * limit:
            return
        num_tokens = 0
        for start in range(0, len(text), _PIECE_CHARS):
            num_tokens += len(tokenizer.encode(text[start : start + _PIECE_CHARS], add_special_tokens=False))
            if num_tokens > 2 * limit:
                raise self.overflow(f"the {field} has more than {2 * limit} tokens; at most {limit} fit", field)

    def check_ids(
        self, ids: Sequence[int], *, is_text: bool, truncates: bool | None = None, field: str = "prompt"
    ) -> Sequence[int]:
        """Checks the token ids of a prompt. Returns all of them, or the last ones that fit (`truncates_prompt`).
        `field`: of the body, for error messages.

        Raises InvalidRequest for no ids and for ids outside the vocabulary, PromptTooLong for too many.
        """
        if not ids:
            raise InvalidRequest("the prompt is empty; at least one token is required", param="prompt")
        limit = self.facts.max_req_input_len
        if len(ids) > limit:
            if not self.truncates_prompt(truncates):
                raise self.overflow(f"the {field} has {len(ids)} tokens; at most {limit} fit", field)
            ids = ids[-limit:]
        self._check_rows(ids, is_text=is_text)
        return ids

    def check_options(self, options: RequestOptions) -> None:
        """Raises InvalidRequest for a priority or a retention that the server's settings do not allow."""
        if options.priority and not self._has_priorities:
            raise InvalidRequest(
                f"priority must be 0 on a server without --enable-priority-scheduling, got {options.priority}",
                param="priority",
            )
        if options.changes_retention:
            self._check_retention(options)

    def _check_retention(self, options: RequestOptions) -> None:
        seconds = options.retention_seconds
        if self._max_retention_s is None:
            param = "session_id" if seconds is None else "retention_seconds"
            raise InvalidRequest(
                f"{param} needs a server with a prefix cache and --radix-eviction-policy value", param=param
            )
        if seconds is not None and seconds > self._max_retention_s:
            raise InvalidRequest(
                f"retention_seconds must be at most {self._max_retention_s:g} (--max-retention-s), got {seconds:g}",
                param="retention_seconds",
            )

    def check_logprobs(self, options: RequestOptions, num_prompt_tokens: int) -> None:
        """Raises InvalidRequest if the log probabilities asked for do not suit the prompt or the engine."""
        if options.logprobs is None:
            return
        options.logprobs.check(num_prompt_tokens, self.facts.vocab_size)
        if options.logprobs.return_text_in_logprobs and self.tokenizer is None:
            raise InvalidRequest(
                "return_text_in_logprobs needs a tokenizer, but this engine runs with --skip-tokenizer-init",
                param="return_text_in_logprobs",
            )

    def check_hidden_states(self, options: RequestOptions, num_prompt_tokens: int, num_samples: int) -> None:
        """Raises InvalidRequest if hidden states are asked for, and the engine returns none or they are too many.

        `num_samples`: of the whole request.
        """
        if not options.return_hidden_states:
            return
        param = "return_hidden_states"
        if not self._has_hidden_states:
            raise InvalidRequest(f"{param} needs a server with --enable-return-hidden-states", param=param)
        if options.stream:
            raise InvalidRequest(f"{param} is not supported in a stream", param=param)
        max_new = options.sampling.max_new_tokens
        longest = self._max_total_tokens if max_new is None else num_prompt_tokens + max_new
        most = MAX_HIDDEN_VALUES // (self._hidden_size * num_samples)
        if min(longest, self._max_total_tokens) > most:
            raise InvalidRequest(
                f"{param} is for at most {most} tokens of prompt and output in each of {num_samples} samples, got "
                f"{num_prompt_tokens} prompt tokens and max_new_tokens {max_new}",
                param=param,
            )

    def draw_seed(self) -> int:
        """Draw the seed of a request without one."""
        return self._seeds.getrandbits(62)

    def generate_req(self, rid: str, packed_ids: bytes, options: RequestOptions, seed: int) -> GenerateReq:
        """Make the request of one sample. `max_new_tokens` is limited by the context and the size of the KV pool.

        `packed_ids`: the checked ids of its prompt (`io_struct.pack_ids`). `seed`: any integer; 64 bits of it count.
        """
        sampling = _limited(options.sampling, self._max_total_tokens - len(packed_ids) // 4)
        sampling = msgspec.structs.replace(sampling, n=1, sampling_seed=_wrap_int64(seed))
        return GenerateReq(rid, packed_ids, msgspec.structs.replace(options, sampling=sampling))

    def fitted(self, request: GenerateReq) -> GenerateReq:
        """The request, with the limits of the engine that gets it. That may have less memory than the one before.

        The scheduler refuses a request whose prompt and tokens so far do not fit, or whose first token does not.
        """
        num_tokens = 0 if request.resumed is None else len(request.resumed.output_ids)
        room = max(self._max_total_tokens - len(request.input_ids) // 4, num_tokens, 1)
        sampling = request.options.sampling
        assert sampling.max_new_tokens is not None
        if sampling.max_new_tokens <= room:
            return request
        options = msgspec.structs.replace(request.options, sampling=_limited(sampling, room))
        return msgspec.structs.replace(request, options=options)

    def sample_req(self, rid: str, packed_ids: bytes, options: RequestOptions, index: int) -> GenerateReq:
        """The request of a sample that another server process has accepted. This server's settings may be others.
        `fitted` limits its tokens.

        `options`: those in the request of the first sample of its prompt.
        """
        seed, seconds = options.sampling.sampling_seed, options.retention_seconds
        assert seed is not None
        most_s = self._max_retention_s
        allowed = msgspec.structs.replace(
            options,
            sampling=msgspec.structs.replace(options.sampling, sampling_seed=_wrap_int64(seed + index)),
            priority=options.priority if self._has_priorities else 0,
            session_id="" if most_s is None else options.session_id,
            retention_seconds=None if most_s is None or seconds is None else min(seconds, most_s),
        )
        return GenerateReq(rid, packed_ids, allowed)

    def held_text(self, options: RequestOptions, output_ids: Sequence[int]) -> str:
        """The end of the text of these tokens that the detokenizer holds back before the request ends.

        That is an incomplete character, or the possible start of a stop string.
        """
        if self.tokenizer is None:
            return ""
        stream = TextStream(self.tokenizer, DecodeOptions.of(options))
        stream.push(output_ids)
        return stream.finish()

    def overflow(self, problem: str, field: str = "prompt") -> PromptTooLong:
        """The error of a field that is too long for the context or the KV pool."""
        pool = self.facts.max_total_num_tokens
        if pool < self.facts.context_len:
            problem += f", because the KV pool has {pool} tokens"
        return PromptTooLong.of(self.facts.context_len, problem, param=field)

    def _check_rows(self, ids: Sequence[int], *, is_text: bool) -> None:
        """Raises InvalidRequest for a token that the model has no embedding of. A tokenizer may know such tokens."""
        vocab_size = self.facts.vocab_size
        if not is_text:
            check_token_ids(ids, vocab_size, "prompt")
            return
        if 0 <= min(ids) <= max(ids) < vocab_size:
            return
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        assert self.tokenizer is not None
        raise InvalidRequest(
            f"the text contains the token {self.tokenizer.id_to_token(wrong)!r} (id {wrong}), but the model's "
            f"vocabulary has only {vocab_size} tokens",
            param="prompt",
        )

    def _warn_of_tokens_without_rows(self) -> None:
        tokens = self.tokenizer.tokens_beyond(self.facts.vocab_size) if self.tokenizer is not None else []
        if tokens:
            logger.warning(
                "The tokenizer has %d tokens that are not in the model's vocabulary (%s%s); such prompts are refused",
                len(tokens),
                ", ".join(map(repr, tokens[:_MAX_TOKENS_SHOWN])),
                ", ..." if len(tokens) > _MAX_TOKENS_SHOWN else "",
            )


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequest for an id that is not in the model's vocabulary. `param`: the field that has the ids."""
    if not ids or 0 <= min(ids) <= max(ids) < vocab_size:
        return
    wrong = next(i for i in ids if not 0 <= i < vocab_size)
    given = wrong if wrong.bit_length() <= 64 else "a number of more than 64 bits"
    raise InvalidRequest(f"token ids must be in [0, {vocab_size}), got {given}", param=param)


def _sampling_defaults(server_args: ServerArgs, model_config: ModelConfig) -> dict[str, Any]:
    if server_args.sampling_defaults != "model":
        return {}
    given = dataclasses.asdict(model_config.generation)
    defaults = {key: value for key, value in given.items() if value is not None}
    if defaults:
        logger.info("Default sampling parameters from the model's generation_config: %s", defaults)
    return defaults


def _json_text(value: dict[str, Any], name: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidRequest(f"{name} must be a JSON object: {error}", param=name) from None


def _limited(sampling: SamplingParams, room: int) -> SamplingParams:
    """At most `room` new tokens."""
    max_new = room if sampling.max_new_tokens is None else min(sampling.max_new_tokens, room)
    return msgspec.structs.replace(
        sampling, max_new_tokens=max_new, min_new_tokens=min(sampling.min_new_tokens, max_new)
    )


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63

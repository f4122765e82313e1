"""Makes a GenerateReq of what a client asks for: defaults, checks, limits and seeds.

The TokenizerManager and the LocalEngine both use it, so a request means the same in both. It imports no torch.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..srt.errors import InvalidRequest, PromptTooLong
from ..srt.io_struct import GenerateReq, SchedulerReady
from ..srt.model_files.model_config import ModelConfig
from ..srt.request_options import RequestOptions
from ..srt.sampling_params import SamplingParams
from ..srt.server_args import ServerArgs
from ..srt.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_MAX_CHARS_PER_TOKEN = 256
"""A token of text has at most a few dozen bytes, so a text of more characters could never fit."""
_MAX_TOKENS_SHOWN = 5


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
        self._facts = facts
        self._allow_auto_truncate = server_args.allow_auto_truncate
        self._max_total_tokens = min(facts.context_len, facts.max_total_num_tokens)
        self._seeds = random.Random(server_args.random_seed)
        self._warn_of_tokens_without_rows()

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
        sampling.check_vocab(self._facts.vocab_size)
        if self.tokenizer is None and sampling.stop_strings:
            raise InvalidRequest(
                "stop needs a tokenizer, but this engine runs with --skip-tokenizer-init", param="stop"
            )
        return sampling

    def tokenizer_for(self, text: str) -> Tokenizer:
        """The tokenizer for this text.

        Raises InvalidRequest without a tokenizer, and PromptTooLong for a text that can never fit.
        """
        if self.tokenizer is None:
            raise InvalidRequest("this engine has no tokenizer (--skip-tokenizer-init); send token ids", param="prompt")
        max_chars = _MAX_CHARS_PER_TOKEN * max(self._facts.context_len, 1)
        if len(text) > max_chars and not self._allow_auto_truncate:
            raise PromptTooLong(f"the prompt has {len(text)} characters; at most {max_chars} can fit", param="prompt")
        return self.tokenizer

    def check_ids(self, ids: Sequence[int], *, is_text: bool) -> Sequence[int]:
        """Check the token ids of a prompt. Returns all of them, or the last ones with `--allow-auto-truncate`.

        Raises InvalidRequest for no ids and for ids outside the vocabulary, PromptTooLong for too many.
        """
        if not ids:
            raise InvalidRequest("the prompt is empty; at least one token is required", param="prompt")
        limit = self._facts.max_req_input_len
        if len(ids) > limit:
            if not self._allow_auto_truncate:
                raise PromptTooLong(
                    f"the prompt has {len(ids)} tokens; at most {limit} fit (context {self._facts.context_len}, "
                    f"KV pool {self._facts.max_total_num_tokens} tokens)",
                    param="prompt",
                )
            ids = ids[-limit:]
        self._check_rows(ids, is_text=is_text)
        return ids

    def draw_seed(self) -> int:
        """Draw the seed of a request without one."""
        return self._seeds.getrandbits(62)

    def generate_req(self, rid: str, packed_ids: bytes, options: RequestOptions, seed: int) -> GenerateReq:
        """Make the request of one sample. `max_new_tokens` is limited by the context and the size of the KV pool.

        `packed_ids`: the checked ids of its prompt (`io_struct.pack_ids`). `seed`: any integer; 64 bits of it count.
        """
        sampling = options.sampling
        room = self._max_total_tokens - len(packed_ids) // 4
        max_new = room if sampling.max_new_tokens is None else min(sampling.max_new_tokens, room)
        sampling = msgspec.structs.replace(
            sampling,
            n=1,
            max_new_tokens=max_new,
            min_new_tokens=min(sampling.min_new_tokens, max_new),
            sampling_seed=_wrap_int64(seed),
        )
        return GenerateReq(rid, packed_ids, msgspec.structs.replace(options, sampling=sampling))

    def _check_rows(self, ids: Sequence[int], *, is_text: bool) -> None:
        """Raises InvalidRequest for a token that the model has no embedding of. A tokenizer may know such tokens."""
        vocab_size = self._facts.vocab_size
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

    def _warn_of_tokens_without_rows(self) -> None:
        tokens = self.tokenizer.tokens_beyond(self._facts.vocab_size) if self.tokenizer is not None else []
        if tokens:
            logger.warning(
                "The tokenizer has %d tokens that are not in the model's vocabulary (%s%s); such prompts are refused",
                len(tokens),
                ", ".join(map(repr, tokens[:_MAX_TOKENS_SHOWN])),
                ", ..." if len(tokens) > _MAX_TOKENS_SHOWN else "",
            )


def _sampling_defaults(server_args: ServerArgs, model_config: ModelConfig) -> dict[str, Any]:
    if server_args.sampling_defaults != "model":
        return {}
    given = dataclasses.asdict(model_config.generation)
    defaults = {key: value for key, value in given.items() if value is not None}
    if defaults.get("top_k") == 0:  # transformers' way of saying "all tokens"
        defaults["top_k"] = -1
    if defaults:
        logger.info("Default sampling parameters from the model's generation_config: %s", defaults)
    return defaults


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63

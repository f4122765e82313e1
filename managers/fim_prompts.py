"""The prompts of fill in the middle (FIM): the model inserts text between a prefix and a suffix."""

from __future__ import annotations

import asyncio
import functools

import msgspec

from ..srt.errors import InvalidRequest, UnsupportedField
from ..srt.sampling_params import SamplingParams
from ..srt.text.tokenizer import Tokenizer
from .input_processor import TOKENISE_OFF_LOOP_CHARS, InputProcessor


class FimPrompts:
    """Makes the prompts of one suffix, and the sampling parameters of its middle.

    Raises InvalidRequest, with the field `suffix`, if the model has no tokens for it.
    """

    def __init__(self, inputs: InputProcessor, suffix: str) -> None:
        tokenizer, vocab_size = inputs.tokenizer, inputs.facts.vocab_size
        if tokenizer is None:
            raise InvalidRequest(
                "suffix needs a tokenizer, but this engine runs with --skip-tokenizer-init", param="suffix"
            )
        if tokenizer.fim is None or max(tokenizer.fim.mark_ids) >= vocab_size:
            raise UnsupportedField(
                "suffix needs a model with tokens for fill in the middle, such as <|fim_prefix|>, <|fim_suffix|> and "
                "<|fim_middle|>; this model has none",
                param="suffix",
            )
        self._inputs = inputs
        self._tokenizer: Tokenizer = tokenizer
        self._fim = tokenizer.fim
        self._ends = [token for token in sorted(self._fim.end_ids) if token < vocab_size]
        self._suffix = suffix

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters, with the tokens that end the middle as stop tokens. With `ignore_eos`, nothing ends it."""
        if sampling.ignore_eos:
            return sampling
        stops = sorted({*self._ends, *(sampling.stop_token_ids or ())})
        return msgspec.structs.replace(sampling, stop_token_ids=stops)

    async def ids(self, prefix: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of the prompt for a text between `prefix` and the suffix.

        If they are too many, the prefix loses its first tokens with `--allow-auto-truncate`. Otherwise raises
        PromptTooLong. Raises InvalidRequest for invalid Unicode.
        """
        encode = functools.partial(self._encode, prefix, add_special_tokens)
        is_short = len(prefix) + len(self._suffix) < TOKENISE_OFF_LOOP_CHARS
        return encode() if is_short else await asyncio.to_thread(encode)

    def _encode(self, prefix: str, add_special_tokens: bool) -> list[int]:
        inputs, tokenizer = self._inputs, self._tokenizer
        truncates = inputs.truncates_prompt(None)
        if truncates:
            prefix = prefix[-inputs.max_chars :]
        else:
            inputs.refuse_excess(tokenizer, prefix)
        before = tokenizer.encode_literally(prefix, is_start=True)
        after = self._encode_suffix()
        start = tokenizer.start_ids if add_special_tokens else []
        limit = inputs.facts.max_req_input_len
        room = limit - len(start) - len(self._fim.prompt([], after))
        if room < 0:
            raise inputs.overflow(
                f"the suffix and the tokens around it have {limit - room} tokens; at most {limit} fit", "suffix"
            )
        if len(before) > room and not truncates:
            raise inputs.overflow(
                f"the prompt has {len(before)} tokens; at most {room} fit beside the suffix and the tokens around it"
            )
        return [*start, *self._fim.prompt(before[max(0, len(before) - room) :], after)]

    def _encode_suffix(self) -> list[int]:
        try:
            self._inputs.refuse_excess(self._tokenizer, self._suffix, "suffix")
            return self._tokenizer.encode_literally(self._suffix, is_start=False)
        except InvalidRequest as error:  # also of the tokenizer, which does not know the field
            error.param = "suffix"
            raise

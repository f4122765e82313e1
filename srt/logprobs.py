"""Log probabilities of tokens: what a request asks for, what travels between processes, and SGLang's lists.

A log probability is the logarithm of the softmax of the model's own logits, before temperature, penalties and logit
bias. That of a prompt token is conditional on the tokens before it, so the first token of a prompt has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import msgspec
import numpy as np

from .errors import InvalidRequest

MAX_TOP_LOGPROBS = 100
MAX_TOKEN_IDS = 1024
MAX_INPUT_VALUES = 2**20
"""Log probabilities of one prompt: its positions times the values of a position. 2**20 values are 30 MB of JSON."""

TextOf = Callable[[int], str]


class LogprobOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The log probabilities that a request asks for. Raises InvalidRequest for a value out of range."""

    logprob_start_len: int = -1
    """The first position of the prompt whose token is listed; -1: the prompt is not listed.

    The first listed token has no log probability: the scheduler computes the model's logits from this position on, and
    they belong to the next token.
    """
    top_logprobs_num: int = 0
    """How many of the most probable tokens are listed for each position."""
    token_ids_logprob: list[int] = []
    """Tokens whose log probabilities are listed for each position."""
    return_text_in_logprobs: bool = False
    """Only for SGLang's lists: tokens have texts."""

    def __post_init__(self) -> None:
        start, top, ids = self.logprob_start_len, self.top_logprobs_num, self.token_ids_logprob
        if start < -1:
            raise InvalidRequest(
                f"logprob_start_len must be at least 0, or -1 for output tokens only, got {start}",
                param="logprob_start_len",
            )
        if not 0 <= top <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(
                f"top_logprobs_num must be in [0, {MAX_TOP_LOGPROBS}], got {top}", param="top_logprobs_num"
            )
        if len(ids) > MAX_TOKEN_IDS:
            raise InvalidRequest(
                f"token_ids_logprob must have at most {MAX_TOKEN_IDS} ids, got {len(ids)}", param="token_ids_logprob"
            )

    def input_start(self, num_prompt_tokens: int) -> int:
        """The first listed position of a prompt, at most `num_prompt_tokens`."""
        return num_prompt_tokens if self.logprob_start_len < 0 else self.logprob_start_len

    def check(self, num_prompt_tokens: int, vocab_size: int) -> None:
        """Raise InvalidRequest if the options do not suit the prompt or the vocabulary."""
        if self.logprob_start_len > num_prompt_tokens:
            raise InvalidRequest(
                f"logprob_start_len must be at most the number of prompt tokens ({num_prompt_tokens}), "
                f"got {self.logprob_start_len}",
                param="logprob_start_len",
            )
        for token in self.token_ids_logprob:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"token_ids_logprob must have token ids in [0, {vocab_size}), got {token}",
                    param="token_ids_logprob",
                )
        num_positions = num_prompt_tokens - self.input_start(num_prompt_tokens)
        num_values = num_positions * (1 + self.top_logprobs_num + len(self.token_ids_logprob))
        if num_values > MAX_INPUT_VALUES:
            raise InvalidRequest(
                f"logprob_start_len asks for {num_positions} positions of the prompt, which have {num_values} log "
                f"probabilities; at most {MAX_INPUT_VALUES} are returned",
                param="logprob_start_len",
            )


class Logprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The log probabilities of n successive tokens, as the bytes of arrays: a prompt may have thousands of tokens."""

    own: bytes = b""
    """float32 [n], of the tokens themselves"""
    top: bytes = b""
    """float32 [n, top], of the most probable tokens, the most probable first"""
    top_ids: bytes = b""
    """int32 [n, top], their ids"""
    asked: bytes = b""
    """float32 [n, len(token_ids_logprob)]"""

    def __len__(self) -> int:
        return len(self.own) // 4

    @property
    def num_values(self) -> int:
        return (len(self.own) + len(self.top) + len(self.asked)) // 4

    @classmethod
    def concat(cls, parts: Sequence[Logprobs]) -> Logprobs:
        """Logprobs of successive tokens as one."""
        if len(parts) == 1:
            return parts[0]  # the common case
        return cls(*(b"".join([getattr(part, name) for part in parts]) for name in cls.__struct_fields__))

    def first(self, n: int) -> Logprobs:
        """Those of the first n tokens."""
        if n >= len(self):
            return self
        return Logprobs(*(part[: n * (len(part) // len(self))] for part in msgspec.structs.astuple(self)))

    def own_list(self) -> list[float]:
        values: list[float] = np.frombuffer(self.own, np.float32).tolist()
        return values

    def top_lists(self) -> tuple[list[list[float]], list[list[int]]]:
        """For each token the log probabilities and the ids of the most probable tokens."""
        return self._table(self.top, np.float32), self._table(self.top_ids, np.int32)

    def asked_lists(self) -> list[list[float]]:
        return self._table(self.asked, np.float32)

    def _table(self, data: bytes, dtype: type[np.generic]) -> list[list[Any]]:
        table: list[list[Any]] = np.frombuffer(data, dtype).reshape(len(self), -1).tolist() if len(self) else []
        return table


class NewLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The log probabilities of a request since its last output."""

    input: Logprobs | None
    """Of the prompt tokens behind the first listed one, in the first output; None: none in this output."""
    output: Logprobs
    """Of the new output tokens."""

    @property
    def num_values(self) -> int:
        return self.output.num_values + (0 if self.input is None else self.input.num_values)

    @classmethod
    def joined(cls, parts: Sequence[NewLogprobs]) -> NewLogprobs:
        """Several successive values as one."""
        inputs = [part.input for part in parts if part.input is not None]
        return cls(Logprobs.concat(inputs) if inputs else None, Logprobs.concat([part.output for part in parts]))


def sglang_lists(
    options: LogprobOptions,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    new: NewLogprobs,
    text_of: TextOf | None,
) -> dict[str, list[Any]]:
    """The fields of SGLang's `meta_info`: lists of [log probability, token id, text].

    `output_ids`: the new output tokens. `text_of`: the text of a token; None: texts are null.
    """
    fields: dict[str, list[Any]] = {}
    if new.input is not None:
        start = options.input_start(len(prompt_ids))
        ids = prompt_ids[start : start + len(new.input) + 1]
        fields.update(_lists("input", options, ids, new.input, text_of, skip=len(ids) - len(new.input)))
    fields.update(_lists("output", options, output_ids, new.output, text_of))
    return fields


def _lists(
    kind: str, options: LogprobOptions, ids: Sequence[int], found: Logprobs, text_of: TextOf | None, skip: int = 0
) -> dict[str, list[Any]]:
    """The fields of input or output. `skip`: tokens at the start that have no log probability."""
    nothing: list[Any] = [None] * skip
    fields = {f"{kind}_token_logprobs": _entries([*nothing, *found.own_list()], ids, text_of)}
    if options.top_logprobs_num:
        values, top_ids = found.top_lists()
        tops = [_entries(*pair, text_of) for pair in zip(values, top_ids, strict=True)]
        fields[f"{kind}_top_logprobs"] = nothing + tops
    if options.token_ids_logprob:
        asked = [_entries(row, options.token_ids_logprob, text_of) for row in found.asked_lists()]
        fields[f"{kind}_token_ids_logprobs"] = nothing + asked
    return fields


def _entries(values: Sequence[float | None], ids: Sequence[int], text_of: TextOf | None) -> list[Any]:
    texts = repeat(None, len(ids)) if text_of is None else map(text_of, ids)
    return [list(entry) for entry in zip(values, ids, texts, strict=True)]

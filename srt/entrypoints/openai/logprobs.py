"""Log probabilities in the formats of the OpenAI API: one for chats, another for completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Annotated

import msgspec

from ....managers.incremental_decode import IncrementalDecoder
from ....managers.tokenizer_manager import TokenizerManager
from ...errors import InvalidRequest
from ...io_struct import TextOut
from ...logprobs import LogprobOptions, Logprobs
from ...text.tokenizer import Tokenizer
from ..wire import doc

MAX_TOP_LOGPROBS = 20
_LEAST = -9999.0
"""JSON has no infinity. OpenAI writes this number for a token that is out of reach."""


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most probable tokens at a position."""

    token: Annotated[str, doc("The token's text; bytes that are no text are written as \\xNN")]
    logprob: Annotated[float, doc("Its log probability, at least -9999")]
    bytes: Annotated[list[int], doc("The bytes of its text in UTF-8, or a part of a character's bytes")]


class TokenLogprob(TopLogprob, frozen=True):
    """A generated token."""

    top_logprobs: Annotated[list[TopLogprob], doc("The most probable tokens, the most probable first")]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The log probabilities of a chat's answer, or of what is new in a chunk."""

    content: Annotated[list[TokenLogprob], doc("One entry for each generated token, also for stop tokens")]
    refusal: Annotated[None, doc("Always null")] = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The log probabilities of a completion: lists with one element for each token, with `echo` for the prompt, too."""

    tokens: Annotated[list[str], doc("The tokens' texts; bytes that are no text are written as \\xNN")]
    token_logprobs: Annotated[list[float | None], doc("Their log probabilities; null for the first token of a prompt")]
    top_logprobs: Annotated[
        list[dict[str, float] | None],
        doc("Log probabilities of the most probable tokens and of the token itself, by text"),
    ]
    text_offset: Annotated[list[int], doc("Where each token begins in the choice's `text`, in characters")]


def check_tokenizer(manager: TokenizerManager, param: str) -> None:
    """Raises InvalidRequest without a tokenizer."""
    if manager.inputs.tokenizer is None:
        raise InvalidRequest(
            f"{param} needs a tokenizer, but this engine runs with --skip-tokenizer-init; /generate does not",
            param=param,
        )


def check_top(value: int, param: str) -> int:
    """Raises InvalidRequest for too many top tokens."""
    if not 0 <= value <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"{param} must be in [0, {MAX_TOP_LOGPROBS}], got {value}", param=param)
    return value


def chat_logprobs(tokenizer: Tokenizer, options: LogprobOptions, out: TextOut) -> ChatLogprobs:
    """The log probabilities of the tokens of an output. The request has asked for them."""
    new = out.tokens.logprobs
    if new is None:  # the output is an end that has no tokens
        return ChatLogprobs([])
    content = [
        TokenLogprob(
            *_chat_entry(tokenizer, token, value), [TopLogprob(*_chat_entry(tokenizer, *pair)) for pair in top]
        )
        for token, value, top in zip(
            out.token_ids, new.output.own_list(), _tops(new.output, options.top_logprobs_num), strict=True
        )
    ]
    return ChatLogprobs(content)


def _chat_entry(tokenizer: Tokenizer, token: int, value: float) -> tuple[str, float, list[int]]:
    return tokenizer.token_text(token), _finite(value), list(tokenizer.spell(token))


class CompletionLogprobWriter:
    """Writes the log probabilities of one choice of a completion, output by output."""

    def __init__(
        self, tokenizer: Tokenizer, options: LogprobOptions, *, skip_special_tokens: bool, prompt_is_text: bool
    ) -> None:
        """`prompt_is_text`: the echo is the client's own text. Otherwise it is the text of the client's token ids."""
        self._tokenizer = tokenizer
        self._options = options
        self._echo_skips_special_tokens = skip_special_tokens and not prompt_is_text
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._offset = 0

    def write(self, out: TextOut, prompt_ids: Sequence[int] = (), prompt_text: str = "") -> CompletionLogprobs:
        """The log probabilities of an output's tokens. `prompt_ids`, `prompt_text`: the echo, in the first output."""
        written = CompletionLogprobs([], [], [], [])
        new = out.tokens.logprobs
        if new is None:  # the output is an end that has no tokens
            return written
        if new.input is not None and prompt_ids:
            # The client's text lacks the special tokens that were added before it. The offsets agree at its end.
            decoder = IncrementalDecoder(self._tokenizer, skip_special_tokens=self._echo_skips_special_tokens)
            offsets, length = _offsets(decoder, prompt_ids, 0)
            shift = len(prompt_text) - length - len(decoder.finish())
            count = 1 + len(new.input)  # fewer than all tokens if the request was aborted
            self._add(written, prompt_ids[:1], [None], [None], [max(0, offsets[0] + shift)])
            places = [max(0, offset + shift) for offset in offsets[1:count]]
            tops = _tops(new.input, self._options.top_logprobs_num)
            self._add(written, prompt_ids[1:count], new.input.own_list(), tops, places)
            self._offset = len(prompt_text)
        offsets, self._offset = _offsets(self._decoder, out.token_ids, self._offset)
        tops = _tops(new.output, self._options.top_logprobs_num)
        self._add(written, out.token_ids, new.output.own_list(), tops, offsets)
        return written

    def _add(
        self,
        written: CompletionLogprobs,
        ids: Sequence[int],
        values: Sequence[float | None],
        tops: Iterable[Iterable[tuple[int, float]] | None],
        offsets: Sequence[int],
    ) -> None:
        text_of = self._tokenizer.token_text
        for token, value, top, offset in zip(ids, values, tops, offsets, strict=True):
            text = text_of(token)
            by_text: dict[str, float] | None = None
            if top is not None and value is not None:
                by_text = {}
                for other, its_value in top:  # two tokens may have one text: the more probable one counts
                    by_text.setdefault(text_of(other), _finite(its_value))
                by_text.setdefault(text, _finite(value))
            written.tokens.append(text)
            written.token_logprobs.append(None if value is None else _finite(value))
            written.top_logprobs.append(by_text)
            written.text_offset.append(offset)


def _offsets(decoder: IncrementalDecoder, ids: Sequence[int], start: int) -> tuple[list[int], int]:
    """Where each token begins in a text, and where the last one ends. `start`: the end of the text before them."""
    offsets = []
    for token in ids:
        broken = decoder.finish() if decoder.holds_back() else ""
        new = decoder.push((token,))
        # The token either completes the character before it, or comes after the marks of a broken one.
        offsets.append(start + len(broken) if broken and new.startswith(broken) else start)
        start += len(new)
    return offsets, start


def _tops(found: Logprobs, num_top: int) -> Iterable[list[tuple[int, float]]]:
    """For each token the most probable ones: (id, log probability)."""
    if not num_top:
        return repeat([], len(found))
    values, ids = found.top_lists()
    return [list(zip(row_ids, row, strict=True)) for row_ids, row in zip(ids, values, strict=True)]


def _finite(value: float) -> float:
    return value if value >= _LEAST else _LEAST

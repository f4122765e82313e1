"""Very long texts: their tokens, and what the tokenizer gets. test_tokenizer_manager.py has all other checks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fake_http import FakeScheduler, byte_tokenizer, make_manager

from tercet.managers.input_processor import InputProcessor
from tercet.srt.errors import PromptTooLong
from tercet.srt.text.tokenizer import Tokenizer

CONTEXT_LEN = 8192
LIMIT = CONTEXT_LEN - 1
WORD = "=" * 40
"""One token of 40 characters. Cut in two, it has 40 tokens."""


class WatchedTokenizer:
    """Records the lengths of the texts that it encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.lens: list[int] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.lens.append(len(text))
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def make_inputs(**settings: Any) -> tuple[InputProcessor, WatchedTokenizer]:
    manager = make_manager(FakeScheduler(), **settings)
    facts = msgspec.structs.replace(
        manager.facts, context_len=CONTEXT_LEN, max_total_num_tokens=10**6, max_req_input_len=LIMIT
    )
    tokenizer = WatchedTokenizer(byte_tokenizer(WORD))
    inputs = InputProcessor(manager.server_args, manager.model_config, None, facts)
    inputs.tokenizer = tokenizer  # type: ignore[assignment]
    return inputs, tokenizer


@pytest.mark.parametrize("num_words", [1700, 5000, LIMIT])
def test_a_long_text_that_fits_has_the_tokens_of_the_whole_text(num_words: int) -> None:
    inputs, tokenizer = make_inputs()
    ids = inputs.encode(WORD * num_words)
    assert ids == byte_tokenizer(WORD).encode(WORD * num_words)
    assert len(ids) == num_words
    assert tokenizer.lens[-1] == 40 * num_words
    assert max(tokenizer.lens[:-1]) <= 65_536


def test_a_text_with_far_too_many_tokens_is_refused_after_one_piece() -> None:
    inputs, tokenizer = make_inputs()
    with pytest.raises(PromptTooLong, match=f"more than {2 * LIMIT} tokens; at most {LIMIT} fit"):
        inputs.encode("x" * 2_000_000)
    assert tokenizer.lens == [65_536]


def test_a_text_of_usual_length_is_tokenised_once_and_counted_exactly() -> None:
    inputs, tokenizer = make_inputs()
    ids = inputs.encode("x" * 3 * LIMIT)
    with pytest.raises(PromptTooLong, match=f"has {3 * LIMIT} tokens; at most {LIMIT} fit"):
        inputs.check_ids(ids, is_text=True)
    assert tokenizer.lens == [3 * LIMIT]


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_request_says_whether_its_prompt_is_truncated(is_allowed: bool) -> None:
    inputs, tokenizer = make_inputs(allow_auto_truncate=is_allowed)
    with pytest.raises(PromptTooLong):
        inputs.encode("x" * 2_000_000, truncates=False)
    ids = inputs.encode("x" * 3_000_000 + "end", truncates=True)
    with pytest.raises(PromptTooLong):
        inputs.check_ids(ids, is_text=True, truncates=False)
    kept = inputs.check_ids(ids, is_text=True, truncates=True)
    assert len(kept) == LIMIT
    assert list(kept[-3:]) == byte_tokenizer(WORD).encode("end")
    assert tokenizer.lens == [65_536, 256 * CONTEXT_LEN]  # only the end of a very long text is tokenised


def test_a_text_that_will_be_truncated_is_not_counted() -> None:
    inputs, tokenizer = make_inputs(allow_auto_truncate=True)
    assert len(inputs.check_ids(inputs.encode("x" * 100_000), is_text=True)) == LIMIT
    assert tokenizer.lens == [100_000]

"""Prompts for fill in the middle: what is truncated, what is refused, and what ends the middle."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_http import BOS_TOKEN, CONTEXT_LEN, FIM, FakeScheduler, byte_tokenizer, make_manager, with_template
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from tercet.managers.fim_prompts import FimPrompts
from tercet.managers.input_processor import TOKENISE_OFF_LOOP_CHARS
from tercet.srt.errors import InvalidRequest, PromptTooLong, UnsupportedField
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.text.tokenizer import Tokenizer

PRE, SUF, MID, PAD = FIM["pre"], FIM["suf"], FIM["mid"], FIM["pad"]
LIMIT = CONTEXT_LEN - 1
lengths = st.integers(0, 2 * LIMIT)


def prompts(suffix: str, tokenizer: Tokenizer | None = None, **settings: Any) -> FimPrompts:
    manager = make_manager(FakeScheduler(), tokenizer=byte_tokenizer() if tokenizer is None else tokenizer, **settings)
    return FimPrompts(manager.inputs, suffix)


def ids_of(made: FimPrompts, prefix: str, *, add_special_tokens: bool = True) -> list[int]:
    return asyncio.run(made.ids(prefix, add_special_tokens=add_special_tokens))


def with_bos() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.backend.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS_TOKEN), ("<eos>", 256)]
    )
    return tokenizer


def test_the_parts_of_a_prompt() -> None:
    assert ids_of(prompts("b"), "a") == [PRE, 97, SUF, 98, MID]
    assert ids_of(prompts("b"), "") == [PRE, SUF, 98, MID]


def test_bos_comes_first_and_eos_does_not_end_the_prompt() -> None:
    assert ids_of(prompts("b", with_bos()), "a") == [BOS_TOKEN, PRE, 97, SUF, 98, MID]
    assert ids_of(prompts("b", with_bos()), "a", add_special_tokens=False) == [PRE, 97, SUF, 98, MID]


def test_the_texts_have_no_special_tokens() -> None:
    assert ids_of(prompts("<bos>"), "<eos>") == [PRE, *b"<eos>", SUF, *b"<bos>", MID]


@given(num_prefix=lengths, num_suffix=lengths, truncates=st.booleans(), has_bos=st.booleans())
def test_a_prompt_fits_or_the_error_names_what_is_too_long(
    num_prefix: int, num_suffix: int, truncates: bool, has_bos: bool
) -> None:
    tokenizer = with_bos() if has_bos else byte_tokenizer()
    made = prompts("b" * num_suffix, tokenizer, allow_auto_truncate=truncates)
    prefix = "start" * num_prefix
    prefix = prefix[len(prefix) - num_prefix :]
    room = LIMIT - has_bos - 3 - num_suffix
    if room < 0 or (num_prefix > room and not truncates):
        with pytest.raises(PromptTooLong) as raised:
            ids_of(made, prefix)
        assert raised.value.param == ("suffix" if room < 0 else "prompt")
    else:
        kept = prefix.encode()[max(0, num_prefix - room) :]
        start = [BOS_TOKEN] if has_bos else []
        assert ids_of(made, prefix) == [*start, PRE, *kept, SUF, *b"b" * num_suffix, MID]


@pytest.mark.parametrize("truncates", [True, False])
def test_texts_that_can_never_fit(truncates: bool) -> None:
    huge = "x" * 256 * (CONTEXT_LEN + 1)
    with pytest.raises(PromptTooLong, match="the suffix has") as raised:
        ids_of(prompts(huge, allow_auto_truncate=truncates), "a")
    assert raised.value.param == "suffix"
    if truncates:
        assert len(ids_of(prompts("b", allow_auto_truncate=True), huge)) == LIMIT
    else:
        with pytest.raises(PromptTooLong, match="the prompt has") as raised:
            ids_of(prompts("b"), huge)
        assert raised.value.param == "prompt"


def test_a_long_text_is_encoded_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    in_thread = []

    async def to_thread(work: Any) -> Any:
        in_thread.append(work)
        return work()

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    made = prompts("b" * (TOKENISE_OFF_LOOP_CHARS // 2), allow_auto_truncate=True)
    with pytest.raises(PromptTooLong):
        ids_of(made, "a" * (TOKENISE_OFF_LOOP_CHARS // 2 - 1))
    assert not in_thread
    with pytest.raises(PromptTooLong):
        ids_of(made, "a" * (TOKENISE_OFF_LOOP_CHARS // 2))
    assert len(in_thread) == 1


@pytest.mark.parametrize(("prefix", "suffix", "param"), [("\ud800", "b", None), ("a", "\ud800", "suffix")])
def test_invalid_unicode(prefix: str, suffix: str, param: str | None) -> None:
    with pytest.raises(InvalidRequest, match="valid Unicode") as raised:
        ids_of(prompts(suffix), prefix)
    assert raised.value.param == param


def test_the_tokens_of_fill_in_the_middle_end_it() -> None:
    made = prompts("b")
    assert made.sampling(SamplingParams()).stop_token_ids == [PRE, SUF, MID, PAD]
    assert made.sampling(SamplingParams(stop_token_ids=[9, PAD, 0])).stop_token_ids == [0, PRE, SUF, MID, PAD, 9]
    assert made.sampling(SamplingParams(ignore_eos=True)).stop_token_ids is None


def test_an_end_token_outside_of_the_vocabulary_is_left_out() -> None:
    made = prompts("b", byte_tokenizer("<|fim_pad|>"))
    assert made.sampling(SamplingParams()).stop_token_ids == [PRE, SUF, MID, PAD]


@pytest.mark.parametrize(
    "tokenizer",
    [with_template(""), byte_tokenizer("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")],
    ids=["without tokens", "tokens outside of the vocabulary"],
)
def test_a_model_without_such_tokens_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(UnsupportedField, match=r"tokens for fill in the middle.*this model has none") as raised:
        prompts("b", tokenizer)
    assert raised.value.param == "suffix"


def test_an_engine_without_a_tokenizer() -> None:
    with pytest.raises(InvalidRequest, match="skip-tokenizer-init") as raised:
        prompts("b", skip_tokenizer_init=True)
    assert raised.value.param == "suffix"

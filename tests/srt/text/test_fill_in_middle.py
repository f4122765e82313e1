"""Prompts for fill in the middle: the tokens of each family, their order, and texts that spell special tokens."""

from __future__ import annotations

import pytest
from fake_http import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_samples import as_tokenizer, byte_level_tokenizer, sentencepiece_tokenizer, texts

from tercet.srt.text.fill_in_middle import find_fim_format
from tercet.srt.text.tokenizer import Tokenizer

SPACE = "\u2581"
FAMILIES = {
    "qwen": (
        ["<|fim_prefix|>", "A", "<|fim_suffix|>", "B", "<|fim_middle|>"],
        ["<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|endoftext|>"],
    ),
    "granite": (
        ["<fim_prefix>", "A", "<fim_suffix>", "B", "<fim_middle>"],
        ["<fim_pad>", "<filename>", "<reponame>", "<|endoftext|>"],
    ),
    "starcoder": (["<fim_prefix>", "A", "<fim_suffix>", "B", "<fim_middle>"], ["<file_sep>", "<repo_name>"]),
    "deepseek": (["<｜fim▁begin｜>", "A", "<｜fim▁hole｜>", "B", "<｜fim▁end｜>"], []),
    "codellama": (["▁<PRE>", "A", "▁<SUF>", "B", "▁<MID>"], ["▁<EOT>"]),
    "seed": (["<[fim-suffix]>", "B", "<[fim-prefix]>", "A", "<[fim-middle]>"], []),
    "codestral": (["[SUFFIX]", "B", "[PREFIX]", "A"], ["[MIDDLE]"]),
}
"""The prompt of each family for the prefix A and the suffix B, as its authors write it, and other tokens that end the
middle."""


def with_tokens(*added: str, special: bool = True) -> Tokenizer:
    """A tokenizer of bytes with these tokens."""
    backend = byte_tokenizer().backend
    (backend.add_special_tokens if special else backend.add_tokens)(list(added))
    return as_tokenizer(backend)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_of_a_family(family: str, special: bool) -> None:
    prompt, ends = FAMILIES[family]
    marks = [part for part in prompt if part not in "AB"]
    tokenizer = with_tokens(*ends, *marks, "<other>", special=special)
    fim = tokenizer.fim
    assert fim is not None
    ids = {text: tokenizer.token_to_id(text) for text in (*marks, *ends)}
    assert fim.prompt([*b"A"], [*b"B"]) == [ids.get(part, ord(part[0])) for part in prompt]
    assert sorted(fim.mark_ids) == sorted(ids[mark] for mark in marks)
    assert fim.end_ids == set(ids.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokenizer_that_lacks_a_token_has_no_format(family: str) -> None:
    prompt, ends = FAMILIES[family]
    marks = [part for part in prompt if part not in "AB"]
    for missing in marks:
        assert with_tokens(*(mark for mark in marks if mark != missing), *ends).fim is None
    assert with_tokens("<|fim_prefix|>", "<fim_suffix>", "<|fim_middle|>").fim is None, "of two families"


def test_tokens_that_the_file_names() -> None:
    backend = byte_tokenizer().backend
    named = {"pre": 5, "suf": 6, "mid": 7}
    fim = find_fim_format(backend, {**named, "sep": 8})
    assert fim is not None
    assert fim.prompt([97], [98]) == [5, 97, 6, 98, 7]
    assert fim.end_ids == {5, 6, 7, 8}
    for name in named:
        assert find_fim_format(backend, {key: value for key, value in named.items() if key != name}) is None


def test_a_known_family_decides_on_the_order() -> None:
    tokenizer = with_tokens("[PREFIX]", "[SUFFIX]")
    fim = find_fim_format(tokenizer.backend, {"pre": 1, "suf": 2, "mid": 3})
    assert fim is not None and fim.suffix_first and fim.prefix_id == tokenizer.token_to_id("[PREFIX]")


MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|end|>", "<｜bar｜>", "<eos>", "<s>")


def samples() -> dict[str, Tokenizer]:
    """Tokenizers that add no space and that add one, with tokens of MARKS."""
    byte_level, sentencepiece = byte_level_tokenizer().backend, sentencepiece_tokenizer().backend
    made = {}
    for name, backend in {"byte level": byte_level, "sentencepiece": sentencepiece}.items():
        copy = type(backend).from_str(backend.to_str())
        copy.add_tokens(list(MARKS[:4]))  # Qwen's files do not call these special
        made[name] = as_tokenizer(copy)
    return made


SAMPLES = samples()
spelt = st.one_of(texts, st.lists(st.sampled_from([*MARKS, "<", "<|", "|>", " ", "x", ""])).map("".join))


@pytest.mark.parametrize("name", SAMPLES)
@given(prefix=spelt, suffix=spelt)
def test_texts_stay_as_they_are(name: str, prefix: str, suffix: str) -> None:
    tokenizer = SAMPLES[name]
    prefix, suffix = prefix.replace(SPACE, " "), suffix.replace(SPACE, " ")  # the same in sentencepiece
    ids = tokenizer.encode_literally(prefix, is_start=True) + tokenizer.encode_literally(suffix, is_start=False)
    if prefix:
        assert tokenizer.decode(ids, skip_special_tokens=False) == prefix + suffix
    special = tokenizer.special_ids | {token for token in map(tokenizer.token_to_id, MARKS) if token is not None}
    assert not special & set(ids)


@pytest.mark.parametrize("name", SAMPLES)
@given(text=texts)
def test_a_text_without_special_tokens_is_encoded_as_always(name: str, text: str) -> None:
    tokenizer = SAMPLES[name]
    if not any(mark in text for mark in MARKS):
        assert tokenizer.encode_literally(text, is_start=True) == tokenizer.encode(text, add_special_tokens=False)


def test_only_the_start_of_a_document_gets_a_space() -> None:
    tokenizer = sentencepiece_tokenizer()
    assert tokenizer.encode_literally("cat", is_start=True) == tokenizer.encode("cat", add_special_tokens=False)
    words = [tokenizer.id_to_token(token) for token in tokenizer.encode_literally("cat", is_start=False)]
    assert words == ["c", "a", "t"]
    assert tokenizer.encode_literally("", is_start=False) == []

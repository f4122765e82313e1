from __future__ import annotations

import codecs
import itertools

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer_samples import (
    SENTENCEPIECE_DECODERS,
    TEXTS,
    as_tokenizer,
    byte_level_tokenizer,
    default_tokenizer,
    sentencepiece_tokenizer,
    texts,
    unigram_tokenizer,
    wordpiece_tokenizer,
)

from tercet.managers.incremental_decode import IncrementalDecoder


def pieces(ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(places)]


def decode(tokenizer, ids: list[int], cuts: list[int], skip: bool = True) -> str:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    return "".join(decoder.push(piece) for piece in pieces(ids, cuts)) + decoder.finish()


cut_places = st.lists(st.integers(0, 100), max_size=20)


@pytest.mark.parametrize("get_tokenizer", [byte_level_tokenizer, default_tokenizer])
@given(data=st.data(), cuts=cut_places, skip=st.booleans())
@settings(max_examples=300)
def test_random_ids_in_random_pieces_are_the_tokenizers_own_text(get_tokenizer, data, cuts, skip):
    tokenizer = get_tokenizer()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=60))
    assert decode(tokenizer, ids, cuts, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.lists(st.integers(0, 255), max_size=40), cuts=cut_places)
@settings(max_examples=500)
def test_random_bytes_become_as_many_replacement_characters(data, cuts):
    tokenizer = byte_level_tokenizer()
    single = {tokenizer.token_bytes[token]: token for token in range(2, tokenizer.vocab_size)}
    ids = [single[bytes([byte])] for byte in data]
    assert decode(tokenizer, ids, cuts) == tokenizer.decode(ids) == bytes(data).decode("utf-8", "replace")


@pytest.mark.parametrize("get_tokenizer", [byte_level_tokenizer, default_tokenizer, wordpiece_tokenizer])
@given(text=texts)
def test_valid_text_never_shows_half_a_character(get_tokenizer, text):
    tokenizer = get_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
    shown = ""
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    for token in ids:
        shown += decoder.push([token])
        assert whole.startswith(shown)
    assert shown + decoder.finish() == whole


def test_a_character_of_four_tokens_comes_whole_with_its_last():
    tokenizer = byte_level_tokenizer()
    single = {tokenizer.token_bytes[token]: token for token in range(2, tokenizer.vocab_size)}
    decoder = IncrementalDecoder(tokenizer)
    seen = [decoder.push([single[bytes([byte])]]) for byte in "😺".encode()]
    assert seen == ["", "", "", "😺"]
    assert decoder.push([single[b"\xf0"], single[b"\x9f"]]) == ""
    assert decoder.finish() == "\ufffd"


@pytest.mark.parametrize("decoder", SENTENCEPIECE_DECODERS)
@given(text=st.text("abct éhe.😺日", max_size=30), prompt=st.sampled_from(["a", "the cat"]), cuts=cut_places)
@example(" cat", "the cat", [])
@example("😺😺😺", "a", list(range(20)))
def test_sentencepiece_text_continues_its_prompt(decoder, text, prompt, cuts):
    tokenizer = sentencepiece_tokenizer(decoder)
    start = tokenizer.encode(prompt)
    whole = tokenizer.encode(prompt + text)
    assert whole[: len(start)] == start, "the vocabulary merges nothing but spaces"
    assert prompt + decode(tokenizer, whole[len(start) :], cuts) == prompt + text


@given(text=texts, cuts=cut_places)
def test_unigram_text_continues_its_prompt(text, cuts):
    tokenizer = unigram_tokenizer()
    start = tokenizer.encode("The")
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*start, *ids]) == "The" + decode(tokenizer, ids, cuts)


def test_a_tokenizer_without_byte_tokens_has_text_that_looks_like_one():
    backend = tokenizers.Tokenizer.from_str(unigram_tokenizer().backend.to_str())
    backend.add_tokens(["<0x41>"])
    tokenizer = as_tokenizer(backend)
    token = tokenizer.token_to_id("<0x41>")
    assert decode(tokenizer, [token], []) == tokenizer.decode([token]) == "<0x41>"


def test_sentencepiece_bytes_that_are_no_text_do_not_wait():
    tokenizer = sentencepiece_tokenizer()
    byte = {value: 3 + value for value in range(256)}
    decoder = IncrementalDecoder(tokenizer)
    assert decoder.push([byte[0xE6], byte[0x97]]) == ""
    assert decoder.push([byte[0xA5]]) == "日"
    assert decoder.push([byte[0xFF]] * 3) == "\ufffd" * 3
    assert decoder.push([2, 1]) == "", "special tokens"
    assert IncrementalDecoder(tokenizer, skip_special_tokens=False).push([2]) == "</s>"


@pytest.mark.parametrize("text", TEXTS)
def test_other_decoders_show_all_of_a_text(text):
    tokenizer = wordpiece_tokenizer()
    assert tokenizer.token_bytes is None
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert decode(tokenizer, ids, list(range(0, 100, 3))) == tokenizer.decode(ids)


def test_other_decoders_hide_and_show_special_tokens():
    tokenizer = wordpiece_tokenizer()
    end, unknown = tokenizer.token_to_id("</s>"), tokenizer.token_to_id("[UNK]")
    the, in_word = tokenizer.encode("the hello", add_special_tokens=False)[:2]
    ids = [the, *[end] * 20, unknown, in_word]
    for skip in (True, False):
        assert decode(tokenizer, ids, list(range(40)), skip) == tokenizer.decode(ids, skip_special_tokens=skip)
    shows = IncrementalDecoder(tokenizer, shown=[unknown])
    assert shows.push(ids) + shows.finish() == tokenizer.decode([the, unknown, in_word], skip_special_tokens=False)


class CountingTokenizer:
    """A tokenizer whose text never becomes valid, and which counts the ids that it was given to decode."""

    token_bytes = None
    special_ids = frozenset()

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(ids)
        return "\ufffd" * len(ids)


class ByteTokenizer:
    """A tokenizer whose tokens are bytes, and which does not say so."""

    token_bytes = None
    special_ids = frozenset()

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", "replace")


# Stray bytes, and then the beginnings of characters that are completed later.
broken = st.lists(st.sampled_from([0x80, 0xC2, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x99, 0x41]), max_size=30).map(bytes)


@example(b"\x80" * 5 + b"\xc2\xa9ok")
@given(data=st.one_of(texts.map(str.encode), st.binary(max_size=30), broken))
def test_other_decoders_hold_back_incomplete_characters_and_nothing_else(data):
    decoder = IncrementalDecoder(ByteTokenizer())
    bytewise = codecs.getincrementaldecoder("utf-8")("replace")
    shown = expected = ""
    for byte in data:
        shown += decoder.push([byte])
        expected += bytewise.decode(bytes([byte]))
        assert expected.startswith(shown)
        if not expected.endswith("\ufffd"):
            assert shown == expected
        assert decoder.holds_back() or shown == expected
    assert shown + decoder.finish() == data.decode("utf-8", "replace")


def test_work_stays_linear_when_ids_never_form_text():
    tokenizer = CountingTokenizer()
    decoder = IncrementalDecoder(tokenizer)
    shown = "".join(decoder.push([token]) for token in range(5000))
    assert 5000 - 6 <= len(shown) <= 5000
    assert shown + decoder.finish() == "\ufffd" * 5000
    assert tokenizer.num_decoded < 5000 * 25

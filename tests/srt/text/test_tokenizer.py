"""The default model's tokenizer against transformers', and what a Tokenizer does around the library."""

from __future__ import annotations

import functools
import os
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_samples import TEXTS, default_gguf, default_tokenizer, sentencepiece_tokenizer, texts
from tokenizers import Regex, pre_tokenizers

from tercet.srt.errors import InvalidRequest
from tercet.srt.text.tokenizer import Tokenizer, load_tokenizer
from tercet.srt.text.tokenizer_parts import TokenizerParts


@functools.cache
def transformers_tokenizer():
    """What transformers makes of the same file. It takes no notice of the file's pre-tokenizer "smollm" and cuts as
    GPT-2 does; the model's own tokenizer.json, like llama.cpp, sets every digit apart first."""
    from transformers import AutoTokenizer

    path = default_gguf()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@functools.cache
def reference():
    tokenizer = transformers_tokenizer()
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return backend


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_on_a_corpus(text):
    ids = default_tokenizer().encode(text)
    assert ids == reference().encode(text).ids
    for skip in (True, False):
        assert default_tokenizer().decode(ids, skip_special_tokens=skip) == transformers_tokenizer().decode(
            ids, skip_special_tokens=skip
        )


@given(text=texts)
@settings(max_examples=1000)
def test_ids_on_any_text(text):
    ids = default_tokenizer().encode(text)
    assert ids == reference().encode(text).ids
    if not any(character.isnumeric() for character in text):
        assert ids == transformers_tokenizer().encode(text)


@given(ids=st.lists(st.integers(0, 49_151), max_size=40), skip=st.booleans())
def test_text_of_any_ids(ids, skip):
    assert default_tokenizer().decode(ids, skip_special_tokens=skip) == transformers_tokenizer().decode(
        ids, skip_special_tokens=skip
    )


def test_digits_stand_apart_from_the_spaces_before_them():
    tokenizer = default_tokenizer()
    assert [tokenizer.id_to_token(token) for token in tokenizer.encode("a    12")] == ["a", "ĠĠĠĠ", "1", "2"]


def test_what_the_default_model_says_of_itself():
    tokenizer, other = default_tokenizer(), transformers_tokenizer()
    assert tokenizer.vocab_size == len(other) == 49152
    assert tokenizer.eos_token_ids == {other.eos_token_id} == {2}
    assert tokenizer.bos_token_id == other.bos_token_id == 1
    assert tokenizer.special_ids == set(other.added_tokens_decoder) == set(range(17))
    assert tokenizer.special_tokens == other.special_tokens_map
    assert tokenizer.encode("x") == tokenizer.encode("x", add_special_tokens=False), "the model wants no BOS"
    assert tokenizer.id_to_token(2) == "<|im_end|>" and tokenizer.id_to_token(99_999_999) is None


def test_chats_of_the_default_model():
    tokenizer, other = default_tokenizer(), transformers_tokenizer()
    chats = [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello "},
            {"role": "user", "content": "?"},
        ],
    ]
    for chat in chats:
        for prompt in (True, False):
            expected = other.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            assert tokenizer.apply_chat_template(chat, add_generation_prompt=prompt) == expected
            assert tokenizer.encode(expected) == other.encode(expected)
        expected = other.apply_chat_template(chat, tokenize=False, continue_final_message=True)
        got = tokenizer.apply_chat_template(chat, add_generation_prompt=False, continue_final_message=True)
        assert got == expected


@pytest.mark.parametrize("bad", ["\ud800", "fine until \udfff here", "\udc80" * 3])
def test_lone_surrogates_are_the_clients_mistake(bad):
    tokenizer = default_tokenizer()
    with pytest.raises(InvalidRequest, match="lone surrogate") as caught:
        tokenizer.encode(bad)
    assert str(caught.value).isascii(), "the message itself can be sent"
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        tokenizer.encode_batch(["good", bad])


@pytest.mark.parametrize("length", [36, 30_000])
def test_a_text_that_needs_too_many_steps_is_the_clients_mistake(length):
    backend = type(default_tokenizer().backend).from_str(default_tokenizer().backend.to_str())
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")  # exponential in a run of "a"
    tokenizer = Tokenizer(TokenizerParts(backend, {}, frozenset(), {}))
    bad = "a" * length + "b"
    with pytest.raises(InvalidRequest, match=f"too many steps for a text, got {length + 1:,} characters"):
        tokenizer.encode(bad)
    with pytest.raises(InvalidRequest, match="too many steps"):
        tokenizer.encode_batch(["good", bad])
    assert tokenizer.encode("good"), "the next text is not affected"


def test_another_panic_of_the_library_is_an_exception():
    class PanicException(BaseException):
        pass

    def panic(*_, **__):
        raise PanicException("index out of bounds")

    tokenizer = Tokenizer(TokenizerParts(default_tokenizer().backend, {}, frozenset(), {}))
    tokenizer.backend = SimpleNamespace(encode=panic, encode_batch_fast=panic)
    for text in ("short", "long" * 10_000):
        with pytest.raises(RuntimeError, match="the tokenizer failed: index out of bounds"):
            tokenizer.encode(text)


def test_batches_are_single_texts():
    tokenizer = default_tokenizer()
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.encode_batch([]) == []


def test_ids_out_of_range():
    tokenizer = default_tokenizer()
    assert tokenizer.decode([49_152, 10_000_000]) == ""
    for bad in (-1, 2**32):
        with pytest.raises(InvalidRequest, match="token ids"):
            tokenizer.decode([bad])


def test_files_cannot_truncate_or_pad_prompts():
    backend = sentencepiece_tokenizer().backend
    limited = type(backend).from_str(backend.to_str())
    limited.enable_truncation(2)
    limited.enable_padding(length=50)
    tokenizer = Tokenizer(TokenizerParts(limited, {}, frozenset(), {}))
    assert tokenizer.encode("the cat sat") == sentencepiece_tokenizer().encode("the cat sat")
    assert len(tokenizer.encode("the cat sat")) > 2


def test_a_template_of_the_operator(tmp_path):
    path = str(default_gguf())
    file = tmp_path / "template.jinja"
    file.write_text("{{ eos_token }}{{ messages[0].content }}é")
    chat = [{"role": "user", "content": "Hi"}]
    for template in (str(file), file.read_text()):
        assert load_tokenizer(path, chat_template=template).apply_chat_template(chat) == "<|im_end|>Hié"
    with pytest.raises(ValueError, match=r"got '.*absent\.jinja' \(No such file or directory\)"):
        load_tokenizer(path, chat_template=str(tmp_path / "absent.jinja"))
    with pytest.raises(ValueError, match="line 2"):
        load_tokenizer(path, chat_template="\n{% if %}")
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"template\.jinja' must be text in UTF-8"):
        load_tokenizer(path, chat_template=str(file))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ValueError, match=r"template\.jinja' must be a regular file"):
        load_tokenizer(path, chat_template=str(file))
    file.unlink()
    file.symlink_to("gone")
    with pytest.raises(ValueError, match=r"\('.*template\.jinja' is a link to a missing file, 'gone'\)"):
        load_tokenizer(path, chat_template=str(file))


def test_no_chat_template_is_said():
    tokenizer = sentencepiece_tokenizer()
    assert tokenizer.chat_template_source is None
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_nothing_to_load_is_a_value_error(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(ValueError, match="cannot load a tokenizer") as error:
            load_tokenizer(str(path))
        assert ("which has no tokenizer.json" in str(error.value)) == path.exists()
        assert ("which does not exist" in str(error.value)) != path.exists()
        assert "\n" not in str(error.value), "an error is one line of a log"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"cannot read .*tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_a_config_alone_is_no_tokenizer(tmp_path, model_type):
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    with pytest.raises(ValueError, match="no tokens besides special ones"):
        load_tokenizer(str(tmp_path))


def turns_of_others(work):
    """How often another thread gets to run while `work` does."""
    turns = 0
    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        time.sleep(0)
        turns += 1
    return turns


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_long_work_lets_other_threads_go_on(work):
    """The library's calls for a single text keep Python's lock: one turn before, one behind."""
    tokenizer = default_tokenizer()
    long = "a b " * 100_000 if work == "encode" else [100] * 1_000_000
    assert turns_of_others(lambda: getattr(tokenizer, work)(long)) > 100


def test_long_texts_have_the_same_ids_and_back():
    tokenizer = default_tokenizer()
    text = "".join(TEXTS) * (20_000 // len("".join(TEXTS)) + 1)
    ids = tokenizer.encode(text)
    assert ids == tokenizer.backend.encode(text).ids
    assert tokenizer.decode(ids * 3, skip_special_tokens=False) == tokenizer.backend.decode(
        ids * 3, skip_special_tokens=False
    )
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        tokenizer.encode(text + "\ud800")
    with pytest.raises(InvalidRequest, match="token ids"):
        tokenizer.decode([*ids * 3, -1])

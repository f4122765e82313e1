"""Texts and small tokenizers for the tests of the tokenizer and of the detokenizer."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from tercet.srt.model_files.default_model import find_default_model
from tercet.srt.text.tokenizer import Tokenizer, load_tokenizer
from tercet.srt.text.tokenizer_parts import TokenizerParts

TEXTS = (
    "",
    " ",
    "Hello world",
    "  two leading and trailing  ",
    "The year 2024, pi = 3.14159, and 1,000,000.",
    "if x:\n    y  =  12\n\t\treturn y, 0x1F # comment\n",
    "x\n\n\n 1\n  2\n   3",
    "it's we'll THEY'RE I'd can't 'quoted' o'clock",
    "Ünïcödé café naïve façade Å e\u0301 n\u0303",
    "Привет, мир! Как дела? Ελληνικά κείμενο",
    "你好，世界！今天天气很好。日本語のテキストと漢字かな交じり文。한국어 문장입니다.",
    "مرحبا بالعالم ٣٤٥ שלום עולם हिन्दी १२३ ภาษาไทย",
    "👍🏽 👩‍👩‍👧‍👦 🇩🇪 ❤️ 😀😀😀",
    "½ ² ³ Ⅷ ① ٣",
    "\u00a0nbsp\u2003em\u3000ideographic\u200bzero\ufeffbom",
    "tab\tnewline\ncr\r\ncrlf\x00nul\x7fdel\x1besc",
    "<|im_start|>system\nYou are<|im_end|>\n<|im_start|>user\n",
    "a<|im_end|>b <|im_end|> c<|endoftext|><repo_name><|im_",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * 2.5e-3f; } // ok?",
    '{"key": ["value", 1, null, true], "nested": {"a": "\\u00e9"}}',
    "https://example.org/path?q=1&r=%20#frag user@example.org",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "a" * 3000 + " " * 3000 + "\n" * 300 + "1" * 300,
)

_FRAGMENTS = (
    " ", "  ", "\n", "\t", "\r\n", "1", "23", "٣", "½", "'s", "'LL", "the", " The", "fooBar", "é", "e\u0301", "中文",
    "👍🏽", "\u00a0", "<|im_end|>", "<|im_start|>", ".", "...", "!?", "_", "$", "`", "<s>", "▁", "<0x41>", "／",
)  # fmt: skip

texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    st.lists(st.sampled_from(_FRAGMENTS), max_size=14).map("".join),
)
"""Any Unicode text, and texts of the characters that tokenizers treat differently."""


def default_gguf() -> Path:
    path = find_default_model()
    if path is None:
        pytest.skip("the default model is not installed")
    return path


@functools.cache
def default_tokenizer() -> Tokenizer:
    return load_tokenizer(str(default_gguf()))


def as_tokenizer(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(TokenizerParts(backend, {}, frozenset(), {}))


def train(
    *, decoder: decoders.Decoder, pre_tokenizer: pre_tokenizers.PreTokenizer, special: tuple[str, ...] = (), **bpe: bool
) -> tokenizers.Tokenizer:
    """A small BPE tokenizer, trained on TEXTS."""
    backend = tokenizers.Tokenizer(models.BPE(**bpe))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoder
    byte_level = isinstance(decoder, decoders.ByteLevel)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if byte_level else [],
        show_progress=False,
    )
    backend.train_from_iterator([*TEXTS, *TEXTS], trainer)
    return backend


@functools.cache
def byte_level_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with every byte in its vocabulary, and with both kinds of special tokens."""
    backend = train(
        decoder=decoders.ByteLevel(),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        special=("<|end|>", "<｜bar｜>"),
    )
    backend.add_tokens(["<plain▁added>"])
    return as_tokenizer(backend)


SENTENCEPIECE_DECODERS = {
    "llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "bytes_then_metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "metaspace_then_bytes": decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()]),
}
"""The decoders of sentencepiece with byte fallback."""


@functools.cache
def sentencepiece_tokenizer(decoder: str = "llama") -> Tokenizer:
    """A tokenizer like that of Llama 2: U+2581 for a space, and byte tokens for characters without a token."""
    words = ["▁", "▁the", "▁cat", "s", "▁▁", "a", "b", "c", "t", "é", "h", "e", "."]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    vocab.update({word: 259 + index for index, word in enumerate(words)})
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "▁")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = SENTENCEPIECE_DECODERS[decoder]
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return as_tokenizer(backend)


@functools.cache
def unigram_tokenizer() -> Tokenizer:
    """Sentencepiece's other model, without byte fallback, as `transformers` converts it by default."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=["<unk>", "</s>"], show_progress=False
    )
    backend.train_from_iterator([text for text in TEXTS if len(text) < 1000] * 2, trainer)
    return as_tokenizer(backend)


@functools.cache
def wordpiece_tokenizer() -> Tokenizer:
    """A tokenizer whose decoder does more than join bytes."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=["[UNK]", "</s>"], show_progress=False)
    backend.train_from_iterator([*TEXTS, *TEXTS], trainer)
    return as_tokenizer(backend)

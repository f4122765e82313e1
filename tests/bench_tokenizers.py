"""Small tokenizers for tests of benchmarks. Each makes prompts of an exact length difficult in another way."""

from __future__ import annotations

import functools

import tokenizers
from fake_http import byte_tokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tercet.benchmarks.workloads import BUNDLED_TEXT
from tercet.srt.text.tokenizer import Tokenizer
from tercet.srt.text.tokenizer_parts import TokenizerParts


@functools.cache
def bytes_only() -> Tokenizer:
    """A tokenizer whose token i is byte i. Most tokens are not valid text alone."""
    return byte_tokenizer()


@functools.cache
def merging(with_bos: bool = False) -> Tokenizer:
    """Byte-level BPE with 1,200 tokens. Random neighbours often merge when their text is encoded again."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([BUNDLED_TEXT.read_text(encoding="utf-8")[:40_000]], trainer)
    if with_bos:
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return Tokenizer(TokenizerParts(backend, {"bos_token": "<bos>", "eos_token": "<eos>"}, frozenset({1}), {}))

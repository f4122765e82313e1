"""Build the tokenizer that a GGUF file describes by its metadata.

The file holds the vocabulary, the merges or scores, and the name of the way in which text is cut before merging
("pre-tokenizer"). What those names mean is defined by llama.cpp (`llama-vocab.cpp`), the format's home; the patterns
below are those of the models' own tokenizer.json files, of which llama.cpp's are transcriptions.

Where `transformers` reads the same file differently, llama.cpp and the models' own tokenizers are followed: it knows
no digit splitting ("smollm", "starcoder", ...), no `ignore_merges`, leaves out control tokens with characters beyond
the byte-level alphabet, and puts sentencepiece's space mark only at the very start of a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from .gguf_file import GGUFFile
from .gguf_pre_tokenizers import MERGES_ARE_OPTIONAL, PRE_TOKENIZERS, STARTS_WITH_BOS
from .tokenizer_parts import TokenizerParts

_KEY = "tokenizer.ggml."
_SPACE_MARK = "\u2581"
# Values of `token_type`
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_NAMED_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # the format's spelling
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ALWAYS_SPECIAL = ("bos_token_id", *_END_IDS)


def read_gguf_tokenizer(path: Path) -> TokenizerParts:
    """ValueError when the file has no tokenizer or one of a kind that is not supported."""
    metadata: Mapping[str, Any] = GGUFFile(path).metadata
    kind = metadata.get(_KEY + "model")
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if kind not in builders:
        raise ValueError(f"{path} has a tokenizer of model {kind!r}; supported are {', '.join(sorted(builders))}")
    missing = [name for name in ("tokens", "token_type") if _KEY + name not in metadata]
    if missing:
        raise ValueError(f"{path} has no {_KEY}{missing[0]}")
    # llama.cpp gives an empty token a name, so that ids and texts stay one to one.
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(metadata[_KEY + "tokens"])]
    backend = builders[kind](path, metadata, tokens)
    ids = {key: int(value) for key, value in _ids(metadata).items() if 0 <= value < len(tokens)}
    _add_special_tokens(backend, tokens, metadata[_KEY + "token_type"], ids)
    _add_bos_and_eos(backend, metadata, tokens, ids)
    return TokenizerParts(
        backend=backend,
        special_tokens={name: tokens[ids[key]] for name, key in _NAMED_IDS.items() if key in ids},
        eos_token_ids=frozenset(ids[key] for key in _END_IDS if key in ids),
        chat_templates=_chat_templates(metadata),
    )


def _byte_level_bpe(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    name = metadata.get(_KEY + "pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ValueError(f"{path} names the pre-tokenizer {name!r}; supported are {', '.join(sorted(PRE_TOKENIZERS))}")
    if _KEY + "merges" not in metadata:
        raise ValueError(f"{path} has no {_KEY}merges")
    # The first character may itself be a space: only what follows it can be the separator.
    merges = [
        (merge[0] + left, right) for merge in metadata[_KEY + "merges"] for left, _, right in [merge[1:].partition(" ")]
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=name in MERGES_ARE_OPTIONAL,
        )
    )
    backend.pre_tokenizer = PRE_TOKENIZERS[name]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    if _KEY + "scores" not in metadata:
        raise ValueError(f"{path} has no {_KEY}scores")
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = metadata.get(_KEY + "unknown_token_id", 0)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_by_score(vocab, metadata[_KEY + "scores"].tolist()),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    marks_start = bool(metadata.get(_KEY + "add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE_MARK)
    decode = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if marks_start:
        # As in sentencepiece and llama.cpp: at the start, and again behind every special token.
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), spaces])
        backend.decoder = decoders.Sequence([*decode, decoders.Strip(content=" ", left=1)])
    else:
        backend.normalizer = spaces
        backend.decoder = decoders.Sequence(decode)
    return backend


def merges_by_score(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that sentencepiece's greedy algorithm makes: two neighbours whose union is a token, best score first.

    Every way to cut a token in two tokens is one. Ties go as in `transformers`: long left parts first.
    """
    found = [
        (-scores[index], -cut, token[:cut], token[cut:])
        for token, index in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    found.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in found]


def _ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    keys = {*_NAMED_IDS.values(), *_END_IDS}
    ids = {key: metadata[_KEY + key] for key in keys if _KEY + key in metadata}
    if metadata[_KEY + "model"] == "llama":
        # What llama.cpp assumes where the file is silent.
        ids = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **ids}
    return ids


def _add_special_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: Any, ids: Mapping[str, int]) -> None:
    """Control tokens and the named ones are special; user-defined ones are only matched whole."""
    # Some files name an ordinary token for padding, which must stay one.
    named = {index for key, index in ids.items() if key in _ALWAYS_SPECIAL or types[index] != _NORMAL}
    special = named.union((types == _CONTROL).nonzero()[0].tolist())
    plain = sorted(set((types == _USER_DEFINED).nonzero()[0].tolist()) - special)
    backend.add_special_tokens([AddedToken(tokens[index], normalized=False, special=True) for index in sorted(special)])
    backend.add_tokens([AddedToken(tokens[index], normalized=False, special=False) for index in plain])


def _add_bos_and_eos(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: list[str], ids: Mapping[str, int]
) -> None:
    starts_with_bos = metadata[_KEY + "model"] == "llama" or metadata.get(_KEY + "pre") in STARTS_WITH_BOS
    bos = eos = None
    if metadata.get(_KEY + "add_bos_token", starts_with_bos):
        bos = ids.get("bos_token_id")
    if metadata.get(_KEY + "add_eos_token", False):
        eos = ids.get("eos_token_id")
    added = {tokens[index]: index for index in (bos, eos) if index is not None}
    if added:
        start = [] if bos is None else [tokens[bos]]
        end = [] if eos is None else [tokens[eos]]
        backend.post_processor = processors.TemplateProcessing(
            single=[*start, "$A", *end],
            pair=[*start, "$A", *end, *start, "$B", *end],
            special_tokens=list(added.items()),
        )


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {}
    if "tokenizer.chat_template" in metadata:
        templates["default"] = metadata["tokenizer.chat_template"]
    for name in metadata.get("tokenizer.chat_templates", ()):
        if f"tokenizer.chat_template.{name}" in metadata:
            templates[name] = metadata[f"tokenizer.chat_template.{name}"]
    return templates

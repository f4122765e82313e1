"""The reader of tokenizers in GGUF files.

The metadata of a file holds the vocabulary, the merges or scores, and the name of the pre-tokenizer, which splits text
before merging (gguf_pre_tokenizers.py).

`transformers` reads some files differently: it has no digit splitting ("smollm", "starcoder", ...) and no
`ignore_merges`, drops control tokens with characters outside the byte-level alphabet, and adds sentencepiece's space
mark only at the start of a text. In these cases this reader follows llama.cpp and the models' own tokenizers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from ..model_files.gguf_model import open_first_part
from ..model_files.settings import Settings, quote
from .fill_in_middle import NAMED_IDS
from .gguf_pre_tokenizers import MERGES_ARE_OPTIONAL, PRE_TOKENIZERS, STARTS_WITH_BOS
from .tokenizer_parts import TokenizerParts

_KEY = "tokenizer.ggml."
_SPACE_MARK = "\u2581"
# Values of `token_type`.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_NAMED_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelt like this in the format
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
_FIM_KEYS = {
    "prefix_token_id": "pre",
    "suffix_token_id": "suf",
    "middle_token_id": "mid",
    **{f"fim_{name}_token_id": name for name in NAMED_IDS},
}
"""The keys of the tokens for fill in the middle. Those of older files come first: the new ones go before them."""
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ALWAYS_SPECIAL = ("bos_token_id", *_END_IDS)
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""The control tokens that end a turn in files that do not name one."""
_TURN_MARKS_OF_GEMMA = ("<start_of_turn>", "<end_of_turn>")
"""Control tokens. Some files give them the type of ordinary tokens, such as Google's own and some of Unsloth's."""
_HARMONY_ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")
"""Those of GPT-OSS, in which <|end|> ends one of several messages. A file names only the first one."""


def read_gguf_tokenizer(path: Path) -> TokenizerParts:
    """Read the tokenizer of a GGUF file, or of the first part of a split one.

    Raises ValueError if it is missing, not supported or not valid.
    """
    metadata = open_first_part(path).metadata
    try:
        return _build(Settings("metadata", metadata))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _build(metadata: Settings) -> TokenizerParts:
    kind = metadata.text(_KEY + "model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer model {kind!r} is not supported; supported: gpt2, llama")
    # As in llama.cpp, an empty token gets a name, so that each id has a text of its own.
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(_strings(metadata, "tokens"))]
    types = _numbers(metadata, "token_type", len(tokens))
    if _is_gemma(metadata):
        types = np.where([token in _TURN_MARKS_OF_GEMMA for token in tokens], _CONTROL, types)
    ids = _ids(metadata, is_llama=kind == "llama", num_tokens=len(tokens))
    ends_by_text: frozenset[int] = frozenset() if _KEY + "eot_token_id" in metadata else _turn_ends(tokens, types)
    backend = _byte_level_bpe(metadata, tokens) if kind == "gpt2" else _sentencepiece_bpe(metadata, tokens, ids)
    _add_special_tokens(backend, tokens, types, ids)
    _add_bos_and_eos(backend, metadata, tokens, ids)
    return TokenizerParts(
        backend=backend,
        special_tokens={name: tokens[ids[key]] for name, key in _NAMED_IDS.items() if key in ids},
        eos_token_ids=frozenset(ids[key] for key in _END_IDS if key in ids) | ends_by_text,
        chat_templates=_chat_templates(metadata),
        fim_ids=_fim_ids(metadata, len(tokens)),
    )


def _is_gemma(metadata: Settings) -> bool:
    return metadata.text("general.architecture") in ("gemma2", "gemma3")


def _byte_level_bpe(metadata: Settings, tokens: list[str]) -> tokenizers.Tokenizer:
    name = metadata.text(_KEY + "pre") or "default"
    if name not in PRE_TOKENIZERS:
        raise ValueError(f"pre-tokenizer {name!r} is not supported; supported: {', '.join(sorted(PRE_TOKENIZERS))}")
    backend = _bpe(
        tokens,
        # The first character may itself be a space, so the separator is searched after it.
        [
            (merge[:1] + left, right)
            for merge in _strings(metadata, "merges")
            for left, _, right in [merge[1:].partition(" ")]
        ],
        ignore_merges=name in MERGES_ARE_OPTIONAL,
    )
    backend.pre_tokenizer = PRE_TOKENIZERS[name]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(metadata: Settings, tokens: list[str], ids: Mapping[str, int]) -> tokenizers.Tokenizer:
    backend = _bpe(
        tokens,
        merges_by_score(tokens, _numbers(metadata, "scores", len(tokens)).tolist()),
        unk_token=tokens[ids["unknown_token_id"]] if "unknown_token_id" in ids else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    spaces = normalizers.Replace(" ", _SPACE_MARK)
    decode = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    # Gemma's tokenizer has no prefix. Google's own files do not say so.
    if metadata.flag(_KEY + "add_space_prefix", not _is_gemma(metadata)):
        # As in sentencepiece and llama.cpp: at the start of the text and after each special token.
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), spaces])
        backend.decoder = decoders.Sequence([*decode, decoders.Strip(content=" ", left=1)])
    else:
        backend.normalizer = spaces
        backend.decoder = decoders.Sequence(decode)
    return backend


def _bpe(tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    for left, right in merges:
        # The library would panic, and `except Exception` does not catch a panic.
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ValueError(f"the merge of {left!r} and {right!r} is not in the vocabulary")
    return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))


def _strings(metadata: Settings, name: str) -> list[str]:
    texts = metadata.texts(_KEY + name)
    if texts is None:
        raise metadata.refusal(_KEY + name, "an array of strings", None)
    return texts


def _numbers(metadata: Settings, name: str, length: int) -> npt.NDArray[np.generic]:
    value = metadata.get(_KEY + name)
    if not isinstance(value, np.ndarray) or len(value) != length:
        given = f"{len(value)} numbers" if isinstance(value, np.ndarray) else quote(value)
        raise ValueError(f"{_KEY}{name} must be an array of {length} numbers, one for each token, got {given}")
    return value


def merges_by_score(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of sentencepiece's greedy algorithm, best score first.

    Each split of a token into two tokens is a merge. Equal scores have the order of `transformers`: longer left parts
    first. The left part is a token, so a token is cut only at lengths of tokens. A damaged file may have a token of
    megabytes, and cutting it at each place would take minutes.
    """
    vocab = dict(zip(tokens, scores, strict=True))
    lengths = sorted({len(token) for token in vocab if token})
    found = [
        (-score, -cut, cut - len(token), token[:cut], token[cut:])
        for token, score in vocab.items()
        for cut in lengths[: bisect_left(lengths, len(token))]
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]


def _ids(metadata: Settings, *, is_llama: bool, num_tokens: int) -> dict[str, int]:
    # The defaults of llama.cpp.
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} if is_llama else {}
    ids |= _given_ids(metadata, (*_NAMED_IDS.values(), *_END_IDS))
    # An id beyond the vocabulary is ignored, as in llama.cpp.
    return {key: index for key, index in ids.items() if 0 <= index < num_tokens}


def _fim_ids(metadata: Settings, num_tokens: int) -> dict[str, int]:
    """The tokens for fill in the middle that the file names, by NAMED_IDS."""
    given = _given_ids(metadata, _FIM_KEYS)
    return {_FIM_KEYS[key]: index for key, index in given.items() if 0 <= index < num_tokens}


def _given_ids(metadata: Settings, keys: Iterable[str]) -> dict[str, int]:
    return {key: metadata.integer(_KEY + key, minimum=-1, maximum=2**32 - 1) for key in keys if _KEY + key in metadata}


def _turn_ends(tokens: Sequence[str], types: npt.NDArray[np.generic]) -> frozenset[int]:
    """The tokens that end a turn, by their texts as in llama.cpp. Files of the first weeks of Llama 3 name only the end
    of a text as EOS, which a chat never reaches."""
    control = {tokens[index]: index for index in (types == _CONTROL).nonzero()[0].tolist()}
    if {"<|return|>", "<|call|>"} <= control.keys():
        return frozenset(control[text] for text in _HARMONY_ENDS if text in control)
    return frozenset([control[text] for text in _TURN_ENDS if text in control][:1])


def _add_special_tokens(
    backend: tokenizers.Tokenizer, tokens: list[str], types: npt.NDArray[np.generic], ids: Mapping[str, int]
) -> None:
    """Add the special tokens (control tokens and named ones), and the user-defined tokens, which are matched whole."""
    # Some files name an ordinary token as padding. It must stay ordinary.
    named = {index for key, index in ids.items() if key in _ALWAYS_SPECIAL or types[index] != _NORMAL}
    special = named.union((types == _CONTROL).nonzero()[0].tolist())
    plain = sorted(set((types == _USER_DEFINED).nonzero()[0].tolist()) - special)
    backend.add_special_tokens([AddedToken(tokens[index], normalized=False, special=True) for index in sorted(special)])
    backend.add_tokens([AddedToken(tokens[index], normalized=False, special=False) for index in plain])


def _add_bos_and_eos(
    backend: tokenizers.Tokenizer, metadata: Settings, tokens: list[str], ids: Mapping[str, int]
) -> None:
    starts_with_bos = metadata.text(_KEY + "model") == "llama" or metadata.text(_KEY + "pre") in STARTS_WITH_BOS
    bos = eos = None
    if metadata.flag(_KEY + "add_bos_token", starts_with_bos):
        bos = ids.get("bos_token_id")
    if metadata.flag(_KEY + "add_eos_token"):
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


def _chat_templates(metadata: Settings) -> dict[str, str]:
    names = metadata.texts("tokenizer.chat_templates") or []
    keys = {"default": "tokenizer.chat_template"} | {name: f"tokenizer.chat_template.{name}" for name in names}
    return {name: template for name, key in keys.items() if (template := metadata.text(key)) is not None}

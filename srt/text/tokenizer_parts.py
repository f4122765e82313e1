"""The parts of a tokenizer, as the readers of tokenizer files return them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import tokenizers

NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""The names of special tokens that chat templates use."""


class TokenizerParts(NamedTuple):
    """The parts of a tokenizer.

    special_tokens: text of each token of NAMED_SPECIAL_TOKENS. chat_templates: Jinja source of each template by name;
    the usual one is "default". fim_ids: ids of the tokens for fill in the middle that the file names, by NAMED_IDS
    (fill_in_middle.py).
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    eos_token_ids: frozenset[int]
    chat_templates: Mapping[str, str]
    fim_ids: Mapping[str, int] = MappingProxyType({})

"""What the readers of tokenizer files hand over."""

from __future__ import annotations

from collections.abc import Mapping
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
"""The special tokens that chat templates know by name."""


class TokenizerParts(NamedTuple):
    """`special_tokens`: a name of NAMED_SPECIAL_TOKENS -> the token's text. `chat_templates`: name -> Jinja source; the
    usual one is called "default"."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    eos_token_ids: frozenset[int]
    chat_templates: Mapping[str, str]

"""Fill in the middle (FIM): the prompt that makes a model insert text between a prefix and a suffix.

Code models are trained for it with special tokens, which stand before the prefix, before the suffix and before the
middle. Their texts and their order are a convention of each family. A GGUF file may name their ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tokenizers


class _Family(NamedTuple):
    """The texts of the tokens before each part. middle: None if the middle directly follows the prefix."""

    prefix: str
    suffix: str
    middle: str | None
    suffix_first: bool = False


_FAMILIES = (
    _Family("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen
    _Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # Granite, StarCoder
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    _Family("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    _Family("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
)
_ENDS = (
    "<|fim_pad|>",
    "<fim_pad>",
    "<|repo_name|>",
    "<repo_name>",
    "<reponame>",
    "<|file_sep|>",
    "<file_sep>",
    "<filename>",
    "<|endoftext|>",
    "▁<EOT>",
    "[MIDDLE]",
)
"""Tokens that a model writes after the middle, as if the next file began. Not all of them are EOS tokens of chats."""
NAMED_IDS = ("pre", "suf", "mid", "pad", "rep", "sep")
"""The names of these tokens in GGUF files (gguf_tokenizer.py): before the parts, and padding, repository and file."""


@dataclass(frozen=True)
class FimFormat:
    """The token ids of a model's FIM prompts.

    `middle_id`: None if the middle directly follows the prefix. `end_ids`: the tokens that end the middle, beside the
    model's EOS tokens. `mark_ids` are among them.
    """

    prefix_id: int
    suffix_id: int
    middle_id: int | None
    suffix_first: bool
    end_ids: frozenset[int]

    @property
    def mark_ids(self) -> list[int]:
        """The tokens before the parts."""
        return [self.prefix_id, self.suffix_id, *([] if self.middle_id is None else [self.middle_id])]

    def prompt(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """The prompt whose continuation is the middle."""
        middle = [] if self.middle_id is None else [self.middle_id]
        before, after = [self.prefix_id, *prefix], [self.suffix_id, *suffix]
        return [*after, *before, *middle] if self.suffix_first else [*before, *after, *middle]


def find_fim_format(backend: tokenizers.Tokenizer, named: Mapping[str, int]) -> FimFormat | None:
    """The format of the tokenizer's added tokens, or else of the ids that its file names. None: it has no such tokens.

    `named`: ids by NAMED_IDS.
    """
    ids = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
    ends = {ids[text] for text in _ENDS if text in ids} | {
        named[name] for name in ("pad", "rep", "sep") if name in named
    }
    family = next((one for one in _FAMILIES if one.prefix in ids and one.suffix in ids), None)
    if family is not None and (family.middle is None or family.middle in ids):
        middle = None if family.middle is None else ids[family.middle]
        prefix, suffix, suffix_first = ids[family.prefix], ids[family.suffix], family.suffix_first
    elif {"pre", "suf", "mid"} <= named.keys():
        prefix, suffix, middle, suffix_first = named["pre"], named["suf"], named["mid"], False
    else:
        return None
    ends |= {prefix, suffix} if middle is None else {prefix, suffix, middle}
    return FimFormat(prefix, suffix, middle, suffix_first, frozenset(ends))

"""The grammar of a request: the kind of its description, and the description itself as the client sent it.

The messages to and from the grammar worker are here, too.
"""

from __future__ import annotations

from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
MAX_GRAMMAR_BYTES = 1 << 17
"""Maximum size of a description in UTF-8. The limits on the time of its compilation rest on it."""


class GrammarSpec(msgspec.Struct, frozen=True):
    """What a request's output must match. Equal specs share one compiled grammar."""

    kind: GrammarKind | Literal["anything"]
    """The field of SamplingParams that `text` comes from; "anything": see ANYTHING."""
    text: str
    """A JSON schema or a structural tag as JSON, a regular expression, or a grammar in EBNF."""


ANYTHING = GrammarSpec("anything", "")
"""Allows every output. With it, a request without a grammar can have a limit on its reasoning."""


class ReasoningSpan(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reasoning that comes before the text of a grammar. Each mark is one token.

    starts, ends: ids of the tokens that begin and end reasoning. inside: the output begins within reasoning; otherwise
    its first token may begin it. max_tokens: the most tokens between the marks; then `ends[0]` must come. None: no
    limit.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    inside: bool = False
    max_tokens: int | None = None


class CheckGrammarReq(msgspec.Struct, frozen=True, tag="check_grammar"):
    """Compile a grammar. The answer is a CheckGrammarReply."""

    call_id: int
    spec: GrammarSpec


class CheckGrammarReply(msgspec.Struct, frozen=True, tag="grammar_checked"):
    """The answer to a CheckGrammarReq. `reason`: why the grammar cannot be used; None if it can."""

    call_id: int
    reason: str | None

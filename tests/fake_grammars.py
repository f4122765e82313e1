"""A judge of grammars for tests."""

from __future__ import annotations

from tercet.srt.errors import InvalidRequest
from tercet.srt.grammar_spec import GrammarSpec


class FakeGrammars:
    """Accepts every grammar but those whose text contains `bad`."""

    async def check(self, spec: GrammarSpec) -> None:
        if "bad" in spec.text:
            raise InvalidRequest("the grammar is bad", param=spec.kind)

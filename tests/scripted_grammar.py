"""A grammar of the fake scheduler that is one text with gaps, so that a test knows which tokens are forced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scheduler_rig import Rig

from fakes import choose, next_token
from tercet.managers.grammar import GrammarFailed, mask_of
from tercet.model_executor.step import StepInputs

VOCAB, EOS = 40, 7


class Script:
    """A matcher of a text with gaps: each `None` is any token of 20 to 29. After the text comes EOS."""

    def __init__(self, text: Sequence[int | None], at: int = 0) -> None:
        self.text = text
        self.at = at

    def fill(self, bits: Any, line: int) -> None:
        token = self.text[self.at] if self.at < len(self.text) else EOS
        if token == -1:
            raise GrammarFailed("it fails on purpose")
        allowed = range(20, 30) if token is None else [token]
        bits[line] = sum(mask_of(i, bits.shape[1]) for i in allowed)

    def accept(self, token: int) -> None:
        assert self.text[self.at] in (None, token)
        self.at += 1

    def fork(self) -> Script:
        return Script(self.text, self.at)


def scripted(monkeypatch: pytest.MonkeyPatch, text: Sequence[int | None], **options: Any) -> Rig:
    """A scheduler in which every grammar is this text."""
    monkeypatch.setattr("hash_grammar.HashGrammar.start", lambda self: Script(text))
    return Rig(eos_ids=frozenset({EOS}), vocab_size=VOCAB, **options)


def answer(prompt: list[int], text: Sequence[int | None]) -> list[int]:
    gap = np.isin(np.arange(VOCAB), range(20, 30))
    output: list[int] = []
    for token in text:
        output.append(choose(next_token([*prompt, *output], 1, VOCAB), gap) if token is None else token)
    return [*output, EOS]


def new_tokens(steps: Sequence[StepInputs]) -> list[list[int]]:
    """The new tokens of each row of each step."""
    return [[1] * len(step.rows) if step.extend_lens is None else step.extend_lens.tolist() for step in steps]

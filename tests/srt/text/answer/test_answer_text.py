"""The whitespace at the end of a part, which is held back until more text of the part follows."""

from __future__ import annotations

from tercet.srt.text.answer.answer_text import AnswerText, Content


class Counting(str):
    """Text that counts the characters that are stripped."""

    num_stripped = 0

    def rstrip(self, chars: str | None = None, /) -> str:
        Counting.num_stripped += len(self)
        return super().rstrip(chars)

    def __radd__(self, before: str) -> Counting:
        return Counting(before + str(self))


def test_held_whitespace_is_looked_at_once() -> None:
    """A model that writes only line breaks would otherwise cost quadratic work."""
    answer = AnswerText()
    answer.content(Counting("a "))
    for _ in range(1000):
        answer.content(Counting("\n"))
    assert answer.take_parts() == [Content("a")]
    answer.content(Counting("b\n"))
    assert answer.take_parts() == [Content(" " + "\n" * 1000 + "b")]
    answer.finish()
    assert answer.take_parts() == [Content("\n")]
    assert Counting.num_stripped == 1004

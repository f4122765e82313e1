from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tercet.managers.stop_strings import StopStringMatcher

letters = st.text("ab", min_size=1, max_size=5)


def reference(text: str, stops: list[str], keep: bool) -> tuple[str | None, str, int]:
    """What is matched, what is shown in the end, and where the match ends."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            matched = max(ending, key=len)
            return matched, text[: end if keep else end - len(matched)], end
    return None, text, len(text)


@settings(max_examples=1000)
@example(pieces=["aa", "ab"], stops=["aab"], keep=False)
@example(pieces=["ababaababb"], stops=["ababb"], keep=False)
@given(
    pieces=st.lists(st.text("abx", max_size=6), max_size=12), stops=st.lists(letters, max_size=4), keep=st.booleans()
)
def test_any_pieces_give_what_the_whole_text_gives(pieces, stops, keep):
    matcher = StopStringMatcher(stops, keep=keep)
    text = shown = ""
    for piece in pieces:
        text += piece
        shown += matcher.push(piece)
        matched, expected, _ = reference(text, stops, keep)
        assert matcher.matched == matched
        if matched is not None:
            assert shown == expected
        else:
            # Only the longest beginning of a stop string is held back, and nothing at all when it is kept anyway.
            beginnings = {stop[:n] for stop in stops for n in range(len(stop))} | {""}
            held = 0 if keep else max(len(beginning) for beginning in beginnings if text.endswith(beginning))
            assert shown == text[: len(text) - held]
    shown += matcher.release()
    assert shown == reference(text, stops, keep)[1]
    if matcher.matched is not None:
        assert matcher.push("ab") == matcher.release() == ""


def test_stop_inside_one_piece_drops_what_follows():
    matcher = StopStringMatcher(["END"])
    assert matcher.push("one END two END") == "one "
    assert matcher.matched == "END"
    assert matcher.push(" three") == "" and matcher.release() == ""

    keeping = StopStringMatcher(["END"], keep=True)
    assert keeping.push("one EN") == "one EN"
    assert keeping.push("D two") == "D"
    assert keeping.matched == "END"


def test_held_text_is_shown_when_it_turns_out_harmless():
    matcher = StopStringMatcher(["\n\nUser:"])
    assert matcher.push("a\n") == "a"
    assert matcher.push("\nUs") == ""
    assert matcher.push("ed") == "\n\nUsed"
    assert matcher.push("\n") == ""
    assert matcher.release() == "\n"
    assert matcher.matched is None


@pytest.mark.parametrize("stops", [["bc", "abc"], ["abc", "bc"]])
def test_of_two_that_end_together_the_longer_wins(stops):
    matcher = StopStringMatcher(stops)
    assert matcher.push("xab") == "x"
    assert matcher.push("c") == ""
    assert matcher.matched == "abc"


def test_the_one_that_ends_first_wins_even_when_it_began_later():
    matcher = StopStringMatcher(["abcde", "c"])
    assert matcher.push("xabcde") == "xab"
    assert matcher.matched == "c"


def test_work_per_character_is_bounded_by_a_constant():
    """Against a text made to repeat partial matches, the comparisons stay linear."""
    comparisons = 0

    class Counted(str):
        def __getitem__(self, key):
            nonlocal comparisons
            comparisons += 1
            return super().__getitem__(key)

    stop = Counted("a" * 500 + "b")
    matcher = StopStringMatcher([stop])
    comparisons = 0
    for _ in range(40):
        matcher.push("a" * 400 + "c")
    assert comparisons < 5 * 40 * 401

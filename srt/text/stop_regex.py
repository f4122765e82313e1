"""Regular expressions that end a text while it is generated: a pattern becomes a Thompson automaton.

Reading a character takes at most one look at each state, so no pattern can make the engine wait. Python's own engine
backtracks, and may need time that grows exponentially with the length of the text.

The syntax is that of Python's `re`, without what an automaton cannot do (look-around, back-references, atomic groups)
and without the end of the text (`$`, `\\Z`), which is unknown while the text grows.
"""

from __future__ import annotations

import functools
import re

# The parts of `re` have no public names. They have been the same since Python 3.11.
import re._casefix as casefix  # type: ignore[import-not-found]
import re._constants as op  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import InvalidRequest

MAX_STATES = 1000
"""Of all patterns of a request together. A character costs at most two looks at each."""

CharacterTest = Callable[[str], bool]
PlaceTest = Callable[[str, str], bool]
"""Tests the place between two characters. The first is empty at the start of the text."""
Live = tuple[int, int]
"""A state, and the position in the text where the characters that led to it begin."""


class StopRegex:
    """A pattern as states with numbers. `matched_state` is reached when the pattern has matched.

    `steps`: for a state that reads a character, its test and the next state.
    `places`: for a state that tests a place, its test and the next state.
    `branches`: for all others but `matched_state`, the next states.
    """

    def __init__(self, pattern: str) -> None:
        self.steps: dict[int, tuple[CharacterTest, int]] = {}
        self.places: dict[int, tuple[PlaceTest, int]] = {}
        self.branches: dict[int, tuple[int, ...]] = {}
        self.num_states = 0
        self.matched_state = self._new_state()
        tree = parser.parse(pattern)
        self.first_state = self._sequence(tree, tree.state.flags, self.matched_state)

    @property
    def matches_nothing(self) -> bool:
        """Whether the pattern matches a text of no characters somewhere."""
        live = self.reach([(self.first_state, 0)], lambda _: True)
        return any(state == self.matched_state for state, _ in live)

    def reach(self, entries: Iterable[Live], passes: Callable[[PlaceTest], bool]) -> list[Live]:
        """The states that these lead to without a character, each with the first start that led to it.

        `entries`: ordered by start, and so is the result. `passes`: whether the present place passes a test.
        """
        seen: set[int] = set()
        reached = []
        for entry, start in entries:
            todo = [entry]
            while todo:
                state = todo.pop()
                if state in seen:
                    continue
                seen.add(state)
                if state in self.branches:
                    todo += self.branches[state]
                elif state in self.places and passes(self.places[state][0]):
                    todo.append(self.places[state][1])
                else:
                    reached.append((state, start))
        return reached

    def _new_state(self) -> int:
        if self.num_states == MAX_STATES:
            raise _NotSupported(f"it is too large: repeats count as copies, and {MAX_STATES} states are allowed")
        self.num_states += 1
        return self.num_states - 1

    def _step(self, test: CharacterTest, then: int) -> int:
        state = self._new_state()
        self.steps[state] = (test, then)
        return state

    def _branch(self, *then: int) -> int:
        state = self._new_state()
        self.branches[state] = then
        return state

    def _sequence(self, items: Iterable[Any], flags: int, then: int) -> int:
        for kind, value in reversed(list(items)):
            then = self._item(kind, value, flags, then)
        return then

    def _item(self, kind: Any, value: Any, flags: int, then: int) -> int:
        """The state where the item begins. `then`: the state after it."""
        match kind:
            case op.LITERAL:
                return self._step(_literal_test(value, flags), then)
            case op.NOT_LITERAL | op.IN:
                items = [(op.NEGATE, None), (op.LITERAL, value)] if kind is op.NOT_LITERAL else value
                return self._step(_set_test(items, flags), then)
            case op.ANY:
                return self._step((lambda _: True) if flags & re.DOTALL else "\n".__ne__, then)
            case op.SUBPATTERN:
                _, added, removed, items = value
                return self._sequence(items, (flags | added) & ~removed, then)
            case op.BRANCH:
                return self._branch(*[self._sequence(items, flags, then) for items in value[1]])
            case op.MAX_REPEAT | op.MIN_REPEAT:
                least, most, items = value
                return self._repeat(least, most, items, flags, then)
            case op.AT:
                state = self._new_state()
                self.places[state] = (_place_test(value, flags), then)
                return state
        raise _NotSupported(f"it has {_NAMES.get(kind, kind)}, which is not supported")

    def _repeat(self, least: int, most: Any, items: Any, flags: int, then: int) -> int:
        if most is op.MAXREPEAT:
            loop = self._new_state()
            self.branches[loop] = (self._sequence(items, flags, loop), then)
            then = loop
        else:
            end = then
            for _ in range(most - least):
                then = self._branch(self._sequence(items, flags, then), end)
        for _ in range(least):
            before, then = then, self._sequence(items, flags, then)
            if then == before:
                break  # an empty group
        return then


@functools.lru_cache(maxsize=256)
def compile_stop_regex(pattern: str) -> StopRegex:
    """Raises InvalidRequest for a pattern that is malformed, too large or not supported, or that matches no text."""
    try:
        regex = StopRegex(pattern)
        if regex.matches_nothing:
            raise _NotSupported("it matches the empty text")
    except (re.error, OverflowError, RecursionError, _NotSupported) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(
            f"stop_regex must be patterns of Python's re that an automaton can match; {pattern[:80]!r}: {reason}",
            param="stop_regex",
        ) from None
    return regex


_ASCII = frozenset(map(chr, range(128)))
_ASCII_MEMBERS = _ASCII - frozenset(map(chr, range(0x1C, 0x20)))
"""The characters that may be in a category with the flag ASCII. Four separators are white space only without it."""


class _NotSupported(ValueError):
    pass


_NAMES = {
    op.ASSERT: "a look-ahead or look-behind",
    op.ASSERT_NOT: "a look-ahead or look-behind",
    op.GROUPREF: "a back-reference",
    op.GROUPREF_EXISTS: "a conditional group",
    op.ATOMIC_GROUP: "an atomic group",
    op.POSSESSIVE_REPEAT: "a possessive repeat",
}


def _literal_test(code_point: int, flags: int) -> CharacterTest:
    if not flags & re.IGNORECASE:
        return chr(code_point).__eq__
    cases_of = _cases_of(flags)
    cases = cases_of(chr(code_point))
    return lambda character: not cases.isdisjoint(cases_of(character))


def _cases_of(flags: int) -> Callable[[str], frozenset[str]]:
    return _ascii_cases if flags & re.ASCII else _cases


@functools.lru_cache(maxsize=4096)
def _cases(character: str) -> frozenset[str]:
    """The characters that differ from this one in their case only. `ß` has no upper case of one character."""
    lower, upper = character.lower()[0], character.upper()  # only `İ` has a lower case of two, `i` and a dot
    others = map(chr, casefix._EXTRA_CASES.get(ord(lower), ()))  # such as `ﬆ` for `ﬅ`
    return frozenset(one for one in (character, lower, upper, upper.lower(), lower.upper(), *others) if len(one) == 1)


def _ascii_cases(character: str) -> frozenset[str]:
    """As `_cases`, for the letters of ASCII alone."""
    return _cases(character) & _ASCII if character.isascii() else frozenset(character)


def _set_test(items: Iterable[Any], flags: int) -> CharacterTest:
    """The test of `[...]`, and of one category such as `\\d`. With IGNORECASE, some case of the character is in the
    set; a negated set has none."""
    is_negated = False
    tests: list[CharacterTest] = []
    for kind, value in items:
        if kind is op.NEGATE:
            is_negated = True
        elif kind is op.LITERAL:
            tests.append(_literal_test(value, flags))
        elif kind is op.RANGE:
            tests.append(_range_test(chr(value[0]), chr(value[1]), flags))
        else:
            tests.append(_category_test(value, bool(flags & re.ASCII)))
    return lambda character: any(test(character) for test in tests) is not is_negated


def _range_test(first: str, last: str, flags: int) -> CharacterTest:
    if not flags & re.IGNORECASE:
        return lambda character: first <= character <= last
    cases_of = _cases_of(flags)
    return lambda character: any(first <= case <= last for case in cases_of(character))


_CATEGORIES: dict[Any, tuple[CharacterTest, bool]] = {
    op.CATEGORY_DIGIT: (str.isdecimal, False),
    op.CATEGORY_NOT_DIGIT: (str.isdecimal, True),
    op.CATEGORY_SPACE: (str.isspace, False),
    op.CATEGORY_NOT_SPACE: (str.isspace, True),
    op.CATEGORY_WORD: (lambda character: character.isalnum() or character == "_", False),
    op.CATEGORY_NOT_WORD: (lambda character: character.isalnum() or character == "_", True),
}
"""The test of a category, and whether the category is its opposite."""


def _category_test(category: Any, is_ascii: bool) -> CharacterTest:
    test, is_negated = _CATEGORIES[category]
    return lambda character: (test(character) and (not is_ascii or character in _ASCII_MEMBERS)) is not is_negated


def _place_test(place: Any, flags: int) -> PlaceTest:
    is_word = _category_test(op.CATEGORY_WORD, bool(flags & re.ASCII))

    def at_boundary(before: str, after: str) -> bool:
        return bool(before and is_word(before)) is not is_word(after)

    is_multiline = bool(flags & re.MULTILINE)
    match place:
        case op.AT_BEGINNING if is_multiline:
            return lambda before, _: before in ("", "\n")
        case op.AT_BEGINNING | op.AT_BEGINNING_STRING:
            return lambda before, _: not before
        case op.AT_END if is_multiline:
            return lambda _, after: after == "\n"
        case op.AT_BOUNDARY:
            return at_boundary
        case op.AT_NON_BOUNDARY:
            return lambda before, after: not at_boundary(before, after)
    raise _NotSupported("it has the end of the text, which is unknown while the text is generated; (?m)$ is supported")

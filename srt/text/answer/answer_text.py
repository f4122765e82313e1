"""The text of an answer, read by generators while it arrives.

A reader of a format is a generator. It takes text from an `AnswerText` and puts parts into it. Where the text ends
before the reader can decide, it yields, and goes on when there is more text. So a reader is written as if the whole
text were there, and the parts never depend on how the text was cut.

Text that may turn out not to be a tool call is held (`hold`). Then it becomes part of a call, or content (`give_back`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A reader, or a step of one. It yields when it needs more text."""


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Text in which the model thinks."""

    text: str


class CallStart(NamedTuple):
    """A tool call begins. Its arguments follow."""

    name: str


class Arguments(NamedTuple):
    """A piece of the arguments of the last call: JSON text."""

    text: str


Part = Content | Reasoning | CallStart | Arguments


class Marks:
    """Several fixed texts to search for. No mark contains the beginning of another one, except at its own beginning."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        longest_first = sorted(marks, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = frozenset(mark[:length] for mark in marks for length in range(1, len(mark)))
        self._most = max(map(len, marks), default=1) - 1

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """The first mark in the text from `at` on."""
        return self._pattern.search(text, at)

    def certain(self, text: str, at: int) -> int:
        """The end of the text that cannot be part of a mark, whatever follows."""
        for start in range(max(at, len(text) - self._most), len(text)):
            if text[start:] in self._beginnings:
                return start
        return len(text)


@functools.lru_cache(maxsize=64)
def marks_of(*marks: str) -> Marks:
    return Marks(marks)


class AnswerText:
    """The text so far with the reader's place in it, and the parts that have been read.

    dropped: special tokens that are left out of content and reasoning. most_calls: after so many calls, a further call
    and all that follows it is left out.
    """

    def __init__(self, dropped: tuple[str, ...] = (), most_calls: int | None = None) -> None:
        self.num_calls = 0
        self.has_reasoning = False
        """The answer begins with reasoning, which may have no text."""
        self._dropped = dropped
        self._most_calls = most_calls
        self._text = ""
        self._at = 0
        self._held: int | None = None
        self._ended = False
        self._parts: list[Part] = []
        self._space: list[str] = []  # whitespace that is left out if no more text of its part follows
        self._strip_next = False  # the next text begins a part, so its leading whitespace is left out

    # What the driver calls

    def push(self, text: str) -> None:
        done = self._at if self._held is None else self._held
        self._text = self._text[done:] + text
        self._at -= done
        self._held = None if self._held is None else 0

    def end(self) -> None:
        self._ended = True

    def take_parts(self) -> list[Part]:
        """The parts since the last call. Pieces of one part are joined."""
        parts, self._parts = self._parts, []
        joined: list[Part] = []
        start = 0
        for i in range(1, len(parts) + 1):
            kind = type(parts[start])
            if i == len(parts) or type(parts[i]) is not kind or kind is CallStart:
                first = parts[start]
                joined.append(first if kind is CallStart else kind("".join(part[0] for part in parts[start:i])))
                start = i
        return joined

    def finish(self) -> None:
        """The whitespace at the end belongs to the content, unless it follows a call or reasoning."""
        if self._space:
            self.put(Content("".join(self._space)))

    # What a reader takes

    def peek(self) -> Reading[str]:
        """The next character, or "" at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def take(self, count: int = 1) -> Reading[str]:
        """The next characters; fewer at the end."""
        while len(self._text) - self._at < count and not self._ended:
            yield
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        return taken

    def accept(self, *literals: str) -> Reading[str]:
        """Takes the one of these texts that follows, and returns it, or "". None is the beginning of another."""
        while True:
            for literal in literals:
                if self._text.startswith(literal, self._at):
                    self._at += len(literal)
                    return literal
            rest = self._text[self._at :]
            if self._ended or not any(literal.startswith(rest) for literal in literals):
                return ""
            yield

    def ends_inside(self, mark: str) -> bool:
        """Whether the answer ends inside this mark, or before it. Call it after `accept` has not found the mark."""
        return self._ended and mark.startswith(self._text[self._at :])

    def accept_end(self, mark: str) -> Reading[None]:
        """Takes the mark that ends a call, if it comes, or its first part if the answer ends within it."""
        if not (yield from self.accept(mark)) and self.ends_inside(mark):
            yield from self.take(len(mark))

    def run(self, pattern: re.Pattern[str], put: Callable[[str], None]) -> Reading[None]:
        """Passes the characters on that match the pattern, which is a class of characters with `+`."""
        while True:
            found = pattern.match(self._text, self._at)
            if found is not None:
                put(found.group())
                self._at = found.end()
            if self._at < len(self._text) or self._ended:
                return
            yield

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """The characters that match the pattern, which is a class of characters with `+`."""
        pieces: list[str] = []
        yield from self.run(pattern, pieces.append)
        return "".join(pieces)

    def skip_space(self) -> Reading[None]:
        yield from self.run(_SPACE, _ignore)

    def until(self, marks: Marks, put: Callable[[str], None]) -> Reading[str]:
        """Passes the text on up to the next mark, and takes the mark. Returns the mark, or "" at the end."""
        while True:
            found = marks.find(self._text, self._at)
            end = found.start() if found else len(self._text) if self._ended else marks.certain(self._text, self._at)
            if end > self._at:
                put(self._text[self._at : end])
            if found is not None:
                self._at = found.end()
                return found.group()
            self._at = end
            if self._ended:
                return ""
            yield

    def content_until(self, *marks: str) -> Reading[str]:
        """Content up to the next mark. Takes the mark and holds it. Returns "" at the end."""
        return (yield from self._visible_until(marks, self.content))

    def rest_is_content(self) -> Reading[None]:
        yield from self._visible_until((), self.content)

    def reasoning_until(self, *marks: str) -> Reading[str]:
        """Reasoning up to the next mark, which is taken. Returns "" at the end."""
        return (yield from self._visible_until(marks, self.reasoning))

    def _visible_until(self, marks: tuple[str, ...], put: Callable[[str], None]) -> Reading[str]:
        all_marks = (*marks, *(token for token in self._dropped if token not in marks))
        while True:
            mark = yield from self.until(marks_of(*all_marks), put)
            if mark in marks:
                self.hold(len(mark))
            if not mark or mark in marks:
                return mark

    # What a reader decides

    def hold(self, back: int = 0) -> None:
        """Keeps the text from here on, or from some characters back, until the reader has decided what it is."""
        self._held = self._at - back

    def release(self) -> None:
        """The held text is part of a call, or a mark."""
        self._held = None

    def give_back(self) -> None:
        """The held text is content."""
        assert self._held is not None
        text = self._text[self._held : self._at]
        self._held = None
        self.content(text)

    # What a reader puts

    def content(self, text: str) -> None:
        self._visible(Content, text)

    def reasoning(self, text: str) -> None:
        self._visible(Reasoning, text)

    def new_part(self) -> None:
        """Whitespace around the boundary between two parts is left out."""
        self._space.clear()
        self._strip_next = True

    def start_call(self, name: str) -> None:
        self.release()
        self.new_part()
        self.num_calls += 1
        self.put(CallStart(name))

    def arguments(self, text: str) -> None:
        if text:
            self.put(Arguments(text))

    def _visible(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if self._strip_next:
            text = text.lstrip()
        if not text:
            return
        self._strip_next = False
        visible = text.rstrip()
        if visible:
            self.put(kind("".join([*self._space, visible])))
            self._space.clear()
        if len(visible) < len(text):
            self._space.append(text[len(visible) :])

    def put(self, part: Part) -> None:
        """Adds a part, unless there have been too many calls."""
        if self._most_calls is None or self.num_calls <= self._most_calls:
            self._parts.append(part)


_SPACE = re.compile(r"\s+")


def _ignore(text: str) -> None:
    """Drops a piece of text."""

"""A fake recorder of steps, for tests of profiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FakeTrace:
    """Its file lists the spans that were entered before `stop`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.num_stops = 0
        self.depth = 0
        self.error: Exception | None = None
        """Raised by `write`."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        if not self.num_stops:
            self.names.append(name)
        self.depth += 1
        yield
        self.depth -= 1

    def stop(self) -> None:
        assert not self.depth, "a trace must not end inside a span"
        self.num_stops += 1

    def write(self, path: Path) -> None:
        assert self.num_stops == 1
        if self.error is not None:
            raise self.error
        path.write_text("\n".join(self.names))

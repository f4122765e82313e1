"""The progress bar of an Engine, also where stderr cannot show it."""

from __future__ import annotations

import io
import sys
import threading
from typing import Any

import pytest
from patience import PATIENCE_S

from tercet.srt.entrypoints.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class LogOfAProgram:
    """What programs put in place of stderr: it has no isatty."""

    def write(self, text: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")


def closed() -> io.StringIO:
    file = io.StringIO()
    file.close()
    return file


@pytest.mark.parametrize("wanted", [None, True, False])
@pytest.mark.parametrize("stderr", [None, LogOfAProgram(), closed()])
def test_no_bar_and_no_error_where_stderr_cannot_show_it(
    monkeypatch: pytest.MonkeyPatch, stderr: Any, wanted: bool | None
) -> None:
    def show() -> None:
        with progress_bar(20, wanted) as bar:
            bar.update(20)

    monkeypatch.setattr(sys, "stderr", stderr)
    show()
    later = threading.Thread(target=show, daemon=True)  # it waits for ever if the first bar keeps tqdm's lock
    later.start()
    later.join(PATIENCE_S)
    assert not later.is_alive()


@pytest.mark.parametrize(("num_samples", "wanted", "shown"), [(17, None, True), (16, None, False), (17, False, False)])
def test_a_terminal_shows_a_bar_for_many_samples(
    monkeypatch: pytest.MonkeyPatch, num_samples: int, wanted: bool | None, shown: bool
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar(num_samples, wanted) as bar:
        bar.update(num_samples)
    assert (f"{num_samples}/{num_samples}" in terminal.getvalue()) == shown

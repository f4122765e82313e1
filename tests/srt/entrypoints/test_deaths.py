"""Which deaths of a process may be the fault of a request."""

from __future__ import annotations

import pytest

from tercet.managers.recovery import Blame
from tercet.srt.entrypoints.forks import UNKNOWN_EXIT
from tercet.srt.entrypoints.restarts import Death
from tercet.srt.step_journal import Journal, JournalRow


@pytest.mark.parametrize(
    ("returncode", "was_hung", "was_oom", "is_from_outside"),
    [(-9, False, False, True), (-15, False, False, True), (-9, True, False, False), (-9, False, True, False)]
    + [(UNKNOWN_EXIT, False, False, True), (UNKNOWN_EXIT, False, True, False)]
    + [(code, False, False, False) for code in (-11, -6, 0, 1)],
)
def test_who_is_to_blame(returncode: int, was_hung: bool, was_oom: bool, is_from_outside: bool) -> None:
    death = Death("scheduler", "died", returncode, was_hung, was_oom)
    journal = Journal([JournalRow("a", 5)], [])
    detokenizer = death._replace(role="detokenizer")
    between, unknown = Journal(None, [], is_between_steps=True), Journal(None, [])
    known, anybody = (None, None) if is_from_outside else (Blame({"a": 5}), Blame(None))
    for is_paused in (False, True):
        assert death.blame(journal, is_paused=is_paused) == known
        assert death.blame(unknown, is_paused=is_paused) == anybody
        assert detokenizer.blame(between, is_paused=is_paused) == anybody
    assert death.blame(between, is_paused=False) == anybody, "it may have died while it planned a step"
    assert death.blame(between, is_paused=True) is None


def test_an_exit_code_that_the_engine_has_lost_is_no_excuse() -> None:
    death = Death("scheduler", "died", UNKNOWN_EXIT, False, False)
    assert death.is_from_outside and not death._replace(has_ended_fork_servers=True).is_from_outside

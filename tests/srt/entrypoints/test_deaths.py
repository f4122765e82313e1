"""Which deaths of a process may be the fault of a request."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import fake_child
import pytest
from patience import PATIENCE_S
from toy_engine import text_of, toy_args

from tercet.managers.recovery import Blame
from tercet.srt.entrypoints.engine_core import EngineCore
from tercet.srt.entrypoints.forks import UNKNOWN_EXIT
from tercet.srt.entrypoints.restarts import Death
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.step_journal import Journal, JournalRow, StepJournal


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
    for loads_weights in (False, True):
        assert death.blame(journal, loads_weights=loads_weights) == known
        assert death.blame(unknown, loads_weights=loads_weights) == anybody
        assert detokenizer.blame(between, loads_weights=loads_weights) == anybody
    assert death.blame(between, loads_weights=False) == anybody, "it planned a step, or created a request"
    assert death.blame(between, loads_weights=True) is None


def test_an_exit_code_that_the_engine_has_lost_is_no_excuse() -> None:
    death = Death("scheduler", "died", UNKNOWN_EXIT, False, False)
    assert death.is_from_outside and not death._replace(has_ended_fork_servers=True).is_from_outside


def test_a_pause_alone_is_no_excuse(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request may kill the scheduler that creates it, and it would kill each new one, too."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("r")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("c")))

    async def scenario() -> None:
        core = await EngineCore.start(toy_args(tmp_path), child_module=fake_child.MODULE)
        manager = core.tokenizer_manager
        await manager.pause.begin("in_place")
        options = RequestOptions(sampling=SamplingParams(max_new_tokens=9), stream=True)
        (sample,) = await manager.submit([1], options)
        for excuse in ("weights", "adapter", None):
            StepJournal(core._life.run_dir.journal, 8)  # no step is under way
            manager.weights.is_updating = excuse == "weights"
            manager.adapters._loading = {"x"} if excuse == "adapter" else set()
            num_restarts = manager.recovery.num_restarts
            os.kill(core.child_pids["scheduler"], signal.SIGABRT)
            while manager.recovery.num_restarts == num_restarts or manager.is_restarting:
                await asyncio.sleep(0.01)
            assert sample.num_strikes == (excuse is None)
        await manager.pause.end()
        assert (await asyncio.wait_for(sample.result(), PATIENCE_S)).text == text_of(9)
        await core.stop()

    asyncio.run(scenario())

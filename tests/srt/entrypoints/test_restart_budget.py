"""How often an engine may be restarted, and which restarts count."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path

import fake_child
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S
from toy_engine import text_of, toy_args

from tercet.managers.generation import error_of
from tercet.srt.entrypoints.engine_core import EngineCore
from tercet.srt.entrypoints.restarts import RestartBudget
from tercet.srt.errors import FatalRequest
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams


@given(st.integers(0, 4), st.lists(st.floats(0, 30), max_size=20))
def test_no_window_has_more_restarts_than_allowed(limit: int, gaps: list[float]) -> None:
    now = [0.0]
    budget = RestartBudget(limit, 10.0, clock=lambda: now[0])
    taken: list[float] = []
    for gap in gaps:
        now[0] += gap
        free = sum(now[0] - at < 10.0 for at in taken) < limit
        assert budget.take() == free
        taken += [now[0]] * free


@given(st.integers(1, 4))
def test_the_restarts_of_culprits_do_not_count_but_their_number_is_limited(limit: int) -> None:
    """Two different culprits do not end a server. One that gets new ones for ever ends."""
    now = [0.0]
    budget = RestartBudget(limit, 10.0, clock=lambda: now[0])

    def num_restarts() -> int:
        count = 0
        while budget.take() and count < 100:
            count += 1
            if count % 2 == 0:
                budget.give_back()
        return count

    most = 3 * limit if limit > 1 else 1
    assert num_restarts() == most, "a limit of 1 ends before the second death of a culprit"
    now[0] = 10.0
    assert num_restarts() == most, "culprits before the window do not count either"


def test_a_server_outlives_more_culprits_than_restarts(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests kill the engine twice each. It may be restarted twice."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("r")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("c")))

    async def scenario() -> None:
        core = await EngineCore.start(
            dataclasses.replace(toy_args(tmp_path), engine_restarts=2), child_module=fake_child.MODULE
        )
        manager = core.tokenizer_manager
        many = RequestOptions(sampling=SamplingParams(max_new_tokens=400), stream=True)
        for poison in (1, 2):
            (sample,) = await manager.submit([poison], many)
            while not sample.is_over:
                os.kill(core.child_pids["scheduler"], signal.SIGALRM)  # nobody ends a process by that
                number = manager.recovery.num_restarts
                while manager.recovery.num_restarts == number or manager.is_restarting:
                    await asyncio.sleep(0.005)
            assert isinstance(error_of((await sample.result()).finish), FatalRequest)
        assert manager.recovery.num_restarts == 4 and not core.died.done()
        (good,) = await manager.submit([3], RequestOptions(sampling=SamplingParams(max_new_tokens=5)))
        assert (await good.result()).text == text_of(5)
        await core.stop()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))

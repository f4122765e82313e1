"""What the log says if a shutdown has waited for as long as it may."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

from tercet.srt.entrypoints import server


@pytest.mark.parametrize(
    ("num_unfinished", "says"),
    [(3, "3 requests did not finish before"), (0, "An HTTP worker did not report before")],
)
def test_the_log_says_what_was_waited_for(
    num_unfinished: int, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "DRAIN_TIMEOUT_S", 0.0)
    monkeypatch.setattr(logging.getLogger("tercet"), "propagate", True)
    manager = SimpleNamespace(draining=False, num_unfinished=num_unfinished, pause=SimpleNamespace(is_on=False))

    async def scenario() -> None:
        core = SimpleNamespace(tokenizer_manager=manager, died=asyncio.get_running_loop().create_future())
        run = SimpleNamespace(_is_idle=lambda manager: False, _signals=[])
        await server._ServerRun._drain(run, core)  # type: ignore[arg-type]

    asyncio.run(scenario())
    assert says in caplog.text and manager.draining

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tercet.managers.calls import Calls
from tercet.managers.profile_control import ProfileControl
from tercet.srt.errors import EngineRestarting, InvalidRequest, TercetError
from tercet.srt.profile_messages import ProfileReply, StopProfileReq


class Link:
    def __init__(self, calls: Calls, answer: Callable[[int], ProfileReply]) -> None:
        self.sent: list[Any] = []
        self._calls = calls
        self._answer = answer

    def send(self, message: Any) -> None:
        self.sent.append(message)
        asyncio.get_running_loop().call_soon(self._calls.on_reply, self._answer(message.call_id))


def stop(answer: Callable[[int], ProfileReply]) -> str:
    async def run() -> str:
        calls = Calls()
        link = Link(calls, answer)
        path = await ProfileControl(calls, lambda: link).stop()
        assert link.sent == [StopProfileReq(1)]
        return path

    return asyncio.run(run())


def test_the_reply_becomes_a_path_or_an_error() -> None:
    assert stop(lambda call_id: ProfileReply(call_id, "/t/x")) == "/t/x"
    with pytest.raises(InvalidRequest, match="none runs"):
        stop(lambda call_id: ProfileReply(call_id, refusal="none runs"))
    with pytest.raises(TercetError, match="disk full") as caught:
        stop(lambda call_id: ProfileReply(call_id, "/t/x", failure="disk full"))
    assert caught.value.status == 500


def test_without_an_engine_nothing_is_asked() -> None:
    def no_link() -> Any:
        raise EngineRestarting("restarting")

    with pytest.raises(EngineRestarting):
        asyncio.run(ProfileControl(Calls(), no_link).stop())

"""Signs of life: a process that hangs is silent, whatever the other one says."""

from __future__ import annotations

from tercet.managers.heartbeats import Heartbeats
from tercet.srt.io_struct import BatchTextOut, DetokenizerAlive, FlushCacheReply


def test_each_process_speaks_for_itself() -> None:
    now = 0.0
    heartbeats = Heartbeats(lambda: now)
    now = 5.0
    assert [heartbeats.silent_s(role) for role in ("scheduler", "detokenizer")] == [5.0, 5.0]
    heartbeats.hear(DetokenizerAlive())
    assert [heartbeats.silent_s(role) for role in ("scheduler", "detokenizer")] == [5.0, 0.0]
    now = 7.0
    heartbeats.hear(FlushCacheReply(1, 0))
    assert [heartbeats.silent_s(role) for role in ("scheduler", "detokenizer")] == [0.0, 2.0]
    assert heartbeats.longest_silence_s == 2.0 and not heartbeats.is_late
    heartbeats.is_stopped = True
    assert heartbeats.is_late
    now = 8.0
    heartbeats.hear(BatchTextOut([]))
    assert [heartbeats.silent_s(role) for role in ("scheduler", "detokenizer")] == [0.0, 0.0]
    assert heartbeats.longest_silence_s == 0.0 and not heartbeats.is_late
    heartbeats.is_stopped = False
    now = 18.5
    assert heartbeats.is_late
    heartbeats.reset()
    assert [heartbeats.silent_s(role) for role in ("scheduler", "detokenizer")] == [0.0, 0.0]

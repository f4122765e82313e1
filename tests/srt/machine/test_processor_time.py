"""The processor time of another process."""

from __future__ import annotations

import os
import time

from tercet.srt.machine.processor_time import processor_time_s


def test_it_is_the_time_of_all_threads() -> None:
    while time.process_time() < 0.1:
        pass
    before, seen, after = time.process_time(), processor_time_s(os.getpid()), time.process_time()
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert before - 2 * tick_s <= seen <= after + 2 * tick_s


def test_a_process_that_has_gone_has_none() -> None:
    assert processor_time_s(2**30) == 0

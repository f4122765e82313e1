from __future__ import annotations

import pytest
from scheduler_rig import Rig


@pytest.mark.parametrize("overlap", [True, False])
def test_the_throughput_counts_no_pause(overlap: bool) -> None:
    rig = Rig(overlap=overlap, decode_log_interval=30)

    def generate(num_tokens: int) -> None:
        rig.add(f"r{len(rig.heard)}", [1, 2, 3], max_new_tokens=num_tokens)
        while rig.is_busy:
            rig.clock.now += 0.5
            rig.turn()

    for _ in range(12):
        generate(20)
        rig.clock.now += 3600.0
        rig.turn()
    # Half a second passes from one token of a request to the next.
    assert 1.8 < rig.scheduler.state().last_gen_throughput < 2.2


def test_the_throughput_is_that_of_the_last_interval() -> None:
    rig = Rig(overlap=False, decode_log_interval=10)
    rig.add("r", [1, 2, 3], max_new_tokens=200)
    for step_s in (1.0, 0.1):
        for _ in range(30):
            rig.clock.now += step_s
            rig.turn()
        assert rig.scheduler.state().last_gen_throughput == pytest.approx(1 / step_s)

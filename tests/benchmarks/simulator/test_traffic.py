"""A client with limited concurrency: when the next request arrives, and which requests arrive together."""

from __future__ import annotations

import msgspec
import pytest
from simulations import flat_cost, request, simulate, traffic_settings

from tercet.benchmarks.simulator.streams import beside_streams
from tercet.benchmarks.simulator.traffic import Traffic


def take(traffic: Traffic, now_s: float) -> list[float]:
    return [one.arrival_s for one in traffic.take(now_s)]


def test_a_held_back_request_arrives_a_round_trip_after_an_end() -> None:
    requests = [request(0.0, 10, 4) for _ in range(5)]
    traffic = Traffic(iter(requests), max_concurrency=2, round_trip_s=0.5)
    assert take(traffic, 0.0) == [0.0, 0.0]
    assert traffic.next_s is None, "nothing arrives before one ends"
    traffic.on_end(requests[1], 3.0, [])
    traffic.on_end(requests[0], 3.2, [])
    assert traffic.next_s == 3.5
    assert take(traffic, 3.6) == [3.5]
    assert take(traffic, 9.0) == [pytest.approx(3.7)], "each place has its own time"
    assert traffic.next_s is None


def test_a_scheduler_that_wakes_up_late_reads_a_burst_at_once() -> None:
    """The second request arrives 0.1 s after the first one."""
    profile = flat_cost(1.0)
    ttfts = {}
    for wake_s in (0.0, 0.2):
        cost = msgspec.structs.replace(profile, wake_s=wake_s)
        ttfts[wake_s] = simulate([request(0.0, 10, 1), request(0.1, 10, 1)], cost=cost).statistics.ttft.max_s
    assert ttfts[0.0] == pytest.approx(1.9), "it waits for the step of the first one"
    assert ttfts[0.2] == pytest.approx(1.2)


@pytest.mark.parametrize("num_streams", range(1, 10))
def test_streams_share_nothing_with_the_prompts_beside_them(num_streams: int) -> None:
    requests = list(beside_streams(traffic_settings(num_requests=40), num_streams, 100))
    begins = {tuple(one.prompt_ids[:4].tolist()) for one in requests}
    assert len(requests) == len(begins) == num_streams + 40

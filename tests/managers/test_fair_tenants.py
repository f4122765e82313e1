"""Two tenants in simulated time, one of which sends ten times as much: what the other one notices, and what it costs.

The engine is the fake runner. As on a GPU, most of the time of a step does not depend on its tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from scheduler_rig import Rig

STEP_S, PROMPT_TOKEN_S, DECODE_S = 0.02, 0.00001, 0.00002
PREFIX_LEN, TAIL_LEN = 48, 48
NUM_PREFIXES = 6
"""Of each tenant."""
SECONDS = 8.0


@dataclass(frozen=True)
class Arrival:
    at_s: float
    tenant: str
    prompt: list[int]


def arrivals(tenant: str, per_s: float, seed: int) -> list[Arrival]:
    """Poisson arrivals. Each prompt is one of the tenant's prefixes and a tail of its own."""
    rng = Random(seed)
    prefixes = [[rng.randrange(97) for _ in range(PREFIX_LEN)] for _ in range(NUM_PREFIXES)]
    made, at_s = [], rng.expovariate(per_s)
    while at_s < SECONDS:
        tail = [rng.randrange(97) for _ in range(rng.randrange(TAIL_LEN // 2, TAIL_LEN))]
        made.append(Arrival(at_s, tenant, rng.choice(prefixes) + tail))
        at_s += rng.expovariate(per_s)
    return made


SMALL = arrivals("small", 20.0, seed=1)
LARGE = arrivals("large", 260.0, seed=2)


@dataclass
class Outcome:
    ttft_s: dict[str, list[float]]
    hit_rate: float
    num_left: int
    """Requests that wait at the end of the arrivals."""
    num_refused: Counter[str]
    """By tenant."""

    def p99(self, tenant: str) -> float:
        return float(np.quantile(self.ttft_s[tenant], 0.99))


def simulate(policy: str, *traffic: list[Arrival], **settings: object) -> Outcome:
    rig = Rig(
        pool_size=3072, max_running=48, mixed=True, context_len=512, max_prefill_tokens=256, chunked_prefill_size=256,
        policy=policy, audit=False, watermark=0.02, overlap=False, **settings,
    )  # fmt: skip
    rig.clock.now = 0.0
    queue = sorted((one for part in traffic for one in part), key=lambda one: one.at_s)
    sent: dict[str, Arrival] = {}
    num_sent = 0
    ttft_s: dict[str, list[float]] = {"small": [], "large": []}
    outcome = Outcome(ttft_s, 0.0, -1, Counter())
    while queue:
        while queue and queue[0].at_s <= rig.clock.now:
            one = queue.pop(0)
            num_sent += 1
            rid = f"{one.tenant}{num_sent}"
            rig.add(rid, one.prompt, tenant=one.tenant, max_new_tokens=10)
            sent[rid] = one
        if not rig.is_busy:
            rig.clock.now = queue[0].at_s
            continue
        num_steps = len(rig.runner.steps)
        rig.turn()
        for step in rig.runner.steps[num_steps:]:
            num_prompt = 0 if step.extend_lens is None else int(np.sum(step.extend_lens))
            rig.clock.now += STEP_S + PROMPT_TOKEN_S * num_prompt + DECODE_S * len(step.rows)
        for rid in [rid for rid in sent if rig.heard[rid].ids or rig.heard[rid].finish is not None]:
            one = sent.pop(rid)
            if rig.heard[rid].ids:
                ttft_s[one.tenant].append(rig.clock.now - one.at_s)
            else:
                outcome.num_refused[one.tenant] += 1
    for one in sent.values():  # they wait for at least so long
        ttft_s[one.tenant].append(rig.clock.now - one.at_s)
    outcome.num_left = len(rig.scheduler.queues.waiting)
    outcome.hit_rate = rig.scheduler.state().cache_hit_rate
    return outcome


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {
        "alone": simulate("dlpm", SMALL),
        "dlpm": simulate("dlpm", SMALL, LARGE),
        "lpm": simulate("lpm", SMALL, LARGE),
    }


def test_the_small_tenant_hardly_notices_the_large_one(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["lpm"].num_left > 100  # the engine has more to do than it can
    assert outcomes["dlpm"].p99("small") <= 1.5 * outcomes["alone"].p99("small")
    assert outcomes["lpm"].p99("small") > 10 * outcomes["alone"].p99("small")


@pytest.mark.parametrize("limit", [{"max_queued": 64}, {"max_queue_time_s": 0.5}])
def test_a_limited_queue_refuses_the_large_tenant_only(limit: dict[str, float], outcomes: dict[str, Outcome]) -> None:
    traffic = [[one for one in part if one.at_s < 2.5] for part in (SMALL, LARGE)]
    fair, unfair = (simulate(policy, *traffic, **limit) for policy in ("dlpm", "lpm"))
    assert fair.num_refused["large"] > 50 and unfair.num_refused["small"] > 0  # the limit holds
    assert fair.num_refused["small"] == 0
    assert fair.p99("small") <= 1.5 * outcomes["alone"].p99("small")


def test_fairness_costs_few_hits(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["dlpm"].hit_rate >= 0.95 * outcomes["lpm"].hit_rate

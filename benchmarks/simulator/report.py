"""The figures of simulated runs, as tables, JSON values and plots."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..plots import draw
from ..results import Result, number, percent
from .simulation import HitRates, Simulation
from .statistics import RunStatistics

_MAX_TENANTS_SHOWN = 8
_SHARES = {"p50": 0.5, "p99": 0.99}


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    statistics: RunStatistics
    hit_rates: HitRates | None
    """Of the first requests."""
    duration_s: float
    """Simulated seconds."""
    num_steps: int
    device_share: float
    """Share of the duration for which the device was busy."""
    num_retractions: int
    max_live: int
    """Most requests that had arrived and not ended."""
    cpu_s: float
    """Processor seconds of the simulation."""

    @classmethod
    def of(cls, simulation: Simulation) -> Run:
        duration_s = max(simulation.clock.now_s, 1e-9)
        return cls(
            simulation.statistics,
            simulation.hit_rates(),
            duration_s,
            simulation.device.num_steps,
            simulation.device.busy_s / duration_s,
            simulation.num_retractions,
            simulation.max_live,
            simulation.cpu_s,
        )

    def values(self) -> dict[str, Any]:
        """The figures by name, for JSON. All but `cpu_s` are the same in every run with the same seed."""
        stats = self.statistics
        values: dict[str, Any] = {
            "completed": stats.num_completed,
            "aborted": stats.num_aborted,
            "refused": stats.num_refused,
            "duration_s": self.duration_s,
            "request_throughput": stats.num_completed / self.duration_s,
            "output_throughput": stats.num_output_tokens / self.duration_s,
            "input_throughput": stats.num_admitted_tokens / self.duration_s,
            "request_goodput": stats.num_good / self.duration_s if stats.slos_s else None,
            "hit_rate": stats.hit_rate,
            "tenant_hit_rates": stats.tenant_hit_rates,
            "num_retractions": self.num_retractions,
            "jain_fairness": stats.fairness,
            "num_steps": self.num_steps,
            "device_busy_share": self.device_share,
            "max_live_requests": self.max_live,
            "cpu_s": self.cpu_s,
        }
        for name in ("ttft", "tpot", "e2el", "gaps"):
            histogram = getattr(stats, name)
            for label, share in _SHARES.items():
                values[f"{label}_{name}_ms"] = _ms(histogram.quantile(share))
            values[f"max_{name}_ms"] = _ms(histogram.max_s if histogram.count else None)
        if self.hit_rates is not None:
            values["optimum"] = {
                "num_requests": self.hit_rates.num_requests,
                "hit_rate": self.hit_rates.found,
                "best_hit_rate": self.hit_rates.best,
            }
        return values


def add_tables(result: Result, runs: Mapping[str, Run], traffic: str, engine: str) -> None:
    """`runs`: by policy. `traffic` and `engine`: what was simulated, in words."""
    speed = result.table(
        f"{traffic}\n{engine}",
        ["policy", "completed", "aborted", "refused", "requests/s", "output tok/s", "goodput/s", "retractions", "Jain"],
    )
    latency = result.table(
        "Latencies in ms",
        ["policy", "TTFT p50", "TTFT p99", "token gap p50", "token gap p99", "token gap max", "TPOT p50", "E2E p50"],
    )
    cache = result.table(
        "Prefix cache", ["policy", "hit rate", "of the first", "their hit rate", "best possible", "share"]
    )
    tenants = sorted({tenant for run in runs.values() for tenant in run.statistics.tenant_prompts}, key=str)
    if 1 < len(tenants) <= _MAX_TENANTS_SHOWN:
        rates_of = result.table("Hit rate of each tenant", ["policy", *(str(tenant) or "none" for tenant in tenants)])
        for policy, run in runs.items():
            found = run.statistics.tenant_hit_rates
            rates_of.row(policy, *(percent(found.get(tenant)) for tenant in tenants))
    cost = result.table(
        "The simulation", ["policy", "simulated s", "steps", "device busy", "most live", "CPU s", "requests per CPU s"]
    )
    for policy, run in runs.items():
        stats, values = run.statistics, run.values()
        speed.row(
            policy, str(stats.num_completed), str(stats.num_aborted), str(stats.num_refused),
            number(values["request_throughput"]), number(values["output_throughput"]),
            number(values["request_goodput"]), str(run.num_retractions), number(stats.fairness),
        )  # fmt: skip
        if stats.num_refused:
            speed.notes.append(f"{policy}: {stats.num_refused} refused, the first one with: {stats.first_refusal}")
        latency.row(
            policy,
            *(number(values[f"{name}_ms"]) for name in ("p50_ttft", "p99_ttft", "p50_gaps", "p99_gaps", "max_gaps")),
            *(number(values[f"{name}_ms"]) for name in ("p50_tpot", "p50_e2el")),
        )
        rates = run.hit_rates
        cache.row(
            policy,
            percent(stats.hit_rate),
            *(("-",) * 4 if rates is None else (
                str(rates.num_requests), percent(rates.found), percent(rates.best),
                percent(rates.found / rates.best if rates.best else None),
            )),
        )  # fmt: skip
        num_requests = stats.num_completed + stats.num_aborted + stats.num_refused
        cost.row(
            policy, number(run.duration_s), str(run.num_steps), percent(run.device_share), str(run.max_live),
            number(run.cpu_s), number(num_requests / max(run.cpu_s, 1e-9)),
        )  # fmt: skip


def terminal_plots(runs: Mapping[str, Run], width: int) -> str:
    """The distributions of TTFT and of token gaps for each policy."""
    plots = []
    for policy, run in runs.items():
        for label, histogram in (("TTFT", run.statistics.ttft), ("token gap", run.statistics.gaps)):
            xs, ys = histogram.cdf()
            plots.append(draw(f"{policy}: {label} (ms), share of {histogram.count}", xs * 1000, ys, width, top=1.0))
    return "\n".join(plots)


def save_png(path: Path, title: str, runs: Mapping[str, Run]) -> None:
    """Writes a PNG file. Needs matplotlib. Raises OSError if the file cannot be written."""
    figure_module = importlib.import_module("matplotlib.figure")  # an optional dependency
    figure: Any = figure_module.Figure(figsize=(14, 8), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 4).ravel()
    for place, (label, name) in enumerate((("TTFT", "ttft"), ("token gap", "gaps"))):
        for policy, run in runs.items():
            xs, ys = getattr(run.statistics, name).cdf()
            if len(xs):
                axes[place].step(xs * 1000, ys, where="post", label=policy)
        axes[place].set(title=label, xscale="log", xlabel="ms", ylim=(0, 1.02))
        axes[place].grid(True, which="both", alpha=0.3)
        axes[place].legend()
    bars = {
        "output tokens per second": [run.values()["output_throughput"] for run in runs.values()],
        "goodput, requests per second": [run.values()["request_goodput"] or 0 for run in runs.values()],
        "hit rate": [run.statistics.hit_rate for run in runs.values()],
        "share of the best hit rate": [
            run.hit_rates.found / run.hit_rates.best if run.hit_rates is not None and run.hit_rates.best else 0
            for run in runs.values()
        ],
        "retractions": [run.num_retractions for run in runs.values()],
        "Jain fairness": [run.statistics.fairness or 0 for run in runs.values()],
    }
    for axis, (label, heights) in zip(axes[2:], bars.items(), strict=True):
        axis.bar(list(runs), heights)
        axis.set(title=label)
        axis.tick_params(axis="x", rotation=30)
    figure.savefig(path, format="png", dpi=120)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000

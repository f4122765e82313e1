"""The command: what it prints, what it refuses, and that its figures do not depend on the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from recorded_schedules import Recorded, workload

from tercet.benchmarks import bench_scheduler, plots
from tercet.benchmarks.simulator.cost import PROFILES, load_profile, save_profile
from tercet.srt.io_struct import GenerateReq, pack_ids
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams

SMALL = ["--num-requests", "30", "--request-rate", "20", "--input-len", "8-40", "--output-len", "2-6"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    assert bench_scheduler.main([*SMALL, *argv]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_each_policy_has_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--traffic", "prefix-tree", "--tree-level-len", "64", "--policies", "lpm,fcfs", "--goodput", "ttft:500"]
    first, second = run(capsys, *argv), run(capsys, *argv)
    runs = first["runs"]
    assert isinstance(runs, dict) and list(runs) == ["lpm", "fcfs"]
    assert all(one["completed"] == 30 and one["request_goodput"] > 0 for one in runs.values())
    assert all(0 < one["optimum"]["hit_rate"] <= one["optimum"]["best_hit_rate"] for one in runs.values())
    assert first["max_resident_mib"] > 10  # type: ignore[operator]
    for one in (first, second):
        for figures in one["runs"].values():  # type: ignore[attr-defined]
            figures.pop("cpu_s")
    assert first["runs"] == second["runs"]
    assert first["profile"]["name"] == "smollm2-135m-2-cores"  # type: ignore[index]


def test_the_text_names_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    name = "llama-3.1-8b-h100-estimate"
    assert bench_scheduler.main([*SMALL, "--cost", name, "--plot"]) == 0
    out = capsys.readouterr().out
    assert f"Cost model {name}" in out and "pages of 64," in out and "lpm: TTFT (ms)" in out


def test_a_profile_survives_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    save_profile(PROFILES["smollm2-135m-2-cores"], path)
    assert load_profile(str(path)) == PROFILES["smollm2-135m-2-cores"]
    path.write_text('{"name": "x"}', encoding="utf-8")
    with pytest.raises(ValueError, match="missing required field"):
        load_profile(str(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_s": -1.0}, "step_s must be in"),
        ({"host_s": -5.0}, "host_s must be in"),
        ({"row_s": 1e308}, "row_s must be in"),
    ],
)
def test_costs_that_no_machine_has_are_refused(change: dict[str, float], message: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(PROFILES["smollm2-135m-2-cores"], path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_profile(str(path))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--save-cost", "/no/such/cost.json"], "--save-cost must name a file in a folder that exists, got '/no/such/"),
        (["--save-cost", "/"], "--save-cost must name a file in a folder that exists, got '/'"),
        (["--plot", "/no/such/plot.png"], "--plot must name a file in a folder that exists, got '/no/such/plot.png'"),
        (["--traffic", "agents", "--tree-levels", "3"], "--tree-levels has no effect"),
        (["--traffic", "mooncake"], "has no effect with --traffic mooncake"),
        (["--policies", "lpm,none"], "'none' is none of"),
        (["--round-trip", "5"], "--round-trip has no effect without --max-concurrency"),
        (["--planners", "tercet,none"], "'none' is none of"),
        (["--cost", "no-such-file"], "--cost must be a JSON file or one of"),
        (["--goodput", "ttft:1", "ttft:2"], "twice"),
        (["--plot", "x.pdf"], "must name a .png file"),
        (["--host", "0.0.0.0"], "a setting of the HTTP server"),
        (["--enable-hierarchical-cache"], "--enable-hierarchical-cache has no effect"),
        (["--hicache-size", "1"], "--hicache-size has no effect"),
        (["--kv-events-config", '{"publisher": "zmq"}'], "--kv-events-config has no effect"),
        (["--record-schedule", "file"], "--record-schedule has no effect"),
        (["--explain-schedule", "1"], "--explain-schedule has no effect"),
        (["--speculative-algorithm", "NGRAM"], "--speculative-algorithm has no effect without --replay"),
        (["--abort-after", "inf"], "must be above 0 and finite"),
    ],
)
def test_what_has_no_meaning_is_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_scheduler.main([*SMALL, *argv])
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_written_does_not_lose_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench_scheduler.main([*SMALL, "--save-cost", "/dev/full"])
    out, err = capsys.readouterr()
    assert caught.value.code == 1 and "No space left" in err
    assert json.loads(out.splitlines()[-1])["runs"]["lpm"]["completed"] == 30


def test_a_result_that_cannot_be_shown_does_not_lose_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = tmp_path / "cost.json"
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit, match="1"):
            bench_scheduler.main([*SMALL, "--plot", "--save-cost", str(cost)])
    assert load_profile(str(cost))


def test_a_file_of_settings_that_are_not_simulated_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("model_path: smollm2-135m\nenable_hierarchical_cache: true\nhicache_size: 1\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        bench_scheduler.main([*SMALL, "--config", str(path)])
    assert "--enable-hierarchical-cache has no effect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "text"), [("mooncake", "\n"), ("burstgpt", "Timestamp,Request tokens,Response tokens\n")]
)
def test_a_trace_without_requests_is_refused(
    kind: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit):
        bench_scheduler.main(["--traffic", kind, "--trace-path", str(path)])
    assert f"{path} has no request" in capsys.readouterr().err


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plots, "has_matplotlib", lambda: False)
    with pytest.raises(SystemExit):
        bench_scheduler.main([*SMALL, "--plot", "x.png"])
    assert "needs matplotlib" in capsys.readouterr().err


def test_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an optional extra")
    path = tmp_path / "plot.png"
    assert bench_scheduler.main([*SMALL, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_recording_is_compared_fitted_and_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, cost = tmp_path / "record", tmp_path / "cost.json"
    Recorded(path, 1).run(workload(4), num_turns=50)
    argv = ["--replay", str(path), "--policies", "lpm,fcfs", "--save-cost", str(cost)]
    assert bench_scheduler.main(argv) == 0
    out = capsys.readouterr().out
    assert "decides all" in out and "fitted to record" in out and "pages of 1," in out
    found = json.loads(out.splitlines()[-1])
    measured = found["recording"]["measured"]
    assert all(run["completed"] >= measured["num_completed"] > 5 for run in found["runs"].values())
    assert load_profile(str(cost)).name == "fitted to record"
    assert bench_scheduler.main(["--replay", str(path), "--max-running-requests", "2", "--cost", str(cost)]) == 0
    assert "2 running requests" in capsys.readouterr().out
    for ignored in (["--traffic", "agents"], ["--model-path", "qwen3-0.6b"]):
        with pytest.raises(SystemExit):
            bench_scheduler.main(["--replay", str(path), *ignored])
        assert "no effect with --replay" in capsys.readouterr().err


def test_drafts_are_simulated_for_recorded_answers_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fakes.next_token", lambda ids, seed, vocab_size, weights=0: (int(ids[-1]) * 5 + 1) % 8)
    path = tmp_path / "record"
    Recorded(path, 1).run(workload(5), num_turns=400)
    num_steps = []
    for drafts in ([], ["--speculative-algorithm", "NGRAM"]):
        assert bench_scheduler.main(["--replay", str(path), *drafts]) == 0
        num_steps.append(json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]["lpm"]["num_steps"])
    assert num_steps[1] < num_steps[0]
    with pytest.raises(SystemExit):
        bench_scheduler.main(["--replay", str(path), *drafts, "--cost", "llama-3.1-8b-h100-estimate"])
    assert "--speculative-algorithm needs the cost model of a CPU, got llama-3.1" in capsys.readouterr().err


def test_a_recording_with_tiers_is_simulated_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record"
    settings = {"enable_hierarchical_cache": True, "hicache_size": 1.0}
    Recorded(path, 1, host_blocks=8, **settings).run(workload(4), num_turns=50)
    assert bench_scheduler.main(["--replay", str(path)]) == 0
    assert "The simulation has none" in capsys.readouterr().out


@pytest.mark.parametrize("own", [[], ["--schedule-policy", "dlpm"]])
def test_settings_of_one_policy_do_not_hinder_the_comparison_with_others(
    own: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--policies", "dlpm,lpm", "--tenants", "2", "--tenant-weights", "0=2"]
    evictions = ["--eviction-policies", "value,lru", "--max-retained-share", "0.3"]
    assert list(run(capsys, *own, *argv, *evictions)["runs"]) == ["dlpm, value", "dlpm, lru", "lpm, value", "lpm, lru"]  # type: ignore[call-overload]


def test_the_tenants_of_a_recording_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record"
    sampling = SamplingParams(max_new_tokens=3, sampling_seed=0, ignore_eos=True)
    requests = [
        GenerateReq(str(number), pack_ids([number + 1] * 9), RequestOptions(sampling=sampling, tenant=tenant))
        for number, tenant in enumerate(["alice", "bob"] * 4)
    ]
    Recorded(path, 1).run(lambda turn: [] if turn else [*requests], num_turns=50)
    assert bench_scheduler.main(["--replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert "Hit rate of each tenant" in out and "alice" in out
    (run,) = json.loads(out.splitlines()[-1])["runs"].values()
    assert set(run["tenant_hit_rates"]) == {"alice", "bob"} and 0.5 < run["jain_fairness"] <= 1


def test_the_length_of_documents_that_are_not_sent_may_exceed_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "--num-requests", "1", "--traffic", "agents", "--turns", "1", "--context-length", "4096")


def test_requests_that_are_all_refused_are_a_failure_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--num-requests", "3", "--policies", "lpm,fcfs", "--input-len", "5000", "--max-total-tokens", "4096"]
    assert bench_scheduler.main(argv) == 1
    out = capsys.readouterr().out
    for policy in ("lpm", "fcfs"):
        assert f"\n{policy}: 3 refused, the first one with: " in out
    assert out.count("maximum context length is 4096 tokens") == 2

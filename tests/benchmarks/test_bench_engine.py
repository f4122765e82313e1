"""The benchmarks that start the engine's processes, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny_models
import torch
from bench_models import json_of, tiny_flags

from tercet.benchmarks import bench_offline_throughput, bench_prefix_cache
from tercet.benchmarks.offline_workloads import Span, random_requests
from tercet.benchmarks.peers import transformers_peer
from tercet.benchmarks.peers.transformers_peer import TransformersSide
from tercet.benchmarks.rounds import Round, TercetSide
from tercet.benchmarks.workloads import Request
from tercet.srt.entrypoints.engine import Engine

pytestmark = pytest.mark.e2e


def test_offline_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num-prompts", "5", "--input-len", "3-20", "--output-len", "2-9", "--rounds", "2", "--small-ceilings"]
    assert bench_offline_throughput.main([*tiny_flags(tmp_path), *sizes]) == 0
    found = json_of(capsys)
    requests = random_requests(5, Span(3, 20), Span(2, 9), 0, 131)
    assert found["input_tokens"] == sum(one.prompt_len for one in requests)
    assert found["output_tokens"] == sum(one.output_len for one in requests)
    assert list(found["seconds"]) == ["Tercet"] and len(found["seconds"]["Tercet"]) == 2
    assert found["limit_s"] > 0 and found["num_retractions"] == 0


def test_a_peer_that_fails_in_a_timed_round_does_not_discard_our_own_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing:
        attention = "fake"

        def __init__(self, *_: object) -> None:
            self._runs = 0

        def run(self, requests: Sequence[Request]) -> Round:
            self._runs += 1
            if self._runs > 1:  # the first is the warm-up
                raise RuntimeError("no memory left")
            return Round(1.0, [[0] * one.output_len for one in requests])

        def close(self) -> None:
            """It has nothing to close."""

    monkeypatch.setattr(transformers_peer, "TransformersSide", Failing)
    sizes = ["--num-prompts", "3", "--input-len", "3-9", "--output-len", "2", "--small-ceilings"]
    assert bench_offline_throughput.main([*tiny_flags(tmp_path), *sizes, "--compare", "transformers"]) == 1
    out = capsys.readouterr().out
    assert list(json.loads(out.splitlines()[-1])["seconds"]) == ["Tercet"]
    assert "transformers could not be measured: RuntimeError: no memory left" in out


def test_prefix_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num-groups", "2", "--prompts-per-group", "4", "--shared-len", "48", "--own-len", "8"]
    assert bench_prefix_cache.main([*tiny_flags(tmp_path), *sizes, "--output-len", "4", "--rounds", "1"]) == 0
    found = json_of(capsys)
    assert found["best_hit_rate"] == pytest.approx(3 * 48 / (4 * 56))
    # One prompt of a group is computed before the others, which then find what they share.
    assert 0.5 < found["hit_rate"] <= found["best_hit_rate"] + 0.02
    assert found["same_answers"] == 8


def test_transformers_and_the_engine_answer_the_same(tmp_path: Path) -> None:
    model = tiny_models.make_model("llama_31_tied")
    path = tiny_models.save(model, tmp_path / "model")
    requests = random_requests(4, Span(3, 20), Span(2, 12), 0, 131)
    peer = TransformersSide(path, torch.device("cpu"), torch.float32, requests)
    try:
        theirs = peer.run(requests)
        again = peer.run(requests)
    finally:
        peer.close()
    settings = {"dtype": "float32", "device": "cpu", "max_total_tokens": 500, "skip_tokenizer_init": True}
    with Engine(path, **settings) as engine:
        ours = TercetSide(engine).run(requests)
    assert ours.output_ids == theirs.output_ids == again.output_ids
    assert [len(ids) for ids in ours.output_ids] == [one.output_len for one in requests]


def test_the_cache_cannot_be_off_where_it_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_prefix_cache.main([*tiny_flags(tmp_path), "--disable-radix-cache"])
    assert "--disable-radix-cache is not allowed" in capsys.readouterr().err

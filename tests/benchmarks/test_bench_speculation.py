from __future__ import annotations

from pathlib import Path

import pytest
from bench_models import json_of
from bench_tokenizers import bytes_only
from tiny_models import make_model, save

from tercet.benchmarks import bench_speculation
from tercet.benchmarks.bench_speculation import Case
from tercet.managers.draft_cost import DraftCost
from tercet.model_executor import cpu_extension

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A tiny model whose tokens are bytes. The time of its steps has no influence on the number of drafts."""
    monkeypatch.setattr(DraftCost, "observe", lambda *_: None)
    monkeypatch.setattr(bench_speculation, "load_tokenizer", lambda path: bytes_only())
    path = save(make_model("llama"), tmp_path / "model")
    small = ["--batch-size", "1,3", "--prompt-len", "30", "--output-len", "24", "--rounds", "2", "--device", "cpu"]
    return ["--model-path", path, *small, "--max-total-tokens", "2048"]


def test_every_case_is_measured_with_the_same_tokens(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_speculation.main([*flags, "--temperature", "0,0.5"]) == 0
    cases = json_of(capsys)["cases"]
    found = [(row["kind"], row["temperature"], row["batch_size"]) for row in cases]
    assert found == [(kind, t, n) for kind in ("copy", "free", "edit") for t in (0, 0.5) for n in (1, 3)]
    assert all(len(row["plain"]) == len(row["drafted"]) == 2 and row["ratio"] > 0 for row in cases)
    accepted = {
        kind: sum(row["num_accepted_drafts"] for row in cases if row["kind"] == kind) for kind in ("free", "edit")
    }
    assert accepted["edit"] > max(accepted["free"], 0.6 * 2 * 2 * 4 * 24)


def test_a_changed_token_is_an_error(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bench_speculation.run

    def changed(engine, prompts, sampling, predictions=None):
        rate, tokens = run(engine, prompts, sampling, predictions)
        if engine.server_args.speculative_algorithm is not None and len(prompts) == 3:
            tokens[1][5] += 1
        return rate, tokens

    monkeypatch.setattr(bench_speculation, "run", changed)
    assert bench_speculation.main([*flags, "--temperature", "0"]) == 1
    said = capsys.readouterr().err
    assert [f"{Case(kind, 0.0, 3)}" in said for kind in ("copy", "free", "edit")] == [True] * 3
    assert "batch_size=1" not in said


def test_the_model_of_a_config_file_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"model-path: {tmp_path}/nowhere\n")
    with pytest.raises(SystemExit):
        bench_speculation.main(["--config", str(config), "--prompt-len", "10000000"])
    assert f"{tmp_path}/nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--temperature", "x"], "--temperature"),
        (["--temperature", "-1"], "must be finite and not negative"),
        (["--prompt-len", "10000000"], "--rounds times --batch-size times --prompt-len must be at most"),
        (["--prompt-len", "120", "--output-len", "40"], "the prompt has 136 tokens; at most 127 fit"),
    ],
)
def test_wrong_arguments(flags: list[str], capsys: pytest.CaptureFixture[str], given: list[str], message: str) -> None:
    with pytest.raises(SystemExit):
        bench_speculation.main([*flags, *given])
    assert message in capsys.readouterr().err

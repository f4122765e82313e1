from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from bench_models import json_of
from bench_tokenizers import bytes_only
from gguf_models import Kind, write_gguf
from tiny_models import make_model, reference_logits, save

from tercet.benchmarks import bench_quantization
from tercet.model_executor import cpu_extension
from tercet.srt.model_files import default_model

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")

TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune."


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A tiny model whose tokens are bytes, and a text of 90 of them."""
    monkeypatch.setattr(bench_quantization, "load_tokenizer", lambda path: bytes_only())
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    return ["--model-path", save(make_model("llama"), tmp_path / "model"), "--text", str(text)]


def test_what_is_measured_is_what_transformers_says(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_quantization.main([*flags, "--num-tokens", "65", "--window", "32"]) == 0
    found = {row["weights"]: row for row in json_of(capsys)["weights"]}
    assert list(found) == ["float32", "bfloat16", "int8", "int4"]
    model, losses = make_model("llama"), []
    for ids in torch.tensor(bytes_only().encode(TEXT)[:64]).view(2, 32):
        logprobs = reference_logits(model, ids.tolist()).log_softmax(1)
        losses += [-logprobs[i, ids[i + 1]].item() for i in range(31)]
    reference = found["float32"]
    assert reference["kl_divergence"] == 0 and reference["same_likeliest_token"] == 1
    assert reference["perplexity"] == pytest.approx(math.exp(sum(losses) / 62), rel=1e-3)
    divergences = [row["kl_divergence"] for row in found.values()]
    assert divergences[1] < divergences[3] and 0 < divergences[2] < divergences[3] < 2
    assert 0.3 < found["int4"]["same_likeliest_token"] < 1
    sizes = [row["weight_bytes"] for row in found.values()]
    assert sizes == sorted(sizes, reverse=True)


def test_weights_that_the_file_has_quantized_are_named(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory has them as they are, so the row of float32 has not the size of weights in float32."""
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), "llama", kind=Kind.Q8_0)
    assert bench_quantization.main([*flags, "--num-tokens", "32", "--window", "32", "--model-path", str(path)]) == 0
    assert "float32: memory has the matrices as in the file (int8), with the same results" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--window", "129", "--num-tokens", "129"], r"in [2, 128], got 129"),
        (["--window", "20", "--num-tokens", "19"], "at least --window 20"),
        (["--window", "32"], "--num-tokens must be at most 90"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    given: list[str], message: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_quantization.main([*flags, *given])
    assert message in capsys.readouterr().err


def test_without_a_model_the_error_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(default_model, "find_default_model", lambda: None)
    with pytest.raises(SystemExit):
        bench_quantization.main([])
    assert default_model.INSTALL_COMMAND in capsys.readouterr().err

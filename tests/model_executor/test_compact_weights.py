"""Compact weights: 12 bits for each bfloat16, and the same bits in every result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cpu_models import CONFIG
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from runner_driver import short_logits
from runners import make_runner, make_settings
from tiny_models import checkpoint

from tercet.model_executor import cpu_extension
from tercet.model_executor.cpu_calibration import ChosenTuning, default_tuning
from tercet.model_executor.layers import packing
from tercet.model_executor.layers.packing import gated_panels_of, panels_of
from tercet.model_executor.models.family import family_of
from tercet.model_executor.runner.model_runner import ModelRunner
from tercet.model_executor.runner.settings import WeightTypes, uses_compact
from tercet.model_executor.weights import packed_cache, packed_file

pytestmark = pytest.mark.skipif(
    cpu_extension.load() is None or not torch.ops.tercet_cpu.multiplies_bfloat16(),
    reason="no build of csrc/cpu for this processor multiplies bfloat16",
)
ops = torch.ops.tercet_cpu


def drawn_weight(n: int, k: int, high_bytes: list[int], exceptions: int, seed: int) -> torch.Tensor:
    """A weight of bfloat16 with any low bytes, these high bytes, and so many others at random places."""
    generator = torch.Generator().manual_seed(seed)
    high = torch.tensor(high_bytes)[torch.randint(len(high_bytes), (n, k), generator=generator)]
    places = torch.randint(n * k, (exceptions,), generator=generator)
    high.view(-1)[places] = torch.randint(256, (exceptions,), generator=generator)
    low = torch.randint(256, (n, k), generator=generator)
    return (high << 8 | low).to(torch.int32).to(torch.uint16).view(torch.bfloat16)


def finite_weight(n: int, k: int, seed: int) -> torch.Tensor:
    """A normal weight with exceptions: zeros, tiny and large numbers."""
    generator = torch.Generator().manual_seed(seed)
    weight = 0.05 * torch.randn(n, k, generator=generator)
    places = torch.randint(n * k, (max(n * k // 4096, 1),), generator=generator)
    weight.view(-1)[places] = torch.tensor([0.0, -0.0, 1e-20, -3e4, 1e30])[torch.arange(len(places)) % 5]
    return weight.bfloat16()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


@hypothesis_settings(max_examples=60)
@given(
    n=st.integers(1, 200),
    words=st.integers(1, 150),
    high_bytes=st.lists(st.integers(0, 255), min_size=1, max_size=15, unique=True),
    exceptions=st.integers(0, 6),
    seed=st.integers(0, 2**31),
)
def test_every_number_has_its_bits(n: int, words: int, high_bytes: list[int], exceptions: int, seed: int) -> None:
    weight = drawn_weight(n, 4 * words, high_bytes, exceptions, seed)
    compact = panels_of(weight, compact=True)
    found = ops.embedding(torch.arange(n), compact, torch.bfloat16)
    assert torch.equal(bits(found), bits(weight))
    if exceptions == 0 and n * words > 2000:
        assert compact.dtype == torch.uint8
        assert compact.nbytes <= panels_of(weight).nbytes * 7 / 8


@hypothesis_settings(max_examples=60)
@given(
    rows=st.one_of(st.integers(1, 40), st.integers(41, 300)),
    n=st.integers(1, 200),
    words=st.one_of(st.integers(1, 150), st.integers(400, 600)),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_layers_have_the_bits_of_plain_weights(rows: int, n: int, words: int, biased: bool, seed: int) -> None:
    weight = finite_weight(n, 4 * words, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4 * words, generator=generator).bfloat16()
    width = 2 * cpu_extension.lanes()
    bias = torch.randn(-(-n // width), width, generator=generator) if biased else None
    plain, compact = panels_of(weight).contiguous(), panels_of(weight, compact=True)
    for to_float in (False, True):
        assert torch.equal(ops.linear(x, compact, bias, n, to_float), ops.linear(x, plain, bias, n, to_float))
    assert torch.equal(ops.linear_argmax(x, compact, bias, n), ops.linear_argmax(x, plain, bias, n))
    gated = torch.cat((weight, weight.flip(0)))
    plain, compact = gated_panels_of(gated).contiguous(), gated_panels_of(gated, compact=True)
    assert torch.equal(ops.gated_linear(x, compact, None, n), ops.gated_linear(x, plain, None, n))


def test_most_weights_become_compact() -> None:
    compact = panels_of(torch.randn(960, 576).bfloat16(), compact=True)
    assert compact.dtype == torch.uint8
    assert compact.nbytes < 0.76 * 2 * 960 * 576


@pytest.mark.parametrize(
    "weight",
    [
        torch.randint(-(2**15), 2**15, (64, 128), dtype=torch.int16).view(torch.bfloat16),  # all exponents
        torch.randn(64, 126).bfloat16(),  # no whole groups
        torch.randn(64, 128),
        torch.empty(0, 128, dtype=torch.bfloat16),
    ],
    ids=["exponents", "width", "float32", "empty"],
)
def test_other_weights_stay_as_they_are(weight: torch.Tensor) -> None:
    assert panels_of(weight, compact=True).dtype == weight.dtype


def test_what_is_no_compact_weight_is_refused() -> None:
    compact = panels_of(torch.randn(64, 128).bfloat16(), compact=True)
    x = torch.randn(3, 128).bfloat16()
    with pytest.raises(RuntimeError, match="packed has 2 panels of 128 numbers a column"):
        ops.linear(x, compact, None, 65)
    with pytest.raises(RuntimeError, match="packed has 2 panels of 128 numbers a column"):
        ops.linear(x[:, :64].contiguous(), compact, None, 64)
    with pytest.raises(RuntimeError, match="need products of bfloat16 and an x of bfloat16"):
        ops.linear(x.float(), compact, None, 64)
    short = torch.zeros(64, dtype=torch.uint8)
    short[16] = 4  # what follows the tensor would be the size of a header
    damaged_weights = compact[:, :-64].contiguous(), torch.zeros_like(compact), compact[:0], short[:4].view(1, 4)
    for damaged in damaged_weights:
        with pytest.raises(RuntimeError, match="packed is no compact weight"):
            ops.linear(x, damaged, None, 64)
        with pytest.raises(RuntimeError, match="packed is no compact weight"):
            ops.embedding(torch.tensor([0]), damaged, torch.bfloat16)
    with pytest.raises(RuntimeError, match="there is no vector for id 64"):
        ops.embedding(torch.tensor([64]), compact, torch.bfloat16)
    with pytest.raises(RuntimeError, match="the vectors of compact weights are bfloat16"):
        ops.embedding(torch.tensor([1]), compact, torch.float32)


def test_large_models_of_bfloat16_have_compact_weights() -> None:
    dtype, plain = torch.bfloat16, WeightTypes(torch.bfloat16, {})

    def found(config=CONFIG, dtype=dtype, weights=plain, **tuning: str) -> bool:
        chosen = ChosenTuning(default_tuning()._replace(**tuning), "test")
        return uses_compact(chosen, dtype, weights, config)

    large = replace(CONFIG, vocab_size=400_000)
    assert found(large)
    assert not found()
    assert found(compact="always")
    assert not found(large, compact="never")
    assert not found(large, bfloat16="widened")
    assert not found(large, dtype=torch.float32)
    assert not found(large, weights=WeightTypes(torch.bfloat16, {"embed_tokens.weight": "int8"}))
    every = dict.fromkeys((parameter.name for parameter in family_of(CONFIG).parameters(CONFIG)), "int8")
    assert not found(weights=WeightTypes(torch.bfloat16, every), compact="always")
    assert not make_settings(CONFIG, dtype="bfloat16").compact


def test_the_cache_keeps_compact_weights_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_file, "bytes_on_huge_pages", lambda memory: memory.nbytes)
    config, folder = checkpoint(tmp_path / "model", "llama_31_tied", dtype=torch.bfloat16), tmp_path / "cache"

    def runner(compact: str) -> ModelRunner:
        path = tmp_path / f"{compact}.json"
        path.write_text(json.dumps({"chosen": default_tuning()._replace(compact=compact)._asdict()}))
        settings = {"max_total_tokens": 256, "max_running_requests": 3, "weight_cache": str(folder)}
        return make_runner(config, dtype="bfloat16", cpu_kernels=str(path), **settings)

    def matrix_dtype(one: ModelRunner) -> torch.dtype:
        return one.model.layers[0].inner_proj.packed.dtype

    plain, compact = runner("never"), runner("always")
    assert (matrix_dtype(plain), matrix_dtype(compact)) == (torch.bfloat16, torch.uint8)
    small, large = sorted(entry.stat().st_size for entry in folder.glob("*.packed"))
    assert small <= large
    monkeypatch.setattr(packing, "on_huge_pages", None)  # nothing is packed again
    monkeypatch.setattr(packed_cache, "write_packed", None)
    cached = runner("always")
    assert matrix_dtype(cached) == torch.uint8
    expected = short_logits(plain)
    assert torch.equal(short_logits(compact), expected)
    assert torch.equal(short_logits(cached), expected)

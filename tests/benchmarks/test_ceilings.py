from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tercet.benchmarks import ceilings
from tercet.benchmarks.ceilings import INT4, TORCH_PRODUCT, Rate, best_rate, matmul_flops_per_s
from tercet.model_executor import cpu_extension

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_products_of_every_type_that_layers_multiply_are_measured(dtype: torch.dtype) -> None:
    assert matmul_flops_per_s(CPU, dtype, 64) > 0


@pytest.mark.parametrize(
    ("product", "instructions", "best"),
    [
        (5.0, {"FMA": 2.0, "VDPBF16PS": 9.0}, Rate(9.0, "VDPBF16PS")),
        (5.0, {"FMA": 8.0, "VDPBF16PS": 4.0}, Rate(8.0, "FMA")),
        (5.0, {"FMA": 2.0}, Rate(5.0, TORCH_PRODUCT)),
        (5.0, {}, Rate(5.0, TORCH_PRODUCT)),
    ],
)
def test_the_ceiling_is_the_best_instruction_or_torchs_product(
    monkeypatch: pytest.MonkeyPatch, product: float, instructions: dict[str, float], best: Rate
) -> None:
    fake_ops = SimpleNamespace(instruction_rates=lambda dtype, seconds: instructions)
    monkeypatch.setattr(torch.ops, "tercet_cpu", fake_ops)
    monkeypatch.setattr(cpu_extension, "load", lambda: "a build")
    monkeypatch.setattr(ceilings, "matmul_flops_per_s", lambda *_: product)
    assert best_rate(CPU, torch.bfloat16, 64) == best
    measured = ceilings.measure_ceilings(CPU, small=True)
    assert (measured.flops_per_s, measured.flops_source) == best


def test_the_help_has_the_command_on_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ceilings.main(["--help"])
    assert "\n    python -m tercet.benchmarks.ceilings [--device cuda] [--results DIR]\n" in capsys.readouterr().out


def test_a_product_far_below_the_best_instruction_is_measured_at_a_small_size_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the full size it would take minutes on a processor that does not multiply the type."""
    fake_ops = SimpleNamespace(instruction_rates=lambda dtype, seconds: {"FMA": 100.0})
    monkeypatch.setattr(torch.ops, "tercet_cpu", fake_ops)
    monkeypatch.setattr(cpu_extension, "load", lambda: "a build")
    sizes: list[int] = []
    monkeypatch.setattr(ceilings, "matmul_flops_per_s", lambda _device, _dtype, size: sizes.append(size) or 0.1)
    assert best_rate(CPU, torch.int8, 2048) == Rate(100.0, "FMA")
    assert sizes == [256]


def test_weights_of_4_bits_have_no_product_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ops = SimpleNamespace(instruction_rates=lambda dtype, seconds: {"VPDPBUSD": 100.0})
    monkeypatch.setattr(torch.ops, "tercet_cpu", fake_ops)
    monkeypatch.setattr(cpu_extension, "load", lambda: "a build")
    monkeypatch.delattr(ceilings, "matmul_flops_per_s")
    assert best_rate(CPU, INT4, 64) == Rate(100.0, "VPDPBUSD")


def test_without_compiled_operations_the_ceiling_is_torchs_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_extension, "load", lambda: None)
    assert best_rate(CPU, torch.float32, 64).source == TORCH_PRODUCT


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_device_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ceilings.main(["--device", "cuda"])
    assert caught.value.code == 2
    assert "error: --device cuda needs a GPU" in capsys.readouterr().err

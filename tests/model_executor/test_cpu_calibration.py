"""The choice of the CPU kernels' tuning: by measurement on a hand-moved clock, kept for one machine, overridable."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runners import make_settings
from toy_runner import TOY

from tercet.model_executor import cpu_calibration, cpu_extension
from tercet.model_executor.cpu_calibration import ChosenTuning, CpuTuning, default_tuning, fastest, resolve_tuning
from tercet.model_executor.device.dtypes import dtype_name
from tercet.model_executor.layers.linear import can_pack
from tercet.model_executor.runner.kv_identity import kv_identity
from tercet.model_executor.weights.cache_folder import CacheFolder

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")

KEY = {"processor": "a", "cores": 2}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    default_tuning().apply()


@pytest.fixture
def other() -> CpuTuning:
    return default_tuning()._replace(block_kib=96, chunk=256)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def chosen(times: dict[CpuTuning, list[float]], monkeypatch: pytest.MonkeyPatch) -> CpuTuning:
    """The choice among candidates, default first, whose calls take these times in turns. The last time repeats."""
    clock, applied, left = Clock(), [], {one: list(turns) for one, turns in times.items()}
    monkeypatch.setattr(CpuTuning, "apply", lambda self: applied.append(self))

    def call(tuning: CpuTuning) -> None:
        assert tuning == applied[-1]
        turns = left[tuning]
        clock.now += turns.pop(0) if len(turns) > 1 else turns[0]

    default, *others = times
    return fastest(default, others, [call], 1e9, clock)


def test_another_candidate_has_to_be_clearly_faster(monkeypatch: pytest.MonkeyPatch, other: CpuTuning) -> None:
    default = default_tuning()
    assert chosen({default: [1.0], other: [0.96]}, monkeypatch) == default
    assert chosen({default: [1.0], other: [0.94]}, monkeypatch) == other
    best = other._replace(block_kib=640)
    assert chosen({default: [1.0], other: [0.9], best: [0.8]}, monkeypatch) == best


def test_the_least_time_of_several_turns_counts(monkeypatch: pytest.MonkeyPatch, other: CpuTuning) -> None:
    """Other processes can only make a call slower."""
    default = default_tuning()
    assert chosen({default: [50.0, 1.0, 9.0], other: [1.2]}, monkeypatch) == default
    assert chosen({default: [1.0], other: [70.0, 30.0, 8.0, 0.5]}, monkeypatch) == other


def test_a_gain_has_to_be_measured_twice(monkeypatch: pytest.MonkeyPatch, other: CpuTuning) -> None:
    """The best of many candidates may seem faster by chance."""
    default, rounds = default_tuning(), cpu_calibration._ROUNDS
    assert chosen({default: [1.2] * rounds + [1.0], other: [1.0]}, monkeypatch) == default
    assert chosen({default: [1.2] * 2 * rounds, other: [1.0]}, monkeypatch) == other


def test_the_budget_ends_the_turns(monkeypatch: pytest.MonkeyPatch, other: CpuTuning) -> None:
    clock, calls = Clock(), []

    def call(_: CpuTuning) -> None:
        clock.now += 10
        calls.append(1)

    fastest(default_tuning(), [other], [call], 1.0, clock)
    assert len(calls) == 4, "two turns of two candidates"


def test_a_real_measurement_chooses_a_candidate_and_leaves_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**6))
    threads = torch.ops.tercet_cpu.num_threads()
    monkeypatch.setattr(cpu_calibration, "_ROUNDS", 1)
    tuning = cpu_calibration.measure(clock=lambda: float(next(ticks)))  # all calls take one tick
    assert tuning == default_tuning() and torch.ops.tercet_cpu.num_threads() == threads


@pytest.mark.parametrize("cache", ["l1", "l2"])
def test_panels_are_prefetched_into_the_cache_that_is_faster(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    def call(tuning: CpuTuning) -> None:
        clock.now += 0.9 if tuning.prefetch == cache else 1.0

    monkeypatch.setattr(cpu_calibration, "_uncached_linears", lambda dtype: [call])
    assert cpu_calibration.measure(clock) == default_tuning()._replace(prefetch=cache)


def test_onednn_is_chosen_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each type that it multiplies."""
    clock = itertools.count()

    class Fast:
        def __init__(self, weight: torch.Tensor) -> None:
            self.dtype = weight.dtype

        def __call__(self, x: torch.Tensor) -> None:
            assert x.dtype == self.dtype and len(x) in cpu_calibration._FEW_AND_MANY
            took.append(-0.5)

    took: list[float] = []
    monkeypatch.setattr(cpu_calibration, "OneDnnLinear", Fast)
    dtypes = [torch.float32] + [torch.bfloat16] * (default_tuning().bfloat16 == "native")
    names = [dtype_name(dtype) for dtype in dtypes if can_pack(torch.empty(1, 1, dtype=dtype))]
    tuning = cpu_calibration.measure(clock=lambda: next(clock) + sum(took))
    assert tuning == default_tuning()._replace(onednn="+".join(names) or "none")


@pytest.mark.parametrize(("rate_of_onednn", "is_chosen"), [(1e12, True), (0.155e12, False)])
def test_matrix_units_are_chosen_although_calls_of_onednn_have_fixed_costs(
    rate_of_onednn: float, is_chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Panels with the rate of widened products on an Intel Xeon (docs/performance.md). Two calls of oneDNN with 27 us
    each (docs/log.md) and 1.2 MB of weights at 40 GB/s, with a rate of matrix units, and with that of the panels."""
    clock = Clock()
    monkeypatch.setattr(CpuTuning, "apply", lambda self: None)
    default = default_tuning()

    def call(rows: int, tuning: CpuTuning) -> None:
        ops = 2 * rows * cpu_calibration._NUM_OUT * cpu_calibration._NUM_IN
        fixed_s, rate = (0.0, 0.155e12) if tuning == default else (2 * 27e-6 + 1.2e6 / 40e9, rate_of_onednn)
        clock.now += fixed_s + ops / rate

    calls = [functools.partial(call, rows) for rows in cpu_calibration._FEW_AND_MANY]
    onednn = default._replace(onednn="bfloat16")
    assert fastest(default, [onednn], calls, 1.0, clock) == (onednn if is_chosen else default)


def kept_or_measured(folder: Path | None, tuning: CpuTuning, key: dict[str, Any] = KEY) -> ChosenTuning:
    return cpu_calibration.kept_or_measured(folder, key, lambda: tuning)


def test_a_measurement_is_kept_for_its_machine(tmp_path: Path, other: CpuTuning) -> None:
    folder, default = tmp_path / "cache", default_tuning()
    assert kept_or_measured(folder, other) == (other, "measured")
    (path,) = folder.iterdir()
    assert kept_or_measured(folder, default) == (other, str(path))
    assert kept_or_measured(folder, default, KEY | {"cores": 4}) == (default, "measured")
    assert kept_or_measured(folder, default) == (other, str(path)), "both are kept"
    assert kept_or_measured(None, default) == (default, "measured")


def test_a_message_can_have_the_name_of_every_file(tmp_path: Path, other: CpuTuning) -> None:
    folder = tmp_path / "not UTF-8: \udcff"
    for _ in range(2):
        chosen = kept_or_measured(folder, other)
    assert chosen.source.startswith(rf"{tmp_path}/not UTF-8: \udcff/"), "as in the log"


def test_a_server_that_makes_room_leaves_a_file_that_is_written(
    tmp_path: Path, other: CpuTuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def late(*names: str) -> None:
        CacheFolder(tmp_path).make_room(0)
        link(*names)

    monkeypatch.setattr(os, "link", late)
    assert kept_or_measured(tmp_path, other) == (other, "measured")
    (path,) = tmp_path.iterdir()
    assert kept_or_measured(tmp_path, default_tuning()) == (other, str(path))


def test_what_is_not_kept_changes_no_bit(tmp_path: Path, other: CpuTuning) -> None:
    """An engine that is started again must go on with the same bits, and might measure something else."""
    (tmp_path / "file").touch()
    measured = other._replace(bfloat16="widened" if other.bfloat16 == "native" else "native", onednn="float32")
    assert kept_or_measured(None, measured).tuning == other
    assert kept_or_measured(tmp_path / "file" / "x", measured).tuning == other
    assert kept_or_measured(tmp_path / "cache", measured).tuning == measured


def test_of_two_servers_that_measure_at_once_the_first_decides(tmp_path: Path, other: CpuTuning) -> None:
    """The second one would choose the file's kind of products after a restart, and continue streams with other bits."""

    def measure_slowly() -> CpuTuning:
        assert kept_or_measured(tmp_path, other) == (other, "measured")
        return default_tuning()

    (chosen, source) = cpu_calibration.kept_or_measured(tmp_path, KEY, measure_slowly)
    (path,) = tmp_path.iterdir()
    assert (chosen, source) == (other, str(path))


DAMAGES: list[Callable[[str], str]] = [
    lambda text: "",
    lambda text: text[: len(text) // 2],
    lambda text: "[]",
    lambda text: text.replace('"processor": "a"', '"processor": "b"'),
    lambda text: text.replace("256", "-1"),
    lambda text: text.replace("256", "250"),
    lambda text: text.replace("96", str(2**60)),
    lambda text: "[" * 100_000,
    lambda text: text.replace("widened", "wide").replace("native", "wide"),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_file_is_measured_again(
    tmp_path: Path, other: CpuTuning, damage: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, cpu_calibration.logger.name)
    kept_or_measured(tmp_path, other)
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    path.write_text(damage(text))
    assert path.read_text() != text
    assert kept_or_measured(tmp_path, other) == (other, "measured")
    assert path.read_text() == text and f"{path}" in caplog.text


def test_a_folder_that_cannot_be_written_is_logged(
    tmp_path: Path, other: CpuTuning, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert kept_or_measured(tmp_path / "file" / "x", other) == (other, "measured")
    assert "Each start measures again" in caplog.text


def test_a_setting_overrides_the_measurement(tmp_path: Path, other: CpuTuning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_calibration, "measure", lambda: pytest.fail("nothing is measured"))
    assert resolve_tuning("fixed", "off") == (default_tuning(), "default")
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps({"chosen": other._asdict()}))
    settings = make_settings(TOY, attention_backend="cpu", dtype="float32", cpu_kernels=str(path))
    assert settings.cpu_kernels == (other, str(path))
    with pytest.raises(ValueError, match=r"--cpu-kernels .* needs the attention backend cpu, but it is torch"):
        make_settings(TOY, attention_backend="torch", dtype="float32", cpu_kernels=str(path))
    with pytest.raises(ValueError, match="--cpu-kernels /missing cannot be read"):
        resolve_tuning("/missing", "off")
    path.write_text("{}")
    with pytest.raises(ValueError, match='the file must be JSON with "chosen"'):
        resolve_tuning(str(path), "off")
    path.write_text(json.dumps({"chosen": default_tuning()._asdict() | {"onednn": "float16"}}))
    with pytest.raises(ValueError, match=r"onednn must be none, float32, bfloat16 or float32\+bfloat16, got 'float16'"):
        resolve_tuning(str(path), "off")
    path.write_text(json.dumps({"chosen": default_tuning()._asdict() | {"prefetch": "l3"}}))
    with pytest.raises(ValueError, match="prefetch must be l1 or l2, got 'l3'"):
        resolve_tuning(str(path), "off")


def test_the_kind_of_products_is_part_of_the_identity_of_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    def identity(**changes: Any) -> bytes:
        tuning = default_tuning()._replace(**changes)
        monkeypatch.setattr(
            "tercet.model_executor.runner.settings.resolve_tuning", lambda *_: ChosenTuning(tuning, "x")
        )
        settings = make_settings(TOY, attention_backend="cpu", dtype="bfloat16")
        return kv_identity(settings, TOY)

    assert identity() == identity(block_kib=96, chunk=64, prefetch="l1")
    assert identity(bfloat16="native") != identity(bfloat16="widened")


def test_the_key_has_what_a_measurement_depends_on(tmp_path: Path) -> None:
    key = cpu_calibration.machine_key()
    assert key["torch"] == torch.__version__ and key["build"] in {one.name for one in cpu_extension.VARIANTS}
    assert key["sources"] and key["cores"] >= 1 and key["processor"]
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: X\ncpu MHz\t: 17.3\nflags\t: a b\n\nprocessor\t: 1\n")
    assert cpu_calibration.processor(cpuinfo) == "model name X; flags a b"
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 50\nFeatures\t: fp asimd\nCPU part\t: 0xd0c\n")
    assert cpu_calibration.processor(cpuinfo) == "CPU part 0xd0c; Features fp asimd"
    assert cpu_calibration.processor(tmp_path / "missing")


KINDS = ["native", "widened"]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 40, 96, 640]),
    st.sampled_from([64, 256, 1024]),
    st.sampled_from(["bf16", "bf16 in fp32", "fp32", "int4", "int8"]),
    st.sampled_from(KINDS),
    st.sampled_from(["l1", "l2"]),
    st.integers(1, 90),
    st.integers(1, 20),
    st.integers(0, 2**31),
)
def test_a_row_has_the_same_bits_with_every_tuning_and_in_every_batch(
    block_kib: int, chunk: int, form: str, kind: str, prefetch: str, rows: int, groups: int, seed: int
) -> None:
    from tercet.model_executor.layers.cpu_layers import CpuGatedLinear, CpuLinear  # needs the operations
    from tercet.model_executor.layers.quantized_weight import GROUP, quantize

    default = default_tuning()
    if kind == "native" and default.bfloat16 != "native":
        kind = "widened"
    generator = torch.Generator().manual_seed(seed)
    x, weight = (
        torch.randn(rows, GROUP * groups, generator=generator),
        torch.randn(70, GROUP * groups, generator=generator),
    )
    if form.startswith("int"):
        stored: Any = quantize(weight, form)
    else:
        stored = weight if form == "fp32" else weight.bfloat16()
        x = x.bfloat16() if form == "bf16" else x
    for layer in (CpuLinear(stored, to_float=True), CpuGatedLinear(stored)):
        default._replace(bfloat16=kind).apply()
        expected = layer(x)
        CpuTuning(block_kib, chunk, kind, prefetch).apply()
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer(x[-1:].contiguous()), expected[-1:])


def test_each_kind_of_products_of_bfloat16_is_exact_enough() -> None:
    """Widened products are exact, so their error is no larger than that of native ones."""
    from tercet.model_executor.layers.cpu_layers import CpuLinear  # needs the operations

    default = default_tuning()
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((50, 1536), (90, 1536)))
    expected = x.double() @ weight.double().T
    errors = {}
    for kind in KINDS if default.bfloat16 == "native" else ["widened"]:
        default._replace(bfloat16=kind).apply()
        errors[kind] = float((CpuLinear(weight, to_float=True)(x) - expected).norm() / expected.norm())
    assert errors["widened"] < 3e-7 and errors["widened"] <= errors.get("native", 1e-6) < 2e-6


def test_a_tuning_that_the_build_does_not_have_is_refused() -> None:
    default = default_tuning()
    for tuning in (default._replace(chunk=100), default._replace(chunk=2048)):
        with pytest.raises(ValueError, match="chunk must be a multiple of 64"):
            tuning.apply()
    if default.bfloat16 != "native":
        with pytest.raises(ValueError, match="can multiply bfloat16 only as float"):
            default._replace(bfloat16="native").apply()
    if not can_pack(torch.empty(1, 1, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="oneDNN has no linear layers of bfloat16 here"):
            default._replace(onednn="float32+bfloat16").apply()

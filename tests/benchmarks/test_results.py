from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from tercet.benchmarks.limits import Ceilings
from tercet.benchmarks.report import json_line
from tercet.benchmarks.results import Result, circumstances, finish, number, percent, write


def made() -> Result:
    result = Result("some-model-1.5b", "Some benchmark", "python -m some", ["--flag", "a b"], torch.device("cpu"))
    result.ceilings = Ceilings(4.3e12, 790e12)
    table = result.table("A table", ["what", "how much"])
    table.row("this", "1")
    table.row("another", "2")
    table.notes.append("A note.")
    result.values["seconds"] = float("inf")
    return result


def test_the_last_line_is_json_that_names_the_circumstances(capsys: pytest.CaptureFixture[str]) -> None:
    finish(made(), argparse.Namespace(results=None))
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found["benchmark"] == "some-model-1.5b" and found["command"] == "python -m some --flag 'a b'"
    assert found["versions"]["torch"] == torch.__version__ and found["hardware"]["cores"] >= 1
    assert found["ceilings"] == {"bytes_per_s": 4.3e12, "flops_per_s": 790e12, "flops_source": "matrix product"}
    assert found["seconds"] == "inf" and found["compute_threads"] == torch.get_num_threads()
    assert lines[:-1] == made().text().splitlines()


def on_a_gpu() -> Result:
    """A result whose circumstances are those of another machine."""
    result = made()
    result.where = {
        "date": "2030-01-02T03:04:05+00:00",
        "command": "python -m some --flag 'a b'",
        "tercet_commit": "abc",
        "python": "3.11",
        "hardware": {"cpu": "Some CPU (TM) @ 3.1GHz", "cores": 16, "memory_gib": 128, "gpus": ["A GPU", "Other"]},
        "versions": {"tercet": "1.2", "CUDA": "13"},
        "device": "cuda",
    }
    return result


def test_a_result_in_markdown_and_for_a_terminal() -> None:
    assert (
        on_a_gpu().markdown()
        == """# Some benchmark

- hardware: A GPU, Other, Some CPU (TM) @ 3.1GHz, 16 cores, 128 GiB
- date: 2030-01-02T03:04:05+00:00
- commit: abc
- versions: Python 3.11, tercet 1.2, CUDA 13
- command: `python -m some --flag 'a b'`
- ceilings in this run: copy 4.3 TB/s (read + write), 790 TFLOP/s (matrix product)

### A table

| what | how much |
| --- | --- |
| this | 1 |
| another | 2 |

A note.
"""
    )
    assert (
        on_a_gpu().text()
        == """
A table
what     how much
this     1
another  2
A note.

ceilings in this run: copy 4.3 TB/s (read + write), 790 TFLOP/s (matrix product)"""
    )


@pytest.mark.parametrize(("device", "hardware"), [("cuda", "a-gpu"), ("cpu", "some-cpu-tm-3.1ghz")])
def test_files_are_called_after_date_hardware_and_name(
    device: str, hardware: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = on_a_gpu()
    result.where["device"] = device
    finish(result, argparse.Namespace(results=tmp_path / "new" / "folder"))
    stem = f"2030-01-02-{hardware}-some-model-1.5b"
    markdown, plain = (tmp_path / "new" / "folder" / f"{stem}.{suffix}" for suffix in ("md", "json"))
    *_, first, second, last = capsys.readouterr().out.splitlines()
    assert [first, second] == [f"written: {markdown}", f"written: {plain}"]
    assert json.loads(last) == json.loads(plain.read_text()) == json.loads(json_line(result.as_json()))
    assert markdown.read_text() == result.markdown()


def test_a_benchmark_of_an_external_server_names_no_device(tmp_path: Path) -> None:
    result = Result("external", "External", "python -m some", [], None)
    found = result.as_json()
    assert found["device"] is None and found["ceilings"] is None and "compute_threads" not in found
    assert result.text() == "" and "ceilings" not in result.markdown()
    assert json.loads(write(result, tmp_path)[1].read_text()) == found


@pytest.mark.parametrize(("cuda", "hip", "name"), [("13.0", None, "CUDA"), (None, "7.1", "ROCm")])
def test_the_circumstances_name_the_gpu_and_its_software(
    cuda: str | None, hip: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    found = circumstances("python -m some", [], torch.device("cuda:1"))
    assert found["hardware"]["gpus"] == ["GPU of cuda:1"] and found["device"] == "cuda:1"
    assert {"CUDA", "ROCm"} & found["versions"].keys() == {name} and found["versions"][name] == (cuda or hip)


def test_a_result_is_shown_even_if_it_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")  # in place of a folder that has become unusable since the start
    with pytest.raises(SystemExit) as caught:
        finish(made(), argparse.Namespace(results=tmp_path / "file"))
    assert isinstance(caught.value.code, str), "a message, and the exit code 1"
    assert caught.value.code.startswith("--results: ") and str(tmp_path / "file") in caught.value.code
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["benchmark"] == "some-model-1.5b"


def test_a_result_is_written_even_if_it_cannot_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full, pytest.raises(SystemExit, match="1"):
        monkeypatch.setattr(sys, "stdout", full)
        finish(made(), argparse.Namespace(results=tmp_path))
    assert {path.suffix for path in tmp_path.iterdir()} == {".md", ".json"}
    assert capsys.readouterr().err == "the result cannot be shown: No space left on device\n"


def test_a_second_run_of_a_day_does_not_replace_the_first(tmp_path: Path) -> None:
    written = []
    for seed in range(3):
        result = made()
        result.values["seed"] = seed
        written.append(write(result, tmp_path))
    assert [json.loads(plain.read_text())["seed"] for _, plain in written] == [0, 1, 2]
    first, *others = (markdown.name.removesuffix(".md") for markdown, _ in written)
    assert others == [f"{first}-2", f"{first}-3"] and len(list(tmp_path.iterdir())) == 6
    written[0][0].unlink()
    written[1][1].unlink()
    assert write(made(), tmp_path)[0].name == f"{first}-4.md", "a file that has lost its partner stays"


def test_a_row_has_a_cell_for_every_heading() -> None:
    with pytest.raises(AssertionError, match="1 cells under 2 headings"):
        made().tables[0].row("alone")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1234567.8, "1,234,568"),
        (-1234.5, "-1,234"),
        (123.4, "123"),
        (99.44, "99.4"),
        (12.34, "12.3"),
        (0.001234, "0.00123"),
        (0, "0"),
        (None, "-"),
    ],
)
def test_numbers_have_three_digits(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_shares() -> None:
    assert percent(0.1234) == "12.3 %" and percent(None) == "-"

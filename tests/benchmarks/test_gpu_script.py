"""scripts/gpu on a machine without a GPU: its --tiny parts, of which one is made to fail."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from source_tree import HOUSE, ROOT, When

from tercet.benchmarks import bench_one_batch

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu"


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    # As on a machine where nothing of ours is installed.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHON": sys.executable}
    return subprocess.run([str(SCRIPT), *flags], env=env, capture_output=True, text=True)


def test_a_part_that_fails_costs_the_others_nothing(tmp_path: Path) -> None:
    ran = run("--tiny", "--only", "one-batch,fails", "--output", str(tmp_path), "--commit", "abc123")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    last = json.loads(ran.stdout.splitlines()[-1])
    assert last["parts"]["one-batch"]["state"] == "passed"
    assert last["parts"]["fails"]["state"] == "failed with exit code 2"
    files = {path.suffix: path.read_text() for path in tmp_path.iterdir()}
    assert set(files) == {".md", ".json", ".log"}
    assert "## One batch: tiny" in files[".md"].replace("toy", "tiny") and "Commit abc123." in files[".md"]
    assert str(tmp_path) not in files[".md"].splitlines()[2]
    assert json.loads(files[".json"])["parts"]["one-batch"]["decode"]
    assert "tercet bench one-batch" in files[".md"] and "--results" not in files[".md"] + files[".json"]
    assert "--model-path must be a path or one of" in files[".log"]


@pytest.mark.parametrize("version", [["../precious"], ["3.12", "--quick"], ["--help"]])
def test_packages_are_fetched_for_a_version_of_python_only(tmp_path: Path, version: list[str]) -> None:
    for name in ("scripts", ".gpu-packages", "precious"):
        (tmp_path / name).mkdir()
    copy = tmp_path / "scripts" / "gpu"
    copy.write_text(SCRIPT.read_text())
    command = ["bash", str(copy), "--fetch", *version]
    ran = subprocess.run(command, env=os.environ | {"PYTHON": "false"}, capture_output=True, text=True)
    assert ran.returncode == 2 and f"such as 3.12, got: {' '.join(version)}" in ran.stderr
    assert (tmp_path / "precious").exists()


def test_a_session_without_parts_is_refused(tmp_path: Path) -> None:
    ran = run("--tiny", "--only", "fails", "--skip", "fails", "--output", str(tmp_path))
    assert ran.returncode == 2 and "--only and --skip leave no part" in ran.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("budget", ["nan", "inf", "-1", "soon"])
def test_a_budget_that_is_no_number_of_seconds_is_refused(tmp_path: Path, budget: str) -> None:
    ran = run("--tiny", "--only", "fails", "--budget-s", budget, "--output", str(tmp_path))
    assert ran.returncode == 2 and f"finite and not negative, got '{budget}'" in ran.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_part(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = run("--tiny", "--only", "fails", "--output", str(tmp_path / "file" / "results"))
    assert ran.returncode == 2 and "--output: no file can be made there: " in ran.stderr
    assert "Traceback" not in ran.stderr and "== fails" not in ran.stdout


_FILLS_THE_DISK = """
import pathlib, sys
(running,) = pathlib.Path(sys.argv[1]).glob("*.running.log")
running.with_name(running.name.replace(".running.log", ".log.new")).symlink_to("/dev/full")
"""


def test_a_full_disk_ends_the_session_and_keeps_the_results_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    session = importlib.import_module("gpu_session")
    codes = {"first": "pass", "fills": _FILLS_THE_DISK, "third": "pass"}
    parts = [
        session.Part(name, "", [sys.executable, "-c", code, str(tmp_path), "pytest"], needs_s=0, limit_s=60)
        for name, code in codes.items()
    ]
    monkeypatch.setattr(session, "tiny_parts", lambda scratch: parts)
    args = argparse.Namespace(
        tiny=True, budget_s=3600, only=None, skip="", list=False, output=tmp_path, quick=False, commit=None
    )
    assert session.session(argparse.ArgumentParser(), args, tmp_path) == 1
    out = capsys.readouterr().out
    assert "its results cannot be written: [Errno 28] No space left on device" in out and "== third" not in out
    files = {path.suffix: path.read_text() for path in tmp_path.iterdir()}
    assert set(files) == {".md", ".json", ".log"}
    assert all("first" in text and "fills" not in text for text in files.values())


def test_two_sessions_of_one_minute_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    session = importlib.import_module("gpu_session")
    args = argparse.Namespace(commit=None, tiny=True, output=tmp_path)
    found = []
    for second in (3, 4):
        begun = datetime(2030, 1, 2, 3, 4, second, tzinfo=UTC)
        monkeypatch.setattr(session, "datetime", SimpleNamespace(now=lambda zone, begun=begun: begun))
        found.append(session.Report(args))
    assert not {*found[0].files, found[0].running} & {*found[1].files, found[1].running}


def test_without_time_nothing_is_started(tmp_path: Path) -> None:
    ran = run("--tiny", "--only", "one-batch", "--budget-s", "0", "--output", str(tmp_path))
    assert ran.returncode == 1
    assert json.loads(ran.stdout.splitlines()[-1])["parts"]["one-batch"]["state"] == "not started: no time left"


def test_a_part_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    session = importlib.import_module("gpu_session")
    child = "import time; print('child', flush=True); time.sleep(600)"
    code = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    part = session.Part("hangs", "", [sys.executable, "-c", code, "pytest"], needs_s=0, limit_s=3)
    outcome = session.run(part, time.monotonic() + 3600, tmp_path, tmp_path / "running.log")
    assert outcome.state == "stopped after 3 s" and outcome.output.startswith("begun")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["script", "group"])
def test_a_session_that_is_cut_off_writes_what_it_has(
    tmp_path: Path, send: Callable[[int, int], None], signum: int
) -> None:
    """A signal to the script alone, or to all its processes: the output of the part that runs is in the log."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHON": sys.executable}
    flags = ["--tiny", "--only", "hangs,one-batch", "--output", str(tmp_path)]
    session = subprocess.Popen(
        [str(SCRIPT), *flags], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    while not any("begun" in file.read_text() for file in tmp_path.glob("*.running.log")):
        assert session.poll() is None
        time.sleep(0.05)
    send(session.pid, signum)
    session.communicate()
    assert session.returncode == 1
    (log,) = tmp_path.glob("*.log")
    assert "hangs: interrupted" in log.read_text() and "begun" in log.read_text()


def test_a_session_whose_output_nobody_reads_writes_its_files(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHON": sys.executable}
    with open("/dev/full", "wb") as full:
        command = [str(SCRIPT), "--tiny", "--only", "fails", "--output", str(tmp_path)]
        ran = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ran.returncode, ran.stderr) == (1, "")
    assert {path.suffix for path in tmp_path.iterdir()} == {".md", ".json", ".log"}


def test_missing_packages_are_named_in_one_line(tmp_path: Path) -> None:
    """A Python without our packages: only the standard library."""
    program = str(SCRIPT.with_name("gpu_session.py"))
    ran = subprocess.run([sys.executable, "-S", "-E", program], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 2
    assert ran.stdout.count("\n") == 1 and " lacks gguf, httptools," in ran.stdout and "zmq;" in ran.stdout


@pytest.fixture
def python(tmp_path: Path) -> dict[str, str]:
    """An environment whose Python is version 3.12 and prints its search path and arguments."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nif [ "$1" = -c ]; then echo 3.12; else echo "$PYTHONPATH"; echo "$@"; fi\n')
    program.chmod(0o755)
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHON": str(program)}


def test_packages_beside_the_checkout_are_found(python: dict[str, str]) -> None:
    ran = subprocess.run([str(SCRIPT)], env=python, capture_output=True, text=True)
    assert ran.stdout.splitlines()[0].split(":")[1] == str(SCRIPT.parents[1] / ".gpu-packages" / "3.12")


def test_all_that_an_image_with_transformers_lacks_is_fetched(
    python: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    needed = set(importlib.import_module("gpu_session").NEEDED)
    there = {"torch", "triton", "transformers"}
    there |= {"jinja2", "numpy", "safetensors", "tokenizers", "tqdm", "yaml"}  # which those need themselves
    ran = subprocess.run([str(SCRIPT), "--fetch", "3.999"], env=python, capture_output=True, text=True)
    fetched = {word.replace("pyzmq", "zmq").replace("-", "_") for word in ran.stdout.split()}
    assert there < needed and needed - there <= fetched


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], list[Any]]:
    """The parts on a machine with the CUDA toolkit."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    module = importlib.import_module("gpu_parts")
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/opt/{name}")
    return module.parts


def packages_of(modules: set[str], files: set[Path]) -> set[str]:
    """The packages without which these modules of ours, and these files of scripts/ and tests/, cannot be imported."""
    packages, modules, todo = set[str](), set(modules), set(files)
    seen = set[Path]()
    while todo:
        seen.add(file := todo.pop())
        for item in HOUSE.imports_of(file):
            first, _, inside = item.target.partition(".")
            helper = ROOT / "tests" / f"{first}.py"
            if item.when is not When.ALWAYS:
                continue
            if first == "tercet":
                modules |= {inside, f"{inside}.{item.name}"} & HOUSE.modules().keys()
            elif helper.exists():
                todo |= {helper} - seen
            else:
                packages.add(first)
    loaded = {name for module in modules for name in HOUSE.loaded_with(module)}
    items = [item for name in loaded for item in HOUSE.imports(name)]
    packages |= {item.target.partition(".")[0] for item in items if not item.internal and item.when is When.ALWAYS}
    return packages - sys.stdlib_module_names


def test_all_that_the_parts_import_is_asked_for_first(plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    needed = set(importlib.import_module("gpu_session").NEEDED)
    words = {word for part in plan(False) for word in part.command}
    benchmarks = {word.removeprefix("tercet.") for word in words if word.startswith("tercet.benchmarks.")}
    files = {ROOT / "tests" / "conftest.py", *(ROOT / "tests" / "gpu").glob("*.py")}
    files |= {Path(word) for word in words if word.endswith("gpu_compile.py")}
    packages = packages_of(benchmarks, files)
    assert {"hypothesis", "torch", "msgspec"} <= packages <= needed, packages - needed
    assert "pytest_timeout" in needed, "setup.cfg sets its time limit, and pytest refuses unknown settings"


@pytest.mark.parametrize("quick", [False, True])
def test_small_steps_are_measured_with_their_kernels_and_without(plan, quick: bool) -> None:
    parts = {part.name: part for part in plan(quick)}
    names = list(parts)
    assert names[0] == "tests" and parts["tests"].limit_s == 300
    for model in ("1b", "8b"):
        plain, fused = parts[f"one-batch-{model}"], parts[f"one-batch-{model}-fused"]
        assert names.index(fused.name) == names.index(plain.name) + 1
        args, fused_args = (bench_one_batch._parser().parse_args(part.command[3:]) for part in (plain, fused))
        assert not getattr(args, "fuse_small_steps", False) and fused_args.fuse_small_steps
        assert args.model_path == fused_args.model_path and args.context_len == fused_args.context_len
        assert fused_args.batch_size == [1, 8], "the flag does nothing for more than 8 requests"
        assert fused_args.prefill_len == []
        dependent = parts[f"one-batch-{model}-dependent"]
        assert names.index(dependent.name) == names.index(fused.name) + 1
        assert bench_one_batch._parser().parse_args(dependent.command[3:]).dependent_launch


@pytest.mark.parametrize("quick", [False, True])
def test_the_kernels_of_all_models_are_compiled_before_they_are_measured(plan, quick: bool) -> None:
    """One after the other, at the start of each part, they would take a minute of each part's time."""
    parts = {part.name: part for part in plan(quick)}
    measured = set()
    for part in parts.values():
        if "--model-path" in part.command:
            model = part.command[part.command.index("--model-path") + 1]
            fused, dependent = (flag in part.command for flag in ("--fuse-small-steps", "--dependent-launch"))
            measured.add(model + ("+dependent" if dependent else "+fused" if fused else ""))
    assert set(parts["compile"].command[2:]) == measured
    names = list(parts)
    assert names.index("compile") < min(names.index(name) for name in names if name.startswith("one-batch"))
    assert names.index("sanitizer") > names.index("peer-8b"), "it is slow, and measures nothing"


def test_tests_run_beside_one_another_except_the_one_that_takes_all_memory(plan) -> None:
    parts = {part.name: part.command for part in plan(True)}
    assert parts["tests"][parts["tests"].index("-n") + 1].isdigit()
    ignored = parts["tests"][parts["tests"].index("--ignore") + 1]
    assert ignored == parts["tests-memory"][-1] and "-n" not in parts["tests-memory"]
    assert (SCRIPT.parents[1] / ignored).is_file()


def test_a_quick_session_reaches_the_comparison_in_its_budget(plan) -> None:
    """Each part before the longest comparison starts if those before it take what they need."""
    needs = {part.name: part.needs_s for part in plan(True)}
    names = list(needs)
    assert sum(needs[name] for name in names[: names.index("peer-8b")]) <= 540


def test_profiles_are_of_kernels_that_exist(plan) -> None:
    root = SCRIPT.parents[1]
    source = "".join(file.read_text() for file in (root / "model_executor" / "kernels").glob("*.py"))
    tests = (root / "tests" / "gpu" / "test_kernels.py").read_text()
    profiles = [part for part in plan(True) if part.name.startswith("ncu-")]
    assert [part.name for part in profiles] == ["ncu-extend", "ncu-decode", "ncu-skinny", "ncu-fused"]
    for part in profiles:
        kernel = part.command[part.command.index("--kernel-name") + 1].removeprefix("regex:^").removesuffix("$")
        assert f"\ndef {kernel}(" in source
        if "pytest" in part.command:
            assert f"\ndef {part.command[-1].split(' ')[0]}(" in tests


def test_the_parts_have_names(tmp_path: Path) -> None:
    listed = run("--list", "--skip", "peer-8b").stdout.split("\n")
    assert [line.split(" ")[0] for line in listed[:4]] == ["tests", "tests-memory", "compile", "check"]
    assert not any(line.startswith("peer-8b") for line in listed)
    assert "there is no part 'nothing'" in run("--only", "nothing").stderr

"""The table of docs/clients.md, as scripts/clients writes it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "clients.d" / "run.py"


@pytest.fixture(scope="module")
def run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("clients_run", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def client(run: ModuleType, folder: Path, requires: str, suffix: str = "py"):
    mark = "#" if suffix == "py" else "//"
    checks = folder / f"check_one.{suffix}"
    checks.write_text(f"{mark} requires: {requires}\n", encoding="utf-8")
    return run.Client(checks)


def test_a_new_row_replaces_the_old_version_of_the_same_client(run: ModuleType, tmp_path: Path) -> None:
    done = run.Outcome("one", passed=3, skipped=2, obstacles=["too small", "too small"])
    new = run.table([client(run, tmp_path, "openai[extra]==3.1.0 pytest==9.2.0 -torchvision")], [done])
    row = "| openai 3.1.0 | 3 of 5 | 2 | too small |"
    assert new.splitlines() == [*run.TABLE_HEAD, row]
    others = ["| dspy 3.4.1 | 5 of 5 | | |", "| openai 2.0.0 (npm) | 1 of 1 | | |"]
    old = "\n".join([*run.TABLE_HEAD, "| openai 2.0.0 | 1 of 5 | | |", *others])
    assert run.merged(old, new).splitlines() == [*run.TABLE_HEAD, others[0], others[1], row]
    assert run.merged(run.merged(old, new), "") == run.merged(old, new)


@pytest.mark.parametrize("version", ["3.1.0rc1", "3.1.0.post2", "3.1.0-beta.3", "2026a"])
def test_a_new_row_replaces_that_of_a_version_with_letters(run: ModuleType, version: str) -> None:
    old, new = f"| openai {version} | 1 of 5 | | |", "| openai 3.1.0 | 5 of 5 | | |"
    assert run.rows_of(run.merged(old, new)) == [new]
    assert run.rows_of(run.merged(new, old)) == [old]


def test_a_failed_check_is_named(run: ModuleType, tmp_path: Path) -> None:
    failed = run.Outcome("one", passed=1, failed={"test_a": "assert"})
    assert run.row(client(run, tmp_path, "@ai-sdk/x@1.2", "mjs"), failed) == (
        "| @ai-sdk/x 1.2 (npm) | 1 of 2 |  | **test_a fails** |"
    )


def test_what_is_uninstalled(run: ModuleType, tmp_path: Path) -> None:
    made = client(run, tmp_path, "a==1 -b -c")
    assert (made.requires, made.excludes) == (["a==1"], ["b", "c"])
    with pytest.raises(ValueError, match="the first line must be"):
        (tmp_path / "check_bad.py").write_text("import os\n", encoding="utf-8")
        run.Client(tmp_path / "check_bad.py")


def test_every_client_is_pinned(run: ModuleType) -> None:
    for checks in SCRIPT.parent.glob("check_*.*"):
        made = run.Client(checks)
        mark = "==" if made.in_python else "@"
        assert all(mark in word[1:] for word in made.requires), checks.name

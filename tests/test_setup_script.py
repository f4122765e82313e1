"""scripts/setup after it was interrupted, and the arguments of scripts/setup and scripts/check."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

SETUP = Path(__file__).parents[1] / "scripts" / "setup"


def is_complete(package: str, packages: Path) -> bool:
    """What `is_complete` of the script says of a package, with one more folder of packages."""
    (function,) = (line for line in SETUP.read_text().splitlines() if line.startswith("is_complete()"))
    environment = os.environ | {"python": sys.executable, "PYTHONPATH": str(packages)}
    return subprocess.run(["bash", "-c", f"{function}\nis_complete {package}"], env=environment).returncode == 0


def test_a_package_that_was_installed_by_halves_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "cut_off_model").mkdir()
    (tmp_path / "cut_off_model" / "weights.gguf").write_bytes(b"GGUF")
    assert not is_complete("cut-off-model", tmp_path)
    described = tmp_path / "cut_off_model-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: cut-off-model\nVersion: 1.0\n")
    assert not is_complete("cut-off-model", tmp_path)
    (described / "RECORD").write_text("cut_off_model/weights.gguf,,\n")
    assert is_complete("cut-off-model", tmp_path)


def test_an_interruption_ends_the_compilers(tmp_path: Path) -> None:
    """They are children of the build, which is a child of the script."""
    text = SETUP.read_text()
    begin = text.index("    trap 'kill")
    build = text[begin : text.index("    say", begin)]
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 1000 &\necho compiling >&3\nwait\n")
    python.chmod(0o755)
    for folder in (".venv", "build"):
        (tmp_path / folder).mkdir()
    alive, childs_end = os.pipe()
    script = f"set -euo pipefail\npython={python}\nexec 3>&{childs_end}\n{build}\nread -r"
    shell = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, stdin=subprocess.PIPE, pass_fds=[childs_end])
    os.close(childs_end)
    assert os.read(alive, 100) == b"compiling\n"
    shell.send_signal(signal.SIGTERM)
    assert select.select([alive], [], [], PATIENCE_S)[0] and os.read(alive, 100) == b"", "all have ended"
    assert shell.wait() != 0 and not (tmp_path / "build").exists()
    os.close(alive)


@pytest.mark.parametrize("name", ["setup", "check"])
@pytest.mark.parametrize(
    ("argument", "code", "said"), [("--help", 0, "scripts/{}  "), ("--modle", 2, "scripts/{}: unknown argument")]
)
def test_nothing_is_installed_for_help_or_an_unknown_argument(
    tmp_path: Path, name: str, argument: str, code: int, said: str
) -> None:
    """The copy is in no checkout, and an installation would fail."""
    folder = tmp_path / "a folder" / "scripts"
    folder.mkdir(parents=True)
    for script in ("setup", "check"):
        (folder / script).write_text((SETUP.parent / script).read_text())
    command = ["bash", str(folder / name), argument]
    ran = subprocess.run(command, env=os.environ | {"PYTHON": "false"}, capture_output=True, text=True)
    assert ran.returncode == code and said.format(name) in ran.stdout + ran.stderr
    assert "older" not in ran.stderr


def test_a_link_to_the_environment_of_another_checkout_is_refused(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other" / ".venv"
    (own / "scripts").mkdir(parents=True)
    other.mkdir(parents=True)
    (own / "scripts" / "setup").write_text(SETUP.read_text())
    (own / ".venv").symlink_to(other)
    command = ["bash", str(own / "scripts" / "setup")]
    ran = subprocess.run(command, env=os.environ | {"PYTHON": "false"}, capture_output=True, text=True)
    assert ran.returncode == 1 and f".venv is a link to {other}" in ran.stderr
    assert "remove the link" in ran.stderr and list(other.iterdir()) == []

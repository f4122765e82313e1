"""scripts/setup after it was interrupted: what was installed by halves is installed again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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

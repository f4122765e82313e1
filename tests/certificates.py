"""Certificates that the `openssl` program makes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from patience import PATIENCE_S

_KIND = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


def openssl(*arguments: str, folder: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=PATIENCE_S)


def make_certificate(folder: Path, name: str) -> None:
    """Makes NAME.pem, a certificate for 127.0.0.1 that is its own authority, and NAME.key."""
    files = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    openssl(*_KIND, *files, "-addext", "subjectAltName=IP:127.0.0.1", folder=folder)

"""Runs the checks of clients against a server, and shows a table of pass rates. scripts/clients calls it.

A client is a file `check_NAME.py` (pytest) or `check_NAME.mjs` (node's test runner). Its first line names the packages
to install: `# requires: openai==3.54.0 pytest==9.2.0`; the first of them is the client. A name after a minus sign is
uninstalled afterwards. The checks find the server in TERCET_URL, the model's name in TERCET_MODEL, and in
TERCET_TOKENIZER the Hugging Face folder that the server serves in float32: the default model, weights in bfloat16. A
check that cannot pass is marked as expected to fail (`xfail`, in JavaScript `todo`), and its reason is the obstacle in
the table.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

CHECKS = Path(__file__).resolve().parent
ROOT = CHECKS.parents[1]
ENVIRONMENTS = ROOT / ".venv-clients"
MODEL_FOLDER = ENVIRONMENTS / "models" / "default"
PAGE = ROOT / "docs" / "clients.md"
TABLE_BEGINS, TABLE_ENDS = "<!-- measured: clients -->\n", "<!-- end -->"
TABLE_HEAD = ("| client | checks that pass | not applicable | obstacles |", "|---|---|---|---|")
MODEL = "smollm2"
START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 60
CLIENT_TIMEOUT_S = 1800


@dataclass
class Outcome:
    """What the checks of one client showed."""

    client: str
    passed: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Name of the check to its error."""
    obstacles: list[str] = field(default_factory=list)
    """Reasons of the checks that are expected to fail."""


class Client:
    """One client: its file of checks and its environment."""

    def __init__(self, checks: Path) -> None:
        self.checks = checks
        self.name = checks.stem.removeprefix("check_")
        head = checks.read_text(encoding="utf-8").partition("\n")[0]
        mark, _, requires = head.partition("requires: ")
        if mark not in ("# ", "// ") or not requires:
            raise ValueError(f"{checks.name}: the first line must be '# requires: NAME==VERSION ...', got {head!r}")
        self.requires = [word for word in requires.split() if not word.startswith("-")]
        self.excludes = [word[1:] for word in requires.split() if word.startswith("-")]
        self.folder = ENVIRONMENTS / self.name

    @property
    def in_python(self) -> bool:
        return self.checks.suffix == ".py"

    def install(self) -> None:
        """Makes the environment, unless it is there already."""
        stamp = self.folder / "installed"
        wanted = " ".join([*self.requires, *(f"-{name}" for name in self.excludes)])
        if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
            return
        sys.stderr.write(f"scripts/clients: installing {' '.join(self.requires)}\n")
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.in_python:
            subprocess.run([sys.executable, "-m", "venv", self.folder], check=True)
            python = self.folder / "bin" / "python"
            pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
            if not installed_with_uv(python, self.requires):
                subprocess.run([*pip, "install", *self.requires], check=True)
            if self.excludes:
                subprocess.run([*pip, "uninstall", "--yes", *self.excludes], check=True)
        else:
            self.folder.mkdir(parents=True)
            (self.folder / "package.json").write_text("{}\n", encoding="utf-8")
            subprocess.run(["npm", "install", "--silent", *self.requires], cwd=self.folder, check=True)
        stamp.write_text(wanted, encoding="utf-8")

    def run(self, url: str) -> Outcome:
        """Runs the checks, and shows their output."""
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        if self.in_python:
            command = [str(self.folder / "bin" / "python"), "-m", "pytest", "-q", "-c", str(CHECKS / "pytest.ini")]
            command += [f"--junitxml={report}", str(self.checks)]
        else:  # node looks for packages beside the file
            copied = shutil.copy(self.checks, self.folder)
            command = ["node", "--test", "--test-reporter=spec", "--test-reporter-destination=stdout"]
            command += ["--test-reporter=junit", f"--test-reporter-destination={report}", copied]
        scripts = f"{self.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        environ = {**os.environ, "TERCET_URL": url, "TERCET_MODEL": MODEL, "PATH": scripts}
        environ["TERCET_TOKENIZER"] = str(MODEL_FOLDER)
        environ["TERCET_PYTHON"] = sys.executable
        environ.pop("PYTHONPATH", None)
        try:
            subprocess.run(command, env=environ, cwd=self.folder, timeout=CLIENT_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return Outcome(self.name, failed={"all": f"they did not end within {CLIENT_TIMEOUT_S} s"})
        if not report.exists():
            return Outcome(self.name, failed={"all": "the checks did not run; see their output"})
        return read_report(self.name, report)


def installed_with_uv(python: Path, requires: list[str]) -> bool:
    """Installs packages with uv, which is quicker than pip. False: uv is missing, or cannot, as with pip's settings."""
    uv = shutil.which("uv")
    if uv is None:
        return False
    return subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *requires], check=False).returncode == 0


def read_report(client: str, report: Path) -> Outcome:
    """Counts the checks of a JUnit report of pytest or of node."""
    outcome = Outcome(client)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        wrong = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        skipped = case.find("skipped")
        if wrong is not None:
            outcome.failed[case.get("name", "")] = wrong.get("message", "")
        elif skipped is None:
            outcome.passed += 1
        elif skipped.get("type") in ("pytest.xfail", "todo"):
            outcome.obstacles.append(skipped.get("message", ""))
        else:
            outcome.skipped += 1
    return outcome


def table(clients: list[Client], outcomes: list[Outcome]) -> str:
    """The outcomes in Markdown."""
    return "".join(f"{line}\n" for line in [*TABLE_HEAD, *map(row, clients, outcomes)])


def row(client: Client, outcome: Outcome) -> str:
    total = outcome.passed + len(outcome.failed) + len(outcome.obstacles)
    obstacles = [*dict.fromkeys(outcome.obstacles), *(f"**{name} fails**" for name in outcome.failed)]
    package, _, version = client.requires[0].rpartition("==" if client.in_python else "@")
    label = f"{package.partition('[')[0]} {version}" if client.in_python else f"{package} {version} (npm)"
    return f"| {label} | {outcome.passed} of {total} | {outcome.skipped or ''} | {'; '.join(obstacles)} |"


def merged(old: str, new: str) -> str:
    """The rows of two tables, in alphabetical order. Where both have a client, in any version, its new row."""
    rows = {without_version(line): line for text in (old, new) for line in rows_of(text)}
    return "".join(f"{line}\n" for line in [*TABLE_HEAD, *sorted(rows.values(), key=str.lower)])


def without_version(line: str) -> tuple[str, ...]:
    """The client of a row: its package, and whether that is npm's."""
    package, _, *kind = line.split("|")[1].split()
    return package, *kind


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ") and line not in TABLE_HEAD]


def write_table(new: str) -> None:
    """Writes the rows of this run. The rows of other clients stay as they are."""
    before, begins, rest = PAGE.read_text(encoding="utf-8").partition(TABLE_BEGINS)
    old, ends, after = rest.partition(TABLE_ENDS)
    if not begins or not ends:
        raise ValueError(f"{PAGE.name} has no place for the table: no {TABLE_BEGINS.strip()}")
    PAGE.write_text(f"{before}{begins}\n{merged(old, new)}\n{ends}{after}", encoding="utf-8")


def make_model() -> None:
    if not MODEL_FOLDER.exists():
        command = [sys.executable, "-m", "tercet.benchmarks.peers.models", MODEL_FOLDER.parent]
        subprocess.run(command, check=True, stdout=sys.stderr)


@contextlib.contextmanager
def server(log: Path) -> Iterator[str]:
    """A server on the model folder, at a free port. Yields its URL. float32: lm-eval compares log likelihoods."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tercet", "serve", str(MODEL_FOLDER), "--dtype", "float32", "--port", str(port)]
    command += ["--served-model-name", MODEL, "--access-log", "--enable-metrics", "--response-store-mib", "64"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: see {log}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return answer.status == 200
    except OSError:  # URLError is one
        return False


def parse(known: dict[str, Client]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/clients", description="Run other people's clients against Tercet.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"clients, of {', '.join(known)}; default: all")
    parser.add_argument("--list", action="store_true", help="name the clients and their packages, and end")
    parser.add_argument(
        "--url", help=f"use this running server of {MODEL_FOLDER.relative_to(ROOT)}, with the name {MODEL}"
    )
    parser.add_argument("--write", action="store_true", help="write the rows of these clients to docs/clients.md")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in known]
    if unknown:
        parser.error(f"unknown client {unknown[0]!r}; known: {', '.join(known)}")
    return given


def main() -> int:
    known = {client.name: client for client in map(Client, sorted(CHECKS.glob("check_*.*")))}
    given = parse(known)
    if given.list:
        sys.stdout.writelines(f"{client.name}: {' '.join(client.requires)}\n" for client in known.values())
        return 0
    clients = [known[name] for name in given.names or known]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the server ends, too
    make_model()
    for client in clients:
        client.install()
    running = contextlib.nullcontext(given.url) if given.url else server(ENVIRONMENTS / "server.log")
    with running as url:
        outcomes = [client.run(url) for client in clients]
    text = table(clients, outcomes)
    sys.stdout.write(f"\n{text}")
    if given.write:
        write_table(text)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())

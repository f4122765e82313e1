"""Removes the guards of docs/reliability.md, one at a time, and runs the tests that must notice it.

tests/mutations.toml lists the mutations. Each replaces a text in a copy of the checkout, in a temporary folder, so the
checkout never changes. A mutation is killed if each of its tests fails. scripts/mutate calls this file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
from triton_interpreter import is_interpreted

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutations.toml"
PAGE = ROOT / "docs" / "reliability.md"
TABLE_BEGINS, TABLE_ENDS = "<!-- written by scripts/mutate --write -->\n", "<!-- end -->"
TEST_TIMEOUT_S = 60
"""Limit of one test. A test that hangs has failed."""
_START_S = 60
"""Time for the start of pytest and for its fixtures."""


@dataclass(frozen=True)
class Mutation:
    """A text that is replaced in one file.

    `danger`: what has gone wrong in other servers. `guard`: what prevents it, and what the mutation removes. `file`:
    relative to the root. `tests`: `FILE::FUNCTION`; all cases of a parametrised test count as one test, which fails if
    one of its cases fails.
    """

    name: str
    danger: str
    guard: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]

    def applied(self, source: str) -> str:
        """The source without the guard. Raises ValueError unless it has the text exactly once."""
        count = source.count(self.text)
        if count != 1:
            raise ValueError(f"{self.file} has the text of this mutation {count} times")
        return source.replace(self.text, self.replacement)


def read_mutations(path: Path = LIST) -> list[Mutation]:
    """The mutations of a list. Raises TypeError for a field that is missing or unknown."""
    rows: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))["mutation"]
    return [Mutation(**{**row, "tests": tuple(row["tests"])}) for row in rows]


class Copy:
    """A copy of the checkout, with its compiled extensions, as the package `tercet`."""

    def __init__(self, folder: Path, source: Path = ROOT) -> None:
        self.root = folder / "tercet"
        shutil.copytree(source, self.root, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__"))

    def judge(self, mutation: Mutation) -> str:
        """Applies the mutation, runs its tests, and takes it back. Returns "killed", or what is wrong."""
        mutated = self.root / mutation.file
        try:
            source, times = mutated.read_bytes(), mutated.stat()
            mutated.write_bytes(mutation.applied(source.decode()).encode())
        except (OSError, ValueError) as error:
            return f"not found: {error}"
        try:
            failed, passed = self.run(mutation.tests)
        finally:
            mutated.write_bytes(source)
            os.utime(mutated, ns=(times.st_atime_ns, times.st_mtime_ns))  # the compiled mutation is out of date
        unknown = set(mutation.tests) - failed - passed
        if passed:
            return f"survived: {', '.join(sorted(passed))}"
        return f"no result: {', '.join(sorted(unknown))}" if unknown else "killed"

    def run(self, tests: tuple[str, ...]) -> tuple[set[str], set[str]]:
        """Runs tests. Returns those that failed, and those that passed.

        If pytest does not end, every test has failed. If it cannot start, or if a test is skipped, there is no result.
        """
        failed, passed = set(), set()
        for interprets in (False, True):
            some = tuple(test for test in tests if is_interpreted(Path(test.partition("::")[0])) == interprets)
            if some:
                results = self._run(some, {"TRITON_INTERPRET": str(int(interprets))})
                failed |= results[0]
                passed |= results[1]
        return failed, passed

    def _run(self, tests: tuple[str, ...], variables: dict[str, str]) -> tuple[set[str], set[str]]:
        """`run` in one process, with these variables of the environment."""
        report = self.root.parent / "report.xml"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
        command += [f"--timeout={TEST_TIMEOUT_S}", f"--junitxml={report}", *tests]
        environ = {**os.environ, **variables, "PYTHONPATH": str(self.root.parent)}
        environ.setdefault("OMP_NUM_THREADS", "1")
        process = subprocess.Popen(
            command, cwd=self.root, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
        )
        try:
            process.wait(_START_S + TEST_TIMEOUT_S * len(tests))
        except subprocess.TimeoutExpired:
            return set(tests), set()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            end_processes_of(self.root.parent)
        return read_report(report, tests) if report.exists() else (set(), set())


def end_processes_of(folder: Path) -> None:
    """Kills what the tests have left: without its guard, an engine may go on in a session of its own."""
    for process in psutil.process_iter(["environ"]):
        if str(folder) in (process.info["environ"] or {}).get("PYTHONPATH", ""):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def read_report(report: Path, tests: tuple[str, ...]) -> tuple[set[str], set[str]]:
    """The failed and the passed tests of a JUnit report of pytest."""
    failed, passed = set(), set()
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    for test in tests:
        path, _, function = test.partition("::")
        classname = path.removesuffix(".py").replace("/", ".")
        own = [
            case
            for case in cases
            if case.get("classname") == classname and case.get("name", "").partition("[")[0] == function
        ]
        if any(case.find(kind) is not None for case in own for kind in ("failure", "error")):
            failed.add(test)
        elif any(case.find("skipped") is None for case in own):
            passed.add(test)
    return failed, passed


def table(mutations: list[Mutation]) -> str:
    """The dangers, guards and tests in Markdown. Adjacent mutations of the same danger share its cell."""
    lines = ["| danger | guard | `scripts/mutate` | test |", "|---|---|---|---|"]
    before = ""
    for one in mutations:
        tests = ", ".join(f"`{test.rpartition('/')[2]}`" for test in one.tests)
        lines.append(f"| {one.danger if one.danger != before else ''} | {one.guard} | `{one.name}` | {tests} |")
        before = one.danger
    return "".join(f"{line}\n" for line in lines)


def with_table(page: str, mutations: list[Mutation]) -> str:
    """The page with a new table. Raises ValueError if it has no place for one."""
    before, begins, rest = page.partition(TABLE_BEGINS)
    _, ends, after = rest.partition(TABLE_ENDS)
    if not begins or not ends:
        raise ValueError(f"the page has no place for the table: no {TABLE_BEGINS.strip()}")
    return f"{before}{begins}\n{table(mutations)}\n{ends}{after}"


def parse(known: dict[str, Mutation]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/mutate", description="Remove guards, one at a time, and see their tests fail."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations of tests/mutations.toml; default: all")
    parser.add_argument("--list", action="store_true", help="name the mutations and end")
    parser.add_argument("--write", action="store_true", help="write the table of docs/reliability.md and end")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in known]
    if unknown:
        parser.error(f"unknown mutation {unknown[0]!r}; known: {', '.join(known)}")
    return given


def main() -> int:
    known = {mutation.name: mutation for mutation in read_mutations()}
    given = parse(known)
    if given.list:
        sys.stdout.writelines(f"{one.name}: {one.guard}\n" for one in known.values())
        return 0
    if given.write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), list(known.values())), encoding="utf-8")
        return 0
    chosen = [known[name] for name in given.names or known]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # remove the copy, and end the tests
    with tempfile.TemporaryDirectory(prefix="tercet-mutate-", ignore_cleanup_errors=True) as folder:
        copy = Copy(Path(folder))
        tests = tuple(dict.fromkeys(test for mutation in chosen for test in mutation.tests))
        wrong = set(tests) - copy.run(tests)[1]
        if wrong:
            sys.stdout.write(f"These tests do not pass without a mutation: {', '.join(sorted(wrong))}\n")
            return 1
        verdicts = []
        for mutation in chosen:
            verdicts.append(copy.judge(mutation))
            sys.stdout.write(f"{mutation.name}: {verdicts[-1]}\n")
            sys.stdout.flush()
    num_killed = verdicts.count("killed")
    sys.stdout.write(f"{num_killed} of {len(verdicts)} mutations killed\n")
    return 0 if num_killed == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())

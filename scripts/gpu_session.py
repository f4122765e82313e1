"""The program of scripts/gpu: runs tests and benchmarks in order of importance, each in its own process.

A part that fails, hangs or does not fit into the time budget does not stop the others. The session writes three files
with the same name: all tables (.md), all JSON lines (.json), and all output (.log). It ends if it cannot write them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpu_parts import ROOT, Part, parts, tiny_parts

RESULTS = ROOT / "benchmarks" / "results"
NEEDED = (
    "gguf", "httptools", "hypothesis", "jinja2", "msgspec", "numpy", "prometheus_client", "pytest", "pytest_timeout",
    "safetensors", "starlette", "tokenizers", "torch", "tqdm", "transformers", "triton", "uvicorn", "uvloop",
    "yaml", "zmq",
)  # fmt: skip
"""Modules without which the parts fail."""
INTERRUPTED = "interrupted"
_GRACE_S = 15
"""Seconds between SIGTERM and SIGKILL."""


@dataclass
class Outcome:
    part: Part
    state: str
    """"passed", or why the part did not pass."""
    seconds: float = 0.0
    output: str = ""
    tables: str = ""
    json_line: dict[str, object] | None = None


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="measure few sizes")
    parser.add_argument("--tiny", action="store_true", help="try this script without a GPU; one part fails on purpose")
    parser.add_argument("--budget-s", type=seconds, default=3600, help="seconds for all parts (default: 3600)")
    parser.add_argument("--only", metavar="NAMES", help="parts to run, separated by commas")
    parser.add_argument("--skip", metavar="NAMES", default="", help="parts to skip, separated by commas")
    parser.add_argument("--output", metavar="DIR", type=Path, default=RESULTS, help="(default: benchmarks/results)")
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    parser.add_argument("--commit", metavar="HASH", help="commit that is measured, if the checkout has no git history")
    args = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        say(f"scripts/gpu: {sys.executable} lacks {', '.join(missing)}; scripts/gpu --fetch downloads them\n")
        return 2
    for signum in (signal.SIGTERM, signal.SIGHUP):  # a session that is cut off writes its results
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(signum, interrupt)
    with tempfile.TemporaryDirectory() as scratch:
        return session(parser, args, Path(scratch))


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, finite and not negative, got {text!r}")
    return value


def interrupt(signum: int, frame: object) -> None:
    for one in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)  # the script may send another one
    raise KeyboardInterrupt


def session(parser: argparse.ArgumentParser, args: argparse.Namespace, scratch: Path) -> int:
    end = time.monotonic() + args.budget_s
    known = tiny_parts(scratch) if args.tiny else parts(args.quick)
    names = [part.name for part in known]
    only = names if args.only is None else args.only.split(",")
    skip = [name for name in args.skip.split(",") if name]
    for name in (*only, *skip):
        if name not in names:
            parser.error(f"there is no part {name!r}; there are: {', '.join(names)}")
    chosen = [part for part in known if part.name in only and part.name not in skip]
    if not chosen:
        parser.error("--only and --skip leave no part")
    if args.list:
        say("".join(f"{part.name:18} {part.what}\n" for part in chosen))
        return 0
    try:
        report = Report(args)
    except OSError as error:
        parser.error(f"--output: no file can be made there: {error}")
    outcomes: list[Outcome] = []
    failure = None
    for part in chosen:
        try:
            outcomes.append(run(part, end, scratch, report.running))
            report.write(outcomes)  # after each part, so that a session that is killed keeps its results
        except OSError as error:
            failure = error
            break
        if outcomes[-1].state == INTERRUPTED:
            break
    report.running.unlink(missing_ok=True)
    say("\n" + summary(outcomes))
    for file in report.files:
        if file.exists():
            say(f"written: {file}\n")
    if failure is not None:
        say(f"scripts/gpu: the session ends, because its results cannot be written: {failure}\n")
    line = {outcome.part.name: {"state": outcome.state, "seconds": round(outcome.seconds, 1)} for outcome in outcomes}
    say(json.dumps({"benchmark": "gpu", "parts": line}) + "\n")
    return 0 if failure is None and all(outcome.state == "passed" for outcome in outcomes) else 1


def say(text: str) -> None:
    """Prints a text, if anybody reads it. The files have all results."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def run(part: Part, end: float, scratch: Path, running: Path) -> Outcome:
    """Runs a part and prints its output at the end. Until then the output is in the file `running`."""
    left = end - time.monotonic()
    if left < part.needs_s:
        say(f"\n== {part.name}: not started, {left:.0f} s are left and it needs {part.needs_s}\n")
        return Outcome(part, "not started: no time left")
    limit = min(part.limit_s, left)
    command = list(part.command)
    results = scratch / part.name
    if "pytest" not in command:
        command += ["--results", str(results)]
    say(f"\n== {part.name}: {part.what} (at most {limit:.0f} s)\n{shlex.join(part.command)}\n")
    start = time.monotonic()
    with running.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | part.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its child processes can be stopped with it
        )
        try:
            process.wait(timeout=limit)
            state = "passed" if process.returncode == 0 else f"failed with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            stop(process)
            state = f"stopped after {limit:.0f} s"
        except KeyboardInterrupt:
            stop(process)
            state = INTERRUPTED
    output = running.read_text(encoding="utf-8", errors="replace")
    took_s = time.monotonic() - start
    # The JSON line goes only to the file. The end of a long output has the most information.
    shown = [line for line in output.splitlines() if not line.startswith('{"benchmark"')]
    say("\n".join(line[:300] for line in shown[-60:]) + f"\n== {part.name}: {state}, {took_s:.1f} s\n")
    outcome = Outcome(part, state, took_s, output)

    def text_of(file: Path) -> str:
        return file.read_text(encoding="utf-8").replace(f" --results {shlex.quote(str(results))}", "")

    for file in sorted(results.glob("*.md")):
        outcome.tables += text_of(file)
    for file in sorted(results.glob("*.json")):
        outcome.json_line = json.loads(text_of(file))
    return outcome


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stops the part and its child processes."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signum)
            process.wait(timeout=_GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def summary(outcomes: list[Outcome]) -> str:
    rows = [["part", "what", "state", "s"], ["---"] * 4]
    rows += [[outcome.part.name, outcome.part.what, outcome.state, f"{outcome.seconds:.0f}"] for outcome in outcomes]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


class Report:
    """The session's three files."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises OSError if no file can be made in the folder."""
        self.hardware = hardware()
        self._start = datetime.now(UTC)
        self._command = shlex.join(["scripts/gpu", *without_output(sys.argv[1:])])
        self._commit = args.commit
        slug = "".join(c if c.isalnum() or c == "." else "-" for c in self.hardware.lower())
        stem = f"{self._start:%Y-%m-%d-%H%M%S}-{slug}-{'tiny' if args.tiny else 'gpu'}"
        args.output.mkdir(parents=True, exist_ok=True)
        # with_suffix would cut the file name, because the hardware's name may have dots.
        self.files = [args.output / f"{stem}.{suffix}" for suffix in ("md", "json", "log")]
        self.running = args.output / f"{stem}.running.log"
        self.running.touch()

    def write(self, outcomes: list[Outcome]) -> None:
        """Replaces the files. If one cannot be written, all stay as they are. Raises OSError."""
        commit = f"\n\nCommit {self._commit}." if self._commit else ""
        head = f"# {self.hardware}, {self._start:%Y-%m-%d %H:%M} UTC\n\nBy `{self._command}`.{commit}\n\n"
        # The parts' titles become one level lower than the titles of this file.
        tables = [
            outcome.tables.replace("\n### ", "\n#### ").replace("# ", "## ", 1)
            for outcome in outcomes
            if outcome.tables
        ]
        values = {outcome.part.name: outcome.json_line or {"state": outcome.state} for outcome in outcomes}
        whole = {"commit": self._commit, "command": self._command, "hardware": self.hardware, "parts": values}
        log = [
            f"== {outcome.part.name}: {outcome.state}, {outcome.seconds:.1f} s\n"
            f"{shlex.join(outcome.part.command)}\n{outcome.output}\n"
            for outcome in outcomes
        ]
        texts = (head + summary(outcomes) + "\n" + "\n".join(tables), json.dumps(whole, indent=1) + "\n", "".join(log))
        new = [file.with_name(f"{file.name}.new") for file in self.files]
        try:
            for file, text in zip(new, texts, strict=True):
                file.write_text(text, encoding="utf-8")
        except OSError:
            for file in new:
                file.unlink(missing_ok=True)
            raise
        for file, name in zip(new, self.files, strict=True):
            file.replace(name)


def hardware() -> str:
    """The GPU's name, or the processor's."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout.split("\n")
        return names[0].strip()
    except (OSError, subprocess.SubprocessError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")


def without_output(argv: list[str]) -> list[str]:
    """The arguments without --output: the result files need not name their own folder."""
    kept, skipping = [], False
    for word in argv:
        if not skipping and word != "--output" and not word.startswith("--output="):
            kept.append(word)
        skipping = word == "--output"
    return kept


if __name__ == "__main__":
    sys.exit(main())

"""The tests' kernels compiled by each Triton that a supported torch brings.

As a program it compiles the named cases with the Triton that it finds, and prints {case: [resources of each kernel]} as
JSON.
`compiled_with` runs it with a Triton that `scripts/setup --tritons` has installed beside the environment's own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import compiled_attention
import compiled_dependent
import compiled_experts
import compiled_fp8
import compiled_hopper
import compiled_latent
import compiled_lora
import compiled_others
import pytest
import triton
from sass import InstructionCounts
from some_cases import covering, crossed
from triton_aot import Launch, Resources, compile_all

ROOT = Path(__file__).resolve().parents[1]
TRITONS = ("3.6.0", "3.7.1", "3.9.0")
"""Of torch 2.11, of torch 2.13, and of the CPU builds that scripts/setup installs."""
CASES: dict[str, Callable[[], list[Launch]]] = (
    compiled_attention.CASES
    | compiled_fp8.CASES
    | compiled_others.CASES
    | compiled_dependent.CASES
    | compiled_experts.CASES
    | compiled_experts.FP8_CASES
    | compiled_hopper.CASES
    | compiled_latent.CASES
    | compiled_lora.CASES
)
OTHERS = [version for version in TRITONS if version != triton.__version__]
"""The environment's own Triton compiles in test_compile_*.py."""
_COPIED_AHEAD = {
    "extend", "decode", "fused", "linear", "experts", "fp8 experts", "hopper", "lora", "dependent linear",
    "dependent fused",
}  # fmt: skip
"""Kinds of cases whose copies or products are asynchronous. A compiler may serialise them."""


def _aspects(pair: tuple[str, str]) -> Iterable[Hashable]:
    case, version = pair
    kind, _, which = case.partition("-")
    yield kind
    if kind in _COPIED_AHEAD:
        yield kind, version
        yield kind, which.rpartition(", ")[2] if "," in which else ""
    if kind == "extend" and version == "3.6.0":  # it has serialised products
        yield which.partition(", ")[2], version


WITH_OTHERS = covering(crossed(list(CASES), OTHERS, each=len(OTHERS)), _aspects)
"""Cases with the Tritons that compile them. A usual run compiles each kind with one, or with all if it copies ahead."""


def run_tests_with(version: str, *chosen: str) -> None:
    """Run chosen tests in a process of their own, with this Triton. Skips the calling test if it is not installed."""
    environment = _environment(version)
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", "--timeout=0"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *chosen], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-10_000:] + ran.stderr[-5_000:]


@cache
def compiled_with(version: str) -> dict[str, list[Resources]]:
    """The resources of its cases' kernels, compiled in one process. Skips the calling test without this Triton."""
    names = [case for case, compiler in WITH_OTHERS if compiler == version]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, *names], env=_environment(version), capture_output=True, text=True
    )
    if ran.returncode:
        raise AssertionError(ran.stdout[-5_000:] + ran.stderr[-10_000:])
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found.pop("version") == version
    return {name: [_resources(fields) for fields in kernels] for name, kernels in found.items()}


def _environment(version: str) -> dict[str, str]:
    """An environment in which Python imports this Triton."""
    folder = ROOT / ".triton" / version
    if not (folder / "triton").is_dir():
        pytest.skip(f"Triton {version} is not installed: scripts/setup --tritons")
    path = os.pathsep.join([str(folder), *(entry for entry in sys.path if entry)])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _resources(fields: dict[str, Any]) -> Resources:
    return Resources(**fields | {"other_counts": InstructionCounts(**fields["other_counts"])})


def main() -> None:
    found: dict[str, Any] = {name: [] for name in sys.argv[1:]}
    launches = [(name, launch) for name in found for launch in CASES[name]()]
    compiled = compile_all((launch for _, launch in launches), "sm_90")
    for (name, _), resources in zip(launches, compiled, strict=True):
        # The assembly of attention is large, and only its counts are tested.
        fields = dataclasses.asdict(resources)
        found[name].append(fields if name in compiled_others.CASES else fields | {"assembly": ""})
    sys.stdout.write(json.dumps(found | {"version": triton.__version__}) + "\n")


if __name__ == "__main__":
    main()

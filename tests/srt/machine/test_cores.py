"""How many threads should compute: one for each physical core that the process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tercet.srt.machine.cores import physical_cores, usable_cores, usable_cpus


def machine(folder: Path, *siblings: str) -> Path:
    """/sys/devices/system/cpu with those thread_siblings_list, one for each CPU; "-": the system does not tell."""
    for cpu, text in enumerate(siblings):
        topology = folder / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        if text != "-":
            (topology / "thread_siblings_list").write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("siblings", "allowed", "cores"),
    [
        (["0", "1"], [0, 1], 2),  # no SMT
        (["0-1", "0-1", "2-3", "2-3"], [0, 1, 2, 3], 2),  # siblings side by side
        (["0,2", "1,3", "0,2", "1,3"], [0, 1, 2, 3], 2),  # the second threads after all first ones
        (["0,2", "1,3", "0,2", "1,3"], [0, 2], 1),  # the affinity mask has both threads of one core
        (["0,2", "1,3", "0,2", "1,3"], [1, 2], 2),
        (["-", "-", "-"], [0, 1, 2], 3),
        ([], [0, 7], 2),
    ],
)
def test_hardware_threads_of_a_core_count_once(tmp_path, siblings, allowed, cores):
    assert physical_cores(allowed, machine(tmp_path, *siblings)) == cores


def test_cores_are_at_least_one_and_at_most_the_cpus_of_the_affinity_mask():
    assert 1 <= usable_cores() <= usable_cpus() <= len(os.sched_getaffinity(0))


def test_the_smaller_of_cores_and_quota_counts(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr("tercet.srt.machine.cores.physical_cores", lambda cpus: len(cpus) // 2)
    monkeypatch.setattr("tercet.srt.machine.cores.usable_cpus", lambda: 3)
    assert usable_cores() == 3
    monkeypatch.setattr("tercet.srt.machine.cores.usable_cpus", lambda: 8)
    assert usable_cores() == 4

"""Short runs of scripts/chaos, scripts/soak and scripts/fuzz on the toy model. No time decides."""

from __future__ import annotations

import shutil

import pytest
from endurance import chaos, fuzz, soak
from endurance.models import model_flags

pytestmark = pytest.mark.e2e

PATIENT = ["--max-silence", "1000000", "--watchdog", "300", "--max-stop", "0.5"]
NO_LIMIT = ["--max-stall", "1000000"]
"""A busy machine is no fault."""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    _, path = model_flags("toy", tmp_path_factory.mktemp("toy"))
    return path


def kinds(*names: str) -> list[str]:
    return [argument for name in names for argument in ("--only", name)]


@pytest.mark.timeout(300)
def test_answers_survive_faults(toy: str) -> None:
    killed = kinds("kill the scheduler", "kill the detokenizer", "kill the grammar worker")
    only = [*killed, *kinds("stop the scheduler", "clock jumps", "full disk", "kill the server"), "--server-faults"]
    flags = ["--faults", "7", "--interval", "0.3", "--clients", "3", "--seed", "61", "--max-tokens", "40"]
    report, wrong = chaos.run(chaos.parse(["--model", toy, *flags, *only, *PATIENT]))
    assert not wrong
    assert sum(report["faults"].values()) + sum(report["skipped_faults"].values()) == 7
    assert report["faults"]["kill the server"] == 1, "this seed draws each fault once"
    assert report["restarts"]["count"] and report["requests"]["completed"]
    assert not report["requests"]["lost_streams"] and not report["requests"]["refused"]


@pytest.mark.timeout(300)
def test_many_requests_leave_nothing(toy: str) -> None:
    flags = ["--requests", "150", "--clients", "4", "--max-tokens", "8", "--all-features"]
    report, wrong = soak.run(soak.parse(["--model", toy, *flags]))
    assert not wrong
    assert report["requests"]["completed"] > 75


@pytest.mark.timeout(300)
def test_hostile_requests_change_nothing(toy: str) -> None:
    report, wrong = fuzz.run(fuzz.parse(["--model", toy, "--requests", "200", "--clients", "2", *NO_LIMIT]))
    assert not wrong
    assert {"200", "400", "raw: 400"} <= report["statuses"].keys()
    assert report["neighbour"]["completed"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl program is not installed")
@pytest.mark.timeout(300)
def test_hostile_tls_changes_nothing(toy: str) -> None:
    flags = ["--model", toy, "--requests", "100", "--clients", "2", "--seed", "3", "--tls", *NO_LIMIT]
    report, wrong = fuzz.run(fuzz.parse(flags))
    assert not wrong
    assert sum(count for status, count in report["statuses"].items() if status.startswith("tls: ")) > 5
    assert report["neighbour"]["completed"]

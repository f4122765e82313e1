from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_http import Site, error_of

from tercet.srt.errors import EngineRestarting
from tercet.srt.profile_messages import ProfileReply, StartProfileReq, StopProfileReq


class ProfileSite(Site):
    def __init__(self, folder: Path) -> None:
        super().__init__(profile_dir=str(folder))
        self.folder = folder
        self.started: list[StartProfileReq] = []
        self.scheduler.answers = {StartProfileReq: self._start, StopProfileReq: self._stop}

    def _start(self, message: StartProfileReq) -> ProfileReply:
        self.started.append(message)
        return ProfileReply(message.call_id, message.path)

    def _stop(self, message: StopProfileReq) -> ProfileReply:
        if not self.started:
            return ProfileReply(message.call_id, refusal="no profile is running")
        return ProfileReply(message.call_id, self.started[-1].path)


@pytest.fixture
def profiled(tmp_path: Path) -> Iterator[ProfileSite]:
    site = ProfileSite(tmp_path)
    yield site
    site.close()


def test_without_the_flag_nothing_is_profiled(site: Site) -> None:
    for path in ("/start_profile", "/stop_profile"):
        answer = site.post(path)
        assert answer.status_code == 403 and error_of(answer)["code"] == "not_allowed"
        assert "--profile-dir" in answer.text


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_start_and_stop(profiled: ProfileSite, method: str) -> None:
    assert "no profile is running" in profiled.refused("/stop_profile", None)["message"]
    started = profiled.request(method, "/start_profile").json()
    (message,) = profiled.started
    assert Path(message.path) == profiled.folder / started["trace"] and "/" not in started["trace"]
    assert message.num_steps == 500 and message.cpu and not message.gpu
    assert not message.record_shapes and not message.with_stack
    assert profiled.request(method, "/stop_profile").json()["trace"] == started["trace"]


def test_every_field_arrives(profiled: ProfileSite) -> None:
    """The fields that SGLang's bench_serving sends, and more."""
    body = {
        "activities": ["CPU", "GPU"],
        "num_steps": 5,
        "profile_by_stage": False,
        "merge_profiles": False,
        "profile_prefix": "run-1.a",
        "output_dir": "a/b",
        "record_shapes": True,
        "with_stack": True,
    }
    trace = profiled.good("/start_profile", body)["trace"]
    (message,) = profiled.started
    assert Path(message.path) == profiled.folder / trace and trace.startswith("a/b/run-1.a-")
    assert message.num_steps == 5 and message.record_shapes and message.with_stack
    absolute = {"output_dir": str(profiled.folder / "c")}
    assert profiled.good("/start_profile", absolute)["trace"].startswith("c/")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_steps", 0),
        ("num_steps", 501),
        ("activities", ["MEM"]),
        ("activities", ["GPU"]),
        ("activities", []),
        ("profile_prefix", "../up"),
        ("profile_prefix", ".hidden"),
        ("profile_prefix", "a/b"),
        ("profile_prefix", ""),
        ("profile_prefix", "x" * 65),
        ("output_dir", "a\0b"),
        ("output_dir", 5),
        ("start_step", 3),
        ("profile_by_stage", True),
    ],
)
def test_other_values_are_refused(profiled: ProfileSite, field: str, value: Any) -> None:
    error = profiled.refused("/start_profile", {field: value})
    assert (error["param"] or "").startswith(field)
    assert field != "profile_prefix" or f"got {value!r}" in error["message"]
    assert not profiled.started


def test_a_gpu_is_recorded_where_there_is_one(profiled: ProfileSite) -> None:
    profiled.manager.facts = msgspec.structs.replace(profiled.manager.facts, device="cuda:0")
    for activities, expected in ((["GPU"], (False, True)), (["CPU"], (True, False)), (None, (True, True))):
        profiled.good("/start_profile", {"activities": activities})
        assert (profiled.started[-1].cpu, profiled.started[-1].gpu) == expected


@pytest.mark.parametrize("folder", ["..", "/", "/etc", "a/../../b", "link", "link/x"])
def test_a_client_chooses_no_folder_outside(profiled: ProfileSite, folder: str, tmp_path_factory: Any) -> None:
    (profiled.folder / "link").symlink_to(tmp_path_factory.mktemp("outside"))
    error = profiled.refused("/start_profile", {"output_dir": folder}, 403)
    assert error["param"] == "output_dir" and error["code"] == "not_allowed"
    assert str(profiled.folder.parent) not in error["message"] and not profiled.started


def test_a_failure_is_told_and_a_restart_ends_the_call(profiled: ProfileSite) -> None:
    profiled.scheduler.answers[StopProfileReq] = lambda message: ProfileReply(message.call_id, failure="disk full")
    answer = profiled.post("/stop_profile")
    assert answer.status_code == 500 and error_of(answer)["message"] == "disk full"
    profiled.scheduler.dead = True
    del profiled.scheduler.answers[StopProfileReq]

    async def restart() -> None:
        waiting = asyncio.create_task(profiled.manager.profile.stop())
        await asyncio.sleep(0)
        profiled.manager.on_death(None)
        with pytest.raises(EngineRestarting):
            await waiting

    profiled.run(restart())

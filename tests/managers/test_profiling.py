from __future__ import annotations

import errno
from pathlib import Path

import pytest
from fake_trace import FakeTrace
from scheduler_rig import Rig

from tercet.managers.profiling import Profiling
from tercet.srt.io_struct import AbortReq
from tercet.srt.profile_messages import ProfileReply, StartProfileReq, StopProfileReq


def wanted(path: Path, call_id: int = 1, num_steps: int = 500) -> StartProfileReq:
    return StartProfileReq(
        call_id=call_id,
        path=str(path),
        num_steps=num_steps,
        cpu=True,
        gpu=False,
        record_shapes=False,
        with_stack=False,
    )


class Site:
    """A scheduler with two requests, and the traces of its profiles."""

    def __init__(self, *, overlap: bool = True) -> None:
        self.traces: list[FakeTrace] = []
        self.rig = Rig(start_trace=self._start, overlap=overlap)
        self.profiling: Profiling = self.rig.scheduler._profiling
        self.rig.add("a", [1, 2, 3], max_new_tokens=20)
        self.rig.add("b", [1, 2, 3, 4], max_new_tokens=20)

    def _start(self, wanted: StartProfileReq) -> FakeTrace:
        self.traces.append(FakeTrace())
        return self.traces[-1]

    def ask(self, message: StartProfileReq | StopProfileReq) -> ProfileReply:
        self.rig.inbox.messages.append(message)
        self.rig.turn()
        (reply,) = [one for one in self.rig.tokenizer.messages if isinstance(one, ProfileReply)]
        self.rig.tokenizer.messages.clear()
        assert reply.call_id == message.call_id
        return reply


@pytest.mark.parametrize("overlap", [True, False])
def test_a_profile_ends_by_itself_after_its_steps(tmp_path: Path, overlap: bool) -> None:
    site, path = Site(overlap=overlap), tmp_path / "new" / "folder" / "x.json.gz"
    assert site.profiling.runner is site.rig.runner
    assert site.ask(wanted(path, num_steps=3)) == ProfileReply(1, str(path))
    assert site.profiling.runner is not site.rig.runner
    site.rig.run()
    assert site.profiling.runner is site.rig.runner
    launches = [name for name in path.read_text().splitlines() if name.startswith("launch")]
    assert launches == [
        "launch step 1: extend of 2 requests, 7 tokens",
        "launch step 2: decode of 2 requests",
        "launch step 3: decode of 2 requests",
    ]
    assert "wait step 3: decode of 2 requests" in path.read_text()
    undisturbed = Site(overlap=overlap).rig
    undisturbed.run()
    assert [site.rig.heard[name].ids for name in "ab"] == [undisturbed.heard[name].ids for name in "ab"]


def test_a_profile_is_stopped_and_the_next_one_starts(tmp_path: Path) -> None:
    site = Site()
    assert site.ask(StopProfileReq(7)).refusal == "no profile is running"
    site.ask(wanted(tmp_path / "1"))
    refused = site.ask(wanted(tmp_path / "2", call_id=2))
    assert refused.refusal and "/stop_profile" in refused.refusal and len(site.traces) == 1
    assert site.ask(StopProfileReq(3)) == ProfileReply(3, str(tmp_path / "1"))
    assert (tmp_path / "1").exists() and not (tmp_path / "2").exists()
    # The first profile's step in flight is no concern of the second one.
    site.ask(wanted(tmp_path / "2", num_steps=1))
    site.rig.run()
    assert (tmp_path / "2").exists() and [trace.num_stops for trace in site.traces] == [1, 1]


def test_a_profile_that_was_stopped_in_its_last_step_ends_once(tmp_path: Path) -> None:
    site = Site()
    site.ask(wanted(tmp_path / "1", num_steps=1))  # the step is in flight now
    assert site.ask(StopProfileReq(2)).failure is None
    site.rig.run()
    assert site.traces[0].num_stops == 1


def test_a_trace_that_cannot_be_written_ends_nothing_else(tmp_path: Path) -> None:
    site = Site()
    site.ask(wanted(tmp_path / "1"))
    site.traces[0].error = OSError(errno.ENOSPC, "No space left on device")
    failed = site.ask(StopProfileReq(2))
    assert failed.failure == "could not write the trace 1: No space left on device"
    refusal = site.ask(StopProfileReq(3)).refusal
    assert refusal and "No space left" in refusal
    site.ask(wanted(tmp_path / "2", num_steps=1))
    site.traces[1].error = RuntimeError("a secret")
    site.rig.run()
    assert len(site.rig.heard["a"].ids) == 20
    refusal = site.ask(StopProfileReq(4)).refusal
    assert refusal and "internal error" in refusal and "secret" not in refusal


def test_a_folder_that_cannot_be_made_starts_no_profile(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    site = Site()
    reply = site.ask(wanted(tmp_path / "file" / "trace"))
    assert reply.failure and reply.failure.startswith("could not start the profile: ")
    assert not site.traces and site.profiling.runner is site.rig.runner


def test_the_end_of_the_scheduler_writes_the_trace(tmp_path: Path) -> None:
    site = Site()
    site.ask(wanted(tmp_path / "1"))
    site.rig.inbox.messages.append(AbortReq(None))
    site.rig.run()
    site.rig.scheduler.run(lambda: True)
    assert "launch step 1" in (tmp_path / "1").read_text()

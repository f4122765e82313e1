"""What a dead scheduler has left behind about its last steps."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from fake_proposers import EachProposer
from patience import PATIENCE_S
from scheduler_rig import Rig
from toy_engine import environment

from fakes import expected_output
from tercet.managers.req import Req
from tercet.managers.scheduler import InFlight
from tercet.model_executor.step import ForwardMode, LaunchedStep, StepInputs
from tercet.srt.step_journal import NO_JOURNAL, JournalRow, StepJournal, open_journal, read_journal


@dataclass
class FakeReq:
    rid: str
    output_ids: range
    num_steps_in_flight: int = 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def test_the_rows_of_a_step_and_their_positions(path: Path) -> None:
    journal = StepJournal(path, max_rows=8)
    reqs = [FakeReq("1", range(0)), FakeReq("2", range(5), num_steps_in_flight=1)]
    for _ in range(20):
        journal.begin(reqs, 3, ())
    assert read_journal(path).rows == [JournalRow("1", 19), JournalRow("2", 25)]
    reqs = [reqs[1]]
    journal.begin(reqs, 0, ())
    seen = read_journal(path)
    assert seen.rows == [JournalRow("2", 6)]
    assert [step.number for step in seen.last_steps] == list(range(6, 22))
    assert (seen.last_steps[-1].num_requests, seen.last_steps[-2].num_prompt_tokens) == (1, 3)
    assert seen.last_steps[0].age_s >= seen.last_steps[-1].age_s == 0


def test_a_full_disk_does_not_end_the_scheduler(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = open_journal(path, max_rows=256)
    assert isinstance(journal, StepJournal)
    assert path.stat().st_blocks * 512 >= path.stat().st_size > 10_000, "a write to a hole needs space"
    assert path.stat().st_mode & 0o777 == 0o600
    assert open_journal(path / "nowhere", max_rows=256) is NO_JOURNAL
    assert "no step journal" in caplog.text


def test_who_has_begun_and_has_no_output(path: Path) -> None:
    journal = StepJournal(path, max_rows=8)
    chunked, whole, decodes = FakeReq("1", range(0)), FakeReq("2", range(0)), FakeReq("3", range(4))
    journal.begin([chunked, decodes], 9, [chunked])
    journal.begin([whole], 9, [chunked])
    assert read_journal(path).begun == {"1", "2"}
    journal.begin([decodes], 0, [chunked])
    seen = read_journal(path)
    assert seen.rows == [JournalRow("3", 4)] and seen.begun == {"1", "2", "3"}
    journal.end()
    assert read_journal(path).rows is None and read_journal(path).begun == {"1", "2", "3"}
    chunked.output_ids = whole.output_ids = range(1)
    journal.begin([chunked], 0, [])
    assert read_journal(path).begun == {"1"}, "the parent knows of the output of 2"


def test_the_scheduler_names_prompts_in_chunks(path: Path) -> None:
    rig = Rig(overlap=False, max_prefill_tokens=16, chunked_prefill_size=16)
    rig.scheduler._journal = StepJournal(path, max_rows=8)
    for num_tokens in range(3, 9):  # so that each decode step has other requests
        rig.add(f"{num_tokens}", [num_tokens] * 2, max_new_tokens=num_tokens)
    rig.turn()
    rig.add("chunked", [2] * 60)
    rig.turn()
    while not rig.heard["chunked"].ids:
        assert "chunked" in read_journal(path).begun
        rig.turn()
    assert [step.num_prompt_tokens > 0 for step in read_journal(path).last_steps].count(False) > 2
    rig.run()


def test_with_overlap_the_step_before_is_named_until_it_is_over(path: Path) -> None:
    """A device reports its fault while the host launches the next step, or waits for it."""
    journal = StepJournal(path, max_rows=8)
    prompt, both, decode = FakeReq("1", range(0)), FakeReq("2", range(3)), FakeReq("3", range(5))
    journal.begin([prompt, both], 9, ())
    prompt.num_steps_in_flight = both.num_steps_in_flight = 1
    journal.begin([both, decode], 0, ())
    assert read_journal(path).rows == [JournalRow("2", 4), JournalRow("3", 5), JournalRow("1", 0)]
    prompt.num_steps_in_flight, prompt.output_ids, both.output_ids = 0, range(1), range(4)
    decode.num_steps_in_flight = 1
    journal.begin([both, decode], 0, ())
    assert read_journal(path).rows == [JournalRow("2", 5), JournalRow("3", 6)]


def test_the_scheduler_names_all_requests_in_flight(path: Path) -> None:
    rig = Rig(overlap=True, max_prefill_tokens=16, chunked_prefill_size=16)
    rig.scheduler._journal = StepJournal(path, max_rows=8)
    process = rig.scheduler._process

    def checked(in_flight: InFlight) -> None:
        rows = read_journal(path).rows
        assert rows is not None and {req.rid for req in in_flight.batch.reqs} <= {row.key for row in rows}
        process(in_flight)

    rig.scheduler._process = checked
    for num_tokens in range(3, 9):
        rig.add(f"{num_tokens}", [num_tokens] * 2, max_new_tokens=num_tokens)
        rig.turn()
    rig.add("chunked", [2] * 60)
    rig.run()
    assert read_journal(path).is_between_steps


def test_the_positions_of_steps_that_return_several_tokens(path: Path) -> None:
    """The rest of the answer is guessed, or a wrong token, in turns. A position that is too early would clear a suspect
    before its fatal step."""
    turns = count()

    def propose(req: Req, limit: int) -> list[int]:
        right = expected_output(req.token_ids().tolist(), req.sampling.sampling_seed, min(4, limit), 97)
        return [right, [96] * min(3, limit), []][next(turns) % 3] if req.rid == "drafted" else []

    rig = Rig(overlap=False, proposer=EachProposer(propose))
    rig.scheduler._journal = StepJournal(path, max_rows=8)
    launch = rig.runner.launch
    seen = []

    def checked(step: StepInputs) -> LaunchedStep:
        rows = {row.key: row.position for row in read_journal(path).rows or ()}
        running = {req.rid: req for req in rig.scheduler.queues.holders()}
        if step.num_drafts is not None or step.mode is ForwardMode.DECODE:
            lens = [1] * len(step.rows) if step.extend_lens is None else step.extend_lens.tolist()
            of_row = dict(zip(step.rows.tolist(), lens, strict=True))
            assert rows == {rid: len(req.output_ids) + of_row[req.row] - 1 for rid, req in running.items()}
            seen.append(max(lens))
        return launch(step)

    rig.runner.launch = checked
    for rid in ("drafted", "plain"):
        rig.add(rid, [1, 2, 3], max_new_tokens=40)
    rig.run()
    assert {1, 4, 5} <= set(seen)
    assert all(len(heard.ids) == 40 for heard in rig.heard.values())


def test_a_step_without_requests_does_not_hide_the_step_in_flight(path: Path) -> None:
    journal = StepJournal(path, max_rows=8)
    journal.begin([FakeReq("1", range(0))], 10, ())
    journal.begin([], 0, ())  # with overlap: only copies KV
    seen = read_journal(path)
    assert seen.rows is not None and [row.key for row in seen.rows] == ["1"]
    assert [step.num_requests for step in seen.last_steps] == [1, 0]


def test_between_steps_nobody_is_named(path: Path) -> None:
    journal = StepJournal(path, max_rows=8)
    assert read_journal(path).rows is None and read_journal(path).last_steps == []
    assert read_journal(path).is_between_steps
    journal.begin([FakeReq("1", range(0))], 1, ())
    assert not read_journal(path).is_between_steps
    journal.end()
    assert read_journal(path).rows is None and len(read_journal(path).last_steps) == 1
    assert read_journal(path).is_between_steps
    journal.begin([], 0, ())
    journal.begin([FakeReq("x" * 10_000, range(0))], 1, ())
    assert read_journal(path).rows is None and not read_journal(path).is_between_steps


def test_no_file_and_no_journal(path: Path) -> None:
    assert read_journal(path).rows is None
    path.write_bytes(b"\xff" * 2000)
    assert read_journal(path).rows is None
    path.write_bytes(b"\xff")
    assert read_journal(path).last_steps == [] and not read_journal(path).is_between_steps


def test_a_killed_process_leaves_it(path: Path, tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from tercet.srt.step_journal import StepJournal\n"
        "class R: rid, output_ids, num_steps_in_flight = '7', range(1), 0\n"
        "StepJournal(Path(sys.argv[1]), 4).begin([R()], 4, ()); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], env=environment(tmp_path), timeout=PATIENCE_S)
    assert read_journal(path).rows == [JournalRow("7", 1)]

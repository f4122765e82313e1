"""Recordings of the whole scheduler on the fake runner: a replay decides every step in the same way."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from recorded_schedules import Recorded, workload

from tercet.benchmarks.results import Result
from tercet.benchmarks.simulator.comparison import Comparison, compare, learned
from tercet.benchmarks.simulator.replay import Replay
from tercet.benchmarks.simulator.replay_report import add_replay_table
from tercet.benchmarks.simulator.simulation import Simulation
from tercet.benchmarks.simulator.statistics import RunStatistics
from tercet.benchmarks.simulator.traffic import Traffic
from tercet.managers import schedule_recorder
from tercet.managers.token_out_reader import TokenOutReader
from tercet.model_executor.step import StepInputs
from tercet.srt import schedule_record
from tercet.srt.io_struct import AbortReq, BatchTokenOut, FlushCacheReq, GenerateReq, NextTokens, Resumed, pack_ids
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.schedule_record import Arrival, End, Record, Recording, Retain, ScheduleFile, Step


def replayed(path: Path) -> Comparison:
    recording = Recording(path)
    assert recording.is_whole
    return compare(Replay(recording))


def noisy_s(seed: int) -> Callable[[StepInputs], float]:
    """Random times of steps, in which a prompt token costs so much that the automatic bound makes chunks shorter."""
    rng = Random(seed)

    def seconds(step: StepInputs) -> float:
        num_tokens = 0 if step.extend_lens is None else int(step.extend_lens.sum())
        return (0.01 + 0.003 * num_tokens) * rng.lognormvariate(0, 0.3)

    return seconds


def test_tool_calls_are_recorded_and_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_recorder, "_MAX_ENDED", 6)  # as many as can end in one turn
    path = tmp_path / "record"
    Recorded(path, 1).run(workload(4), num_turns=50, share_of_tool_calls=0.5)
    replay = Replay(Recording(path))
    retained = [one for one in Recording(path).records() if isinstance(one, Retain)]
    assert {one.number for one in retained} == replay.script.tool_calls and len(retained) > 6
    assert sum(request.ends_in_tool_call for request in replay.requests()) == len(retained)
    assert compare(replay).difference is None
    for policy in ("value", "lru"):
        config, profile = replay.model_config(), replay.fit("fit")
        args = dataclasses.replace(replay.server_args(), radix_eviction_policy=policy)
        simulation = Simulation(args, config, profile, Traffic(replay.requests()), RunStatistics({}))
        simulation.run()
        assert (simulation.scheduler.kv.cache.retentions is not None) == (policy == "value")
        if policy == "value":
            assert simulation.scheduler.kv.cache.retentions.num_live > 0


@given(
    seed=st.integers(0, 10_000),
    page_size=st.sampled_from([1, 8]),
    is_asynchronous=st.booleans(),
    policy=st.sampled_from(["lpm", "fcfs", "random", "lof"]),
    enable_mixed_chunk=st.booleans(),
    max_itl_ms=st.sampled_from(["auto", "none", 300.0]),
    share_of_tool_calls=st.sampled_from([0.0, 0.5]),
)
@example(  # the cache has the token that stopped a request, and retains it
    seed=1370,
    page_size=1,
    is_asynchronous=True,
    policy="lof",
    enable_mixed_chunk=False,
    max_itl_ms="none",
    share_of_tool_calls=0.5,
)
@example(  # in one turn, two retentions begin
    seed=1100,
    page_size=1,
    is_asynchronous=True,
    policy="fcfs",
    enable_mixed_chunk=True,
    max_itl_ms="auto",
    share_of_tool_calls=0.5,
)
def test_a_replay_decides_as_recorded(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    page_size: int,
    is_asynchronous: bool,
    policy: str,
    enable_mixed_chunk: bool,
    max_itl_ms: float | str,
    share_of_tool_calls: float,
) -> None:
    """Whatever times were measured: a replay learns from the same."""
    path = tmp_path_factory.mktemp("schedule") / "record"
    recorded = Recorded(
        path,
        page_size,
        is_asynchronous=is_asynchronous,
        seconds_of=noisy_s(seed),
        max_itl_ms=max_itl_ms,
        schedule_policy=policy,
        enable_mixed_chunk=enable_mixed_chunk,
        enable_priority_scheduling=policy == "lof",
    )
    recorded.run(workload(seed), num_turns=20, share_of_tool_calls=share_of_tool_calls)
    found = replayed(path)
    assert found.difference is None and found.num_equal == found.num_recorded > 0
    assert not recorded.recorder._live, "requests that have ended are forgotten"


def test_a_replay_keeps_the_adapters(tmp_path: Path) -> None:
    """It has none of their files. Only requests of the same adapter share prefixes."""
    path = tmp_path / "record"
    recorded = Recorded(path, 1, lora_paths=["a=/adapters/1", "b=/adapters/2"], max_loras=2, max_lora_rank=8)
    adapters = [facts.ref for facts in recorded.scheduler.adapters.facts]
    recorded.run(workload(6, adapters=adapters), num_turns=60)
    assert {new.adapter for step in recorded.runner.steps for new in step.new_rows} == {0, 1, 2}
    found = replayed(path)
    assert found.difference is None and found.num_equal == found.num_recorded > 0
    assert {one.options.adapter for one in Recording(path).records() if isinstance(one, Arrival)} == {None, *adapters}


def test_a_replay_empties_the_cache_when_somebody_did(tmp_path: Path) -> None:
    options = RequestOptions(sampling=SamplingParams(max_new_tokens=2, sampling_seed=1))
    messages: dict[int, list[object]] = {
        turn: [GenerateReq(f"r{turn}", pack_ids([*range(10, 50)]), options)] for turn in (0, 20, 40)
    }
    path = tmp_path / "record"
    recorded = Recorded(path, 1)
    recorded.run(lambda turn: messages.get(turn, [FlushCacheReq(1)] if turn == 30 else []), num_turns=60)
    assert [step.num_tokens for step in recorded.runner.steps if step.extend_lens is not None] == [40, 1, 40]
    assert replayed(path).difference is None


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_what_the_planner_had_learned_at_an_arrival_is_found_again(tmp_path: Path, is_asynchronous: bool) -> None:
    path = tmp_path / "record"
    recorded = Recorded(path, 1, is_asynchronous=is_asynchronous, seconds_of=noisy_s(3))
    messages_of, gap = workload(3), recorded.scheduler.planner.gap
    assert gap is not None
    costs: list[object] = []

    def watched(turn: int) -> list[object]:
        messages = messages_of(turn)
        costs.extend(gap.model.cost for message in messages if isinstance(message, GenerateReq))
        return messages

    recorded.run(watched, num_turns=60)
    replay = Replay(Recording(path))
    for number in (0, 1, len(costs) // 2, len(costs) - 1):
        found = learned(replay, number)
        assert found is not None and found.model.cost == costs[number]
    assert len(set(costs)) > 3


def test_other_times_give_other_decisions(tmp_path: Path) -> None:
    """So the times of a recording matter, and the test above can fail."""
    path = tmp_path / "record"
    Recorded(path, 1, seconds_of=noisy_s(1)).run(workload(1), num_turns=60)
    replay = Replay(Recording(path))
    assert compare(replay).difference is None
    replay.script.steps = [
        dataclasses.replace(step, start_s=3 * step.start_s, end_s=3 * step.end_s) for step in replay.script.steps
    ]
    found = compare(replay)
    assert found.difference is not None and found.num_equal > 0


def test_steps_with_drafts_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts come from the tokens of a request, so a replay proposes the same ones and accepts the same ones."""
    monkeypatch.setattr("fakes.next_token", lambda ids, seed, vocab_size, weights=0: (int(ids[-1]) * 5 + 1) % 8)
    recorded = Recorded(tmp_path / "record", 1, speculative_algorithm="NGRAM")
    recorded.run(workload(5), num_turns=400)
    found = recorded.scheduler.state().speculation
    assert found is not None and found.num_drafts > found.num_verifications > 20 and found.num_accepted_drafts > 0
    comparison = compare(Replay(Recording(tmp_path / "record")))
    assert comparison.difference is None and comparison.num_equal == len(recorded.runner.steps)


@pytest.mark.parametrize(("recorded", "meaning"), [(None, "none"), (0.0, "auto"), (50.0, 50.0)])
def test_a_bound_of_an_older_recording_keeps_its_meaning(
    tmp_path: Path, recorded: float | None, meaning: float | str
) -> None:
    path = tmp_path / "record"
    Recorded(path, 1).run(workload(2), num_turns=20)
    replay = Replay(Recording(path))
    assert replay.server_args().max_itl_ms == "auto"
    settings = {**replay.start.server_args, "max_itl_ms": recorded}
    replay.start = msgspec.structs.replace(replay.start, version=1, server_args=settings)
    assert replay.server_args().max_itl_ms == meaning


def test_another_policy_is_told_from_the_recorded_one(tmp_path: Path) -> None:
    path = tmp_path / "record"
    Recorded(path, 1, schedule_policy="lof").run(workload(1, rate=0.8), num_turns=8)
    replay = Replay(Recording(path))
    assert compare(replay).difference is None
    changed = {**replay.start.server_args, "schedule_policy": "fcfs"}
    replay.start = msgspec.structs.replace(replay.start, server_args=changed)
    found = compare(replay)
    assert found.num_equal < found.num_recorded
    assert found.difference is not None and "it is now a" in found.difference


def test_a_recording_has_all_requests_with_their_outputs(tmp_path: Path) -> None:
    path = tmp_path / "record"
    recorded = Recorded(path, 1)
    recorded.run(workload(2), num_turns=40)
    said: dict[str, list[int]] = {}
    reader = TokenOutReader()
    for message in recorded.outbox.messages:
        for out in reader.read(message):
            said.setdefault(out.rid, []).extend(out.token_ids)
    recording = Recording(path)
    records = list(recording.records())
    arrivals = [record for record in records if isinstance(record, Arrival)]
    ends = {record.number: recording.ids(record.ids).tolist() for record in records if isinstance(record, End)}
    assert len(arrivals) == len(ends) == len(said) > 5
    assert ends == {number: said[f"r{number}"] for number in ends}
    steps = [record for record in records if isinstance(record, Step)]
    assert any(step.rows is None for step in steps), "steps that go on are short"
    assert all(step.start_s < step.end_s for step in steps)
    assert path.stat().st_mode & 0o077 == 0, "only the owner may read prompts"


@pytest.mark.parametrize("is_aborted", [False, True])
def test_the_output_of_a_resumed_request_has_the_tokens_of_the_first_engine(tmp_path: Path, is_aborted: bool) -> None:
    """Also if it ends before its first step."""
    options = RequestOptions(sampling=SamplingParams(max_new_tokens=6, sampling_seed=1, ignore_eos=True))
    resumed = Resumed([11, 12], 0, 0)
    messages: list[object] = [GenerateReq("r0", pack_ids([1, 2, 3]), options, resumed)]
    recorded = Recorded(tmp_path / "record", 1)
    recorded.run(lambda turn: messages + [AbortReq("r0")] * is_aborted, num_turns=1)
    recording = Recording(tmp_path / "record")
    (end,) = [record for record in recording.records() if isinstance(record, End)]
    ids = recording.ids(end.ids).tolist()
    reader = TokenOutReader()
    said = [token for message in recorded.outbox.messages for out in reader.read(message) for token in out.token_ids]
    assert ids == [11, 12, *said] and len(ids) == (2 if is_aborted else 6)


class Unread(list[str]):
    def __iter__(self) -> Iterator[str]:
        raise AssertionError("the recorder reads the next tokens of each step")


def test_next_tokens_cost_the_recorder_nothing(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "record", 1)
    recorded.recorder.on_outputs(BatchTokenOut([], NextTokens(Unread(["r0"]), [7])))


def test_the_profile_is_fitted_to_the_recorded_times(tmp_path: Path) -> None:
    """On this clock each step takes as long as its reads of the clock, whatever its size."""
    path = tmp_path / "record"
    Recorded(path, 1).run(workload(3), num_turns=60)
    replay = Replay(Recording(path))
    profile = replay.fit("x")
    errors = [abs(profile.cost.seconds(step.shape) / seconds - 1) for step, seconds in replay.timed()]
    assert sorted(errors)[len(errors) // 2] < 0.05 and 0 < profile.host_s < 0.05
    assert replay.measured().num_completed > 5


@pytest.mark.parametrize("seed", range(3))
def test_a_recording_whose_first_files_are_gone_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Each file begins with a complete step, and the ends of requests that arrived in a lost file are left out."""
    path = tmp_path / "record"
    small = functools.partial(ScheduleFile, max_bytes=3000, num_kept=1000)
    monkeypatch.setattr(schedule_recorder, "ScheduleFile", small)
    Recorded(path, 1).run(workload(seed, rate=0.1), num_turns=200)
    whole = Replay(Recording(path))
    assert compare(whole).difference is None
    parts = [path]
    while (older := tmp_path / f"record.{len(parts)}").exists():
        parts.append(older)
    assert len(parts) > 4
    orphans, num_left = 0, len(parts) // 2
    while len(parts) > num_left:
        parts.pop().unlink()
        replay = Replay(Recording(path))
        assert not replay.recording.is_whole
        orphans += len(replay.script.ends.keys() - replay.arrivals().keys())
        last, expected = replay.script.steps[-1], whole.script.steps[-1]
        assert last.rows.tolist() == expected.rows.tolist() and last.seq_lens.tolist() == expected.seq_lens.tolist()
        add_replay_table(Result("x", "x", "x", [], None), replay, None, replay.fit("x"))
    assert orphans > 0


def test_a_recording_with_a_gap_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk was full for a while. The new file begins with a complete step."""

    class Failing(ScheduleFile):
        num_left = 120

        def write(self, record: Record, now_s: float) -> None:
            self.num_left -= 1
            if not self.num_left:
                self._end(OSError("the disk is full"))
            super().write(record, now_s)

    work = functools.partial(workload, 1, rate=0.1)
    Recorded(tmp_path / "whole", 1).run(work(), num_turns=200)
    monkeypatch.setattr(schedule_record, "_RETRY_S", 0.1)
    monkeypatch.setattr(schedule_recorder, "ScheduleFile", Failing)
    path = tmp_path / "record"
    Recorded(path, 1).run(work(), num_turns=200)
    assert [Recording(one).start.follows_gap for one in (path, tmp_path / "record.1")] == [True, False]
    replay, whole = Replay(Recording(path)), Replay(Recording(tmp_path / "whole"))
    assert whole.recording.is_whole and not replay.recording.is_whole
    expected = {step.turn: step for step in whole.script.steps}
    assert 100 < len(replay.script.steps) < len(expected) - 10
    for step in replay.script.steps:
        other = expected[step.turn]
        assert step.rows.tolist() == other.rows.tolist() and step.seq_lens.tolist() == other.seq_lens.tolist()
    assert 0 < sum(1 for _ in replay.requests()) < whole.num_requests


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--record-schedule .*no-such-folder"):
        Recorded(tmp_path / "no-such-folder" / "record", 1)


def test_steps_that_only_copy_kv_are_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "record"
    recorded = Recorded(path, 1, host_blocks=4096)
    recorded.run(workload(2, rate=0.1), num_turns=60)
    assert any(not len(step.rows) for step in recorded.runner.steps)
    steps = [record for record in Recording(path).records() if isinstance(record, Step)]
    assert len(steps) == sum(len(step.rows) > 0 for step in recorded.runner.steps)

"""Reports of the deaths of an engine's processes."""

from __future__ import annotations

import asyncio
import json
import types
from pathlib import Path
from typing import Any

from fake_http import FakeScheduler, make_manager

from tercet.srt.entrypoints.restarts import Death, crash_report, write_report
from tercet.srt.io_struct import GenerateReq, pack_ids
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.server_args import ServerArgs
from tercet.srt.step_journal import Journal, JournalRow


def test_reports_are_private_and_few(tmp_path: Path) -> None:
    paths = [write_report({"num_earlier_restarts": i, "a": "b"}, tmp_path / "new") for i in range(30)]
    assert paths[-1].stat().st_mode & 0o777 == 0o600
    assert json.loads(paths[-1].read_text())["a"] == "b"
    assert len(list((tmp_path / "new").iterdir())) == 20


def test_a_report_is_kept_although_the_clock_was_set_back(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"crash-99990101-0000{i:02}-1-0.json").touch()
    path = write_report({"num_earlier_restarts": 0}, tmp_path)
    assert path.exists() and len(list(tmp_path.iterdir())) == 20
    assert not (tmp_path / "crash-99990101-000000-1-0.json").exists()


def test_a_report_has_no_text_of_a_client_and_the_fatal_step_first() -> None:
    params = SamplingParams(
        stop="SECRET", stop_regex="SECRET+", json_schema='{"const": "SECRET"}', logit_bias={"5": 1.0}, temperature=0.5
    )
    samples: list[Any] = [
        types.SimpleNamespace(
            key=str(i),
            rid=f"r{i}",
            index=0,
            prompt_ids=[1, 2, 3],
            output_ids=[4],
            num_recoveries=0,
            request=GenerateReq(str(i), b"", RequestOptions(sampling=params)),
        )
        for i in range(300)
    ]
    death = Death("scheduler", "died", 1, False, False)
    report = crash_report(death, Journal([JournalRow("299", 5)], []), ServerArgs(model_path="m"), None, samples, 0)
    assert "SECRET" not in json.dumps(report)
    assert (report["num_requests"], len(report["requests"])) == (300, 256)
    first = report["requests"][0]
    assert (first["id"], first["in_fatal_step"], first["output_tokens"], first["prompt_tokens"]) == ("r299", True, 5, 3)
    assert (first["sampling"]["temperature"], first["sampling"]["stop"]) == (0.5, "6 characters")

    args = ServerArgs(model_path="m", crash_report_requests=True)
    first = crash_report(death, Journal(None, []), args, None, samples, 0)["requests"][0]
    assert (first["sampling"]["stop"], first["prompt_ids"], first["output_ids"]) == ("SECRET", [1, 2, 3], [4])


def test_a_report_has_the_ids_of_a_sample_that_an_http_worker_has_prepared(tmp_path: Path) -> None:
    async def scenario() -> None:
        manager = make_manager(FakeScheduler())
        options = RequestOptions(sampling=SamplingParams(max_new_tokens=8), stream=True)
        sample = manager.adopt(GenerateReq("key", pack_ids([1, 2, 3]), options), "name", 0)
        args = ServerArgs(model_path="m", crash_report_requests=True)
        death = Death("scheduler", "died", 1, False, False)
        path = write_report(crash_report(death, Journal(None, []), args, None, [sample], 0), tmp_path)
        assert json.loads(path.read_text())["requests"][0]["prompt_ids"] == [1, 2, 3]

    asyncio.run(scenario())

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tercet.srt.entrypoints import child
from tercet.srt.ipc import RunDir


@pytest.mark.parametrize("is_there", [True, False])
def test_what_follows_from_another_process_failing_is_not_logged_as_an_error(
    is_there: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = os.pipe()
    run_dir = RunDir(tmp_path if is_there else tmp_path / "removed")
    with caplog.at_level(logging.DEBUG):
        child._report_failure(writer, RuntimeError("no socket"), run_dir)
    assert [record.levelno for record in caplog.records] == [logging.ERROR if is_there else logging.DEBUG]
    assert b"no socket" in os.read(reader, 1000)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_the_reason_may_have_names_that_no_message_can_have(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child.logger, "disabled", True)  # a report of a test cannot have such a name either
    reader, writer = os.pipe()
    child._report_failure(writer, kind("'\udcff.safetensors' is damaged"), RunDir(tmp_path))
    assert rb"'\udcff.safetensors' is damaged" in os.read(reader, 1000)
    os.close(reader)
    os.close(writer)

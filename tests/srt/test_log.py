from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest

from tercet.srt import log


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    logger, root = logging.getLogger("tercet"), logging.getLogger()
    before = (logger.handlers[:], logger.level, logger.propagate)
    before_root = root.handlers[:]
    yield
    logger.handlers[:], logger.level, logger.propagate = before
    root.handlers[:] = before_root
    logging.captureWarnings(False)


def test_json_has_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("http", "info", "json")
    logger = logging.getLogger("tercet.some.module")
    logger.info("%d tokens\nand a line", 3)
    log.event(logger, logging.WARNING, "Access", {"path": '/x"\n', "status": 200, "time": "mine"})
    logger.debug("not shown")
    try:
        raise RuntimeError("a\nb")
    except RuntimeError:
        logger.exception("failed")
    plain, event, failed = map(json.loads, capsys.readouterr().err.splitlines())
    assert plain["message"] == "3 tokens\nand a line" and plain["level"] == "info" and plain["role"] == "http"
    assert event == {**event, "message": "Access", "path": '/x"\n', "status": 200, "logger": "tercet.some.module"}
    assert event["time"] != "mine", "a value of an event hides no value of the line"
    assert "RuntimeError: a\nb" in failed["exception"]


def test_json_shows_a_path_that_is_not_utf_8(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("http", "info", "json")
    try:
        raise ValueError("no \udcff")
    except ValueError:
        logging.getLogger("tercet.x").exception("cannot read \udcff.pem")
    line = json.loads(capsys.readouterr().err)
    assert line["message"] == r"cannot read \udcff.pem" and r"ValueError: no \udcff" in line["exception"]


def test_json_is_utf_8_whatever_the_locale_is() -> None:
    code = "import logging; from tercet.srt import log; log.configure('http', 'info', 'json'); "
    code += "logging.getLogger('tercet.x').info('gr\u00fc\u00df \U0001f600')"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "latin-1"}
    ran = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True)
    assert json.loads(ran.stderr.decode("utf-8"))["message"] == "gr\u00fc\u00df \U0001f600"


def test_a_value_forges_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("http", "info")
    log.event(logging.getLogger("tercet.x"), logging.INFO, "Access", {"path": "/a\n[00:00:00 http] INFO b", "n": 1})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith('INFO Access path="/a\\n[00:00:00 http] INFO b" n=1')


def test_lines_of_libraries_have_the_same_format(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as those of OpenTelemetry's exporter, whose collector is gone."""
    for _ in range(2):
        log.configure("http", "info", "json")
    logging.getLogger("some.library").warning("no collector")
    logging.getLogger("some.library").info("not shown")
    warnings.warn("old", stacklevel=1)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["logger"] for line in lines] == ["some.library", "py.warnings"]
    assert lines[0]["message"] == "no collector"

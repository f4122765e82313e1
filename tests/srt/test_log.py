from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from tercet.srt import log


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    logger = logging.getLogger("tercet")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


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


def test_a_value_forges_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("http", "info")
    log.event(logging.getLogger("tercet.x"), logging.INFO, "Access", {"path": "/a\n[00:00:00 http] INFO b", "n": 1})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith('INFO Access path="/a\\n[00:00:00 http] INFO b" n=1')

"""Fixtures of the serving benchmark's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bench_tokenizers import bytes_only
from live_site import LiveSite, live_site
from serving_bench import Bench


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    bytes_only().backend.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture
def site() -> Iterator[LiveSite]:
    with live_site() as live:
        yield live


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], tokenizer_dir: str) -> Bench:
    return Bench(capsys, tokenizer_dir)

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from longest_first import sort_files


def test_files_of_long_tests_come_first_and_their_tests_stay_in_order() -> None:
    def item(name: str, limit: int | None = None) -> Any:
        marker = limit and pytest.mark.timeout(limit).mark
        return SimpleNamespace(name=name, path=Path(name[0]), get_closest_marker=lambda _: marker)

    items = [item("a1"), item("b1"), item("b2"), item("c1"), item("c2", 600), item("c3", 300), item("d1", 1200)]
    sort_files(items)
    assert [item.name for item in items] == ["d1", "c1", "c2", "c3", "b1", "b2", "a1"]

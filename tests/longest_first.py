"""The order in which parallel test workers take files: the longest first, so that no worker is idle at the end."""

from __future__ import annotations

from collections import Counter

import pytest


def sort_files(items: list[pytest.Item]) -> None:
    """Sorts tests by the longest time limit that their file states, then by how many tests it has.

    A test that takes long states a limit (`pytest.mark.timeout`). Within a file, the order stays as it is.
    """
    limits: Counter[str] = Counter()
    sizes = Counter(str(item.path) for item in items)
    for item in items:
        if marker := item.get_closest_marker("timeout"):
            limits[str(item.path)] = max(limits[str(item.path)], marker.args[0])
    items.sort(key=lambda item: (-limits[str(item.path)], -sizes[str(item.path)]))

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_http import Site


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()

"""What the errors of an audit name: they are all that a report of a leak has."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from tercet.mem_cache.page_ledger import PageLedger

PAGE = 4


def i32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def leak(ledger: PageLedger) -> None:
    ledger.add_free(i32(2))
    ledger.check_complete()


def free_again(ledger: PageLedger) -> None:
    ledger.add_free(i32(1))
    ledger.add_free(i32(2, 1))


def own_again(ledger: PageLedger) -> None:
    ledger.add_owned(i32(PAGE, PAGE + 1), PAGE)
    ledger.add_owned(i32(2 * PAGE, PAGE + 2), PAGE)


def free_what_is_owned(ledger: PageLedger) -> None:
    """One of the pages is free already."""
    ledger.add_owned(i32(2 * PAGE), PAGE)
    ledger.add_free(i32(1))
    ledger.add_free(i32(1, 2, 3))


@pytest.mark.parametrize(
    ("num_pages", "mistake", "says"),
    [
        (3, leak, "2 pages neither free nor owned: [1, 3]"),
        (21, leak, f"20 pages neither free nor owned: {[1, *range(3, 18)]}"),
        (3, free_again, "1 pages freed twice: [1]"),
        (3, own_again, "1 pages owned twice: [1]"),
        (3, free_what_is_owned, "2 pages both free and owned: [1, 2]"),
    ],
)
def test_an_error_names_the_pages_and_what_is_wrong(
    num_pages: int, mistake: Callable[[PageLedger], None], says: str
) -> None:
    with pytest.raises(AssertionError, match=f"^{re.escape(says)}$"):
        mistake(PageLedger(num_pages))

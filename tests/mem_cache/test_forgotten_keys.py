"""The keys of KV files that are no longer known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.mem_cache import forgotten_keys
from tercet.mem_cache.forgotten_keys import ForgottenKeys


@given(num_added=st.integers(0, 30), since=st.integers(0, 30), num_kept=st.integers(1, 8))
def test_the_last_keys_are_known_in_order(num_added: int, since: int, num_kept: int) -> None:
    keys = [bytes([number]) for number in range(num_added)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forgotten_keys, "_NUM_KEPT", num_kept)
        forgotten = ForgottenKeys()
        for number, key in enumerate(keys):
            assert forgotten.count == number
            forgotten.add(key)
        assert len(forgotten._recent[1]) <= 2 * num_kept
    found = forgotten.after(since)
    assert found == keys[since:] or (found is None and num_added - since > num_kept)

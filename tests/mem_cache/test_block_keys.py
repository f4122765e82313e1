"""Keys name the whole prefix, the namespace and the model."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tercet.mem_cache.block_keys import KEY_BYTES, BlockKeys, first_key

tokens = st.lists(st.integers(0, 2), max_size=14)


def keys_of(ids: list[int], namespace: str = "", identity: bytes = b"model", block_len: int = 3) -> list[bytes]:
    return list(BlockKeys(identity, namespace, block_len).cover(np.array(ids, np.int32)))


@given(tokens, tokens)
def test_two_keys_are_equal_if_and_only_if_the_prefixes_are(one: list[int], other: list[int]) -> None:
    ours, theirs = keys_of(one), keys_of(other)
    assert len(ours) == len(one) // 3 and all(len(key) == KEY_BYTES for key in ours)
    for index, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        end = 3 * (index + 1)
        assert (our == their) == (one[:end] == other[:end])


@given(tokens, st.integers(0, 14))
def test_a_sequence_that_grows_keeps_its_keys(ids: list[int], first: int) -> None:
    keys = BlockKeys(b"model", "", 3)
    keys.cover(np.array(ids[:first], np.int32))
    assert keys.cover(np.array(ids, np.int32)) == keys_of(ids)
    assert keys.cover(np.array(ids[:first], np.int32)) == keys_of(ids[:first])


def test_namespaces_and_models_share_no_key() -> None:
    ids = [1, 2, 0]
    found = [keys_of(ids, "a"), keys_of(ids, "b"), keys_of(ids, "", b"modela"), keys_of(ids, "a", b"other")]
    assert len({key for keys in found for key in keys}) == 4
    assert keys_of(ids, "\ud800") != keys_of(ids, "?")


@given(tokens, st.integers(0, 4))
def test_a_key_is_that_of_its_content(ids: list[int], index: int) -> None:
    keys, ids_array = BlockKeys(b"model", "me", 3), np.array(ids, np.int32)
    found, expected = keys.key(ids_array, index), keys_of(ids, "me")
    if index >= len(expected):
        assert found is None and not keys.keys
        return
    assert found == expected[index] and keys.keys == expected[: index + 1], "nothing after it is hashed"
    assert keys.places == {key: place for place, key in enumerate(keys.keys)}
    content = keys.content(ids_array, index)
    assert content.key == found and content.namespace == "me"
    assert content.tokens == ids_array[3 * index : 3 * index + 3].tobytes()
    assert content.before == (expected[index - 1] if index else first_key(b"model", "me"))
    assert content.is_first(b"model") == (index == 0) and not content.is_first(b"other")
    assert not content._replace(namespace="you").is_first(b"model")

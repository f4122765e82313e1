from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.srt.adapters import AdapterRef, namespace_of, parse_lora_paths, parts_of, written_lora_paths

SALTS = st.text(alphabet="\0ab01", max_size=6)
ADAPTERS = st.none() | st.builds(AdapterRef, st.sampled_from("xy"), st.text(alphabet="ab01", min_size=1, max_size=3))
NAMES = st.text(alphabet=st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20)


@given(SALTS, ADAPTERS, SALTS, ADAPTERS)
def test_requests_share_a_namespace_only_with_equal_salts_and_files(
    salt: str, adapter: AdapterRef | None, other_salt: str, other: AdapterRef | None
) -> None:
    """Whatever clients send as salts. The name of an adapter does not count."""
    files = "" if adapter is None else adapter.fingerprint
    other_files = "" if other is None else other.fingerprint
    is_equal = (salt, files) == (other_salt, other_files)
    assert (namespace_of(salt, adapter) == namespace_of(other_salt, other)) == is_equal
    assert parts_of(namespace_of(salt, adapter)) == (files, salt)


@given(st.text(alphabet="ab01", max_size=6))
def test_without_an_adapter_the_salt_is_the_namespace(salt: str) -> None:
    """So KV files of earlier versions are found."""
    assert namespace_of(salt, None) == salt


@given(st.dictionaries(NAMES, NAMES, max_size=3))
def test_what_is_written_is_read(paths: dict[str, str]) -> None:
    assert parse_lora_paths(written_lora_paths(paths)) == paths


def test_each_form_of_an_adapter_is_read() -> None:
    given = ["a=/x=1", "/b", '{"lora_name": "c=d", "lora_path": "/c", "pinned": true}']
    assert parse_lora_paths(given) == {"a": "/x=1", "/b": "/b", "c=d": "/c"}
    assert parse_lora_paths(None) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a=1", "a=2"], "--lora-paths names 'a' twice"),
        (["a="], "--lora-paths a=: the path of 'a' is empty"),
        (["=p"], "must have 1 to 256 printable characters"),
        (["\n=p"], "must have 1 to 256 printable characters"),
        ([""], "must have 1 to 256 printable characters"),
        (["{"], "must be NAME=PATH, PATH or a JSON object"),
        (['{"a":' * 50_000], "must be NAME=PATH, PATH or a JSON object"),
        (['{"lora_name": "a"}'], "must have the texts lora_name and lora_path"),
        (['{"lora_name": "a", "lora_path": "b", "rank": 1}'], "must have the texts lora_name and lora_path"),
        (['{"lora_name": 1, "lora_path": "b"}'], "must have the texts lora_name and lora_path"),
    ],
)
def test_bad_adapters(given: list[str], message: str) -> None:
    with pytest.raises(ValueError, match="--lora-paths") as caught:
        parse_lora_paths(given)
    assert message in str(caught.value)

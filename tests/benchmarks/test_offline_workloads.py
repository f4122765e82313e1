from __future__ import annotations

import pytest

from tercet.benchmarks.offline_workloads import Span, ids_of, random_requests, shared_prefix_requests


def test_seed_0_is_the_workload_that_others_published() -> None:
    requests = random_requests(256, Span(100, 1024), Span(100, 1024), 0, vocab_size=151_936)
    assert sum(one.prompt_len for one in requests) == 142_827
    assert sum(one.output_len for one in requests) == 133_966
    assert all(len(ids_of(one)) == one.prompt_len for one in requests)


def test_ids_fit_a_small_vocabulary() -> None:
    ids = {i for one in random_requests(20, Span(50, 50), Span(1, 1), 3, vocab_size=7) for i in ids_of(one)}
    assert ids == set(range(7))


@pytest.mark.parametrize(("text", "span"), [("512", (512, 512)), ("100-1024", (100, 1024))])
def test_lengths(text: str, span: tuple[int, int]) -> None:
    assert Span.parse(text) == span


@pytest.mark.parametrize("text", ["0", "9-3", "-5", "x", ""])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):
        Span.parse(text)


def test_groups_share_their_beginning_and_nothing_else() -> None:
    requests = shared_prefix_requests(3, 4, 10, 5, 6, 0, vocab_size=1000)
    beginnings = [tuple(ids_of(one)[:10]) for one in requests]
    assert len(requests) == 12 and len(set(beginnings)) == 3
    assert all(beginnings.count(one) == 4 for one in beginnings)
    assert len({tuple(ids_of(one)) for one in requests}) == 12
    assert {(one.prompt_len, one.output_len) for one in requests} == {(15, 6)}
    assert beginnings != sorted(beginnings, key=beginnings.index), "a group's requests come one after the other"

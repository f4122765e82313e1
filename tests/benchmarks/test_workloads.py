"""Workloads made up from a seed: reproducible, of the lengths they say, and sharing only what they are meant to."""

from __future__ import annotations

import numpy as np
import pytest
from bench_tokenizers import bytes_only, merging
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.benchmarks.workloads import (
    BUNDLED_TEXT,
    PromptMaker,
    Request,
    Stream,
    lengths,
    random_ids,
    random_stream,
    random_text,
    shared_prefix,
    warmups,
)
from tercet.srt.text.tokenizer import Tokenizer

TEXT = BUNDLED_TEXT.read_text(encoding="utf-8")
TOKENIZERS = {"bytes": bytes_only, "merging": merging, "with bos": lambda: merging(with_bos=True)}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]()


def make(dataset: str, maker: PromptMaker, count: int, n_in: int, n_out: int, ratio: float, seed: int) -> list[Request]:
    if dataset == "random":
        return random_text(maker, count, n_in, n_out, ratio, seed, TEXT)
    return random_ids(maker, count, n_in, n_out, ratio, seed)


@pytest.mark.parametrize("dataset", ["random", "random-ids"])
@pytest.mark.parametrize("as_ids", [False, True])
def test_lengths_are_what_is_asked_and_what_is_told(tokenizer: Tokenizer, dataset: str, as_ids: bool) -> None:
    requests = make(dataset, PromptMaker(tokenizer, as_ids=as_ids), 60, 50, 20, 0.4, seed=3)
    told = [one.prompt_len for one in requests]
    for one in requests:
        real = one.prompt if as_ids else tokenizer.encode(one.prompt)
        assert one.prompt_len == len(real)
        assert 20 <= one.prompt_len <= 50 and 8 <= one.output_len <= 20
    assert len(set(told)) > 10
    same_lengths = make(dataset, PromptMaker(tokenizer, as_ids=as_ids), 60, 50, 20, 0.4, seed=3)
    assert requests == same_lengths
    assert requests != make(dataset, PromptMaker(tokenizer, as_ids=as_ids), 60, 50, 20, 0.4, seed=4)


def test_text_and_ids_have_the_same_lengths(tokenizer: Tokenizer) -> None:
    for dataset in ("random", "random-ids"):
        texts = make(dataset, PromptMaker(tokenizer, as_ids=False), 40, 60, 10, 0.5, seed=0)
        ids = make(dataset, PromptMaker(tokenizer, as_ids=True), 40, 60, 10, 0.5, seed=0)
        assert [one.prompt_len for one in texts] == [one.prompt_len for one in ids]


def test_ids_at_random_avoid_special_tokens_and_survive_alone(tokenizer: Tokenizer) -> None:
    maker = PromptMaker(tokenizer, as_ids=True)
    assert tokenizer.special_ids and not tokenizer.special_ids & set(maker.plain_ids.tolist())
    for token in maker.plain_ids[:200].tolist():
        assert tokenizer.encode(tokenizer.decode([token]), add_special_tokens=False) == [token]
    if tokenizer is bytes_only():
        assert maker.plain_ids.tolist() == list(range(128))


def test_naive_random_text_would_have_other_lengths() -> None:
    """What `fit` is for: with this tokenizer, decoding random ids is not enough."""
    tokenizer = merging()
    ids = PromptMaker(tokenizer, as_ids=True).random_ids(200, random_stream(0, Stream.CONTENT))
    assert len(tokenizer.encode(tokenizer.decode(ids))) != 200


@given(st.integers(1, 400), st.floats(0, 1), st.integers(0, 3))
def test_lengths_stay_in_range(full: int, ratio: float, seed: int) -> None:
    drawn = lengths(full, ratio, 300, np.random.default_rng(seed))
    assert drawn.min() >= max(1, int(full * ratio)) and drawn.max() <= full
    if ratio == 1:
        assert set(drawn.tolist()) == {full}


def test_both_ends_of_the_range_are_reached() -> None:
    drawn = lengths(6, 0.5, 500, np.random.default_rng(0))
    assert set(drawn.tolist()) == {3, 4, 5, 6}
    assert set(lengths(3, 0.0, 100, np.random.default_rng(0)).tolist()) == {1, 2, 3}


@pytest.mark.parametrize("full, ratio", [(0, 0.5), (5, -0.1), (5, 1.1)])
def test_impossible_lengths_are_refused(full: int, ratio: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        lengths(full, ratio, 1, np.random.default_rng(0))


def test_pieces_of_the_text_are_its_text_and_start_at_places_of_their_own() -> None:
    maker = PromptMaker(merging(), as_ids=False)
    requests = random_text(maker, 100, 40, 5, 1.0, 0, TEXT)
    around = TEXT + TEXT[:1000]
    assert sum(one.prompt in around for one in requests) > 90  # all but those whose last token is repaired
    assert len({one.prompt[:12] for one in requests}) > 90


def test_a_short_text_goes_round_and_its_places_are_used_evenly() -> None:
    maker = PromptMaker(bytes_only(), as_ids=False)
    requests = random_text(maker, 9, 7, 1, 1.0, 0, "abc")
    assert {one.prompt for one in requests} == {"abcabca", "bcabcab", "cabcabc"}
    assert all([one.prompt for one in requests].count(text) == 3 for text in ("abcabca", "bcabcab", "cabcabc"))
    with pytest.raises(ValueError, match="empty"):
        random_text(maker, 1, 7, 1, 1.0, 0, "")


@pytest.mark.parametrize("as_ids", [False, True])
def test_groups_share_their_beginning_and_nothing_else(tokenizer: Tokenizer, as_ids: bool) -> None:
    maker = PromptMaker(tokenizer, as_ids=as_ids)
    sizes = {
        "num_groups": 3,
        "prompts_per_group": 4,
        "system_prompt_len": 30,
        "question_len": 10,
        "output_len": 7,
    }
    requests = shared_prefix(maker, **sizes, ordered=True, seed=1)
    assert len(requests) == 12 and {one.output_len for one in requests} == {7}
    groups = [requests[i : i + 4] for i in range(0, 12, 4)]
    for group in groups:
        encoded = [one.prompt if as_ids else tokenizer.encode(one.prompt) for one in group]
        assert [one.prompt_len for one in group] == [len(ids) for ids in encoded]
        common = next((i for i, ids in enumerate(zip(*encoded, strict=False)) if len(set(ids)) > 1), 0)
        assert 28 <= common <= 34
    assert len({str(group[0].prompt)[:20] for group in groups}) == 3
    shuffled = shared_prefix(maker, **sizes, ordered=False, seed=1)
    assert shuffled != requests and sorted(map(str, shuffled)) == sorted(map(str, requests))


def test_no_group_is_refused() -> None:
    for groups, each in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            shared_prefix(
                PromptMaker(bytes_only(), as_ids=True),
                num_groups=groups,
                prompts_per_group=each,
                system_prompt_len=5,
                question_len=5,
                output_len=5,
                ordered=False,
                seed=0,
            )


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_warmups_are_as_long_as_the_first_requests_and_none_of_them(seed: int) -> None:
    maker = PromptMaker(bytes_only(), as_ids=False)
    requests = random_ids(maker, 3, 40, 90, 1.0, seed)
    warm = warmups(maker, requests, 5, seed)
    assert [one.prompt_len for one in warm] == [40] * 5
    assert {one.output_len for one in warm} == {32}
    assert not {one.prompt for one in warm} & {one.prompt for one in requests}


def test_the_bundled_text_is_long_plain_and_said_to_be_free() -> None:
    assert len(TEXT) > 50_000 and TEXT.isascii() and "PRIDE AND PREJUDICE" in TEXT
    assert "public domain" in (BUNDLED_TEXT.parent / "README.md").read_text(encoding="utf-8")

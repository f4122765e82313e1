from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import Rows
from triton_interpreter import examples, permuted_programs

from tercet.model_executor.kernels.logit_edits import edit_logits, edit_logits_ref
from tercet.model_executor.kernels.sampling_layout import Column, Field

KINDS = st.sampled_from(["random", "ties", "equal", "flat", "banned", "zeros", "broken"])
SEEDS = st.integers(0, 2**31)


@settings(max_examples=examples(25))
@given(seed=SEEDS, vocab=st.integers(2, 300), kind=KINDS, room=st.sampled_from([8, 64, 4096]), n=st.integers(1, 3))
def test_tokens_and_counts_are_the_sorting_twins(seed: int, vocab: int, kind: str, room: int, n: int) -> None:
    rows = Rows(seed, n, vocab, kind)
    with permuted_programs(seed):
        found = rows.chosen(num_candidates=room)
    for ours, twins in zip(found, rows.expected(), strict=True):
        assert torch.equal(ours, twins)


@settings(max_examples=examples(6))
@given(seed=SEEDS, vocab=st.sampled_from([4096, 4097, 8500, 13_000]), kind=KINDS, room=st.sampled_from([64, 4096]))
def test_a_vocabulary_of_several_chunks(seed: int, vocab: int, kind: str, room: int) -> None:
    rows = Rows(seed, 2, vocab, kind)
    with permuted_programs(seed):
        found = rows.chosen(num_candidates=room)
    for ours, twins in zip(found, rows.expected(), strict=True):
        assert torch.equal(ours, twins)


@settings(max_examples=examples(20))
@given(seed=SEEDS, vocab=st.sampled_from([1, 31, 33, 1024, 5000]), kind=KINDS, n=st.integers(1, 4))
def test_edits_are_the_twins(seed: int, vocab: int, kind: str, n: int) -> None:
    rows = Rows(seed, n, vocab, kind if vocab > 1 else "random")
    cleared = torch.full((n, 3000), 7, dtype=torch.int32)
    out = edit_logits(rows.x, rows.table, rows.plan, rows.edits, rows.num_edited, cleared)
    expected = edit_logits_ref(rows.x, rows.table, rows.plan, rows.edits)
    edited = rows.plan[:, Field.EDITED] >= 0
    torch.testing.assert_close(out.lines, expected[edited], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.peaks.amax(-1), expected.where(~expected.isnan(), torch.inf).amax(-1))
    assert torch.equal((out.peak_ids == -1).any(-1), expected.isnan().any(-1))
    assert not cleared.any()


def test_a_row_does_not_depend_on_the_others() -> None:
    rows = Rows(3, 4, 200, "ties")
    everyone, *_ = rows.chosen()
    for i in range(4):
        assert torch.equal(rows.chosen(slice(i, i + 1))[0], everyone[i : i + 1])


def test_top_k_of_one_is_greedy_and_draws_only_what_is_kept() -> None:
    rows = Rows(4, 3, 100, "random")
    rows.table[:, Column.TOP_K] = 1
    rows.table[:, Column.GREEDY] = 0
    rows.plan[:, Field.EDITED] = -1
    assert torch.equal(rows.chosen()[0], rows.x.argmax(-1))


def test_broken_rows_answer_minus_one_and_are_not_counted() -> None:
    rows = Rows(5, 3, 100, "random")
    rows.plan[:, Field.COUNTS] = torch.arange(3)
    rows.x[0], rows.x[1, 50] = -torch.inf, torch.nan
    for greedy in (0, 1):
        rows.table[:, Column.GREEDY] = greedy
        tokens, counts, _ = rows.chosen()
        assert tokens[:2].tolist() == [-1, -1] and tokens[2] >= 0
        assert (counts - rows.edits.counts).sum(1).tolist() == [0, 0, 2]

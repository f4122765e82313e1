from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import examples

from tercet.model_executor.kernels.decode_start import decode_start, decode_start_ref

NUM_ROWS, VOCAB = 9, 40


class Step:
    """A drawn decode step: some rows in any order, and padding, which repeats row 0."""

    def __init__(self, seed: int, batch: int, padding: int, hidden: int, head_dim: int, context: int, dtype) -> None:
        g = torch.Generator().manual_seed(seed)
        rows = torch.cat((torch.randperm(NUM_ROWS, generator=g)[:batch] + 1, torch.zeros(padding, dtype=torch.int64)))
        lens = torch.randint(1, context + 1, (batch + padding,), generator=g)
        slots = torch.randint(1, 2**31 - 1, (batch + padding,), generator=g)
        lens[batch:], slots[batch:] = 1, 0
        self.inputs = torch.stack((rows, lens, slots))  # one buffer, as in a recorded step
        self.newest = torch.randint(0, VOCAB, (NUM_ROWS + 1,), generator=g)
        self.table = torch.randint(0, 99, (NUM_ROWS + 1, context), generator=g, dtype=torch.int32)
        self.embedding = torch.randn((VOCAB, hidden), generator=g).to(dtype)
        self.angles = torch.randn((context, 2, head_dim // 2), generator=g)

    def run(self, function, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
        table = self.table.clone()
        return (*function(*self.inputs, self.newest, table, self.embedding, self.angles, scale), table)


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(0, NUM_ROWS),
    padding=st.integers(0, 3),
    hidden=st.integers(1, 300),
    head_dim=st.sampled_from([16, 64, 80]),
    context=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_is_the_twins(seed, batch, padding, hidden, head_dim, context, dtype) -> None:
    step = Step(seed, batch, padding, hidden, head_dim, context, dtype)
    for mine, wanted in zip(step.run(decode_start), step.run(decode_start_ref), strict=True):
        assert mine.dtype == wanted.dtype and torch.equal(mine, wanted)


def test_the_embedding_is_scaled() -> None:
    step = Step(3, 5, 2, 70, 16, 20, torch.float32)
    found, wanted = step.run(decode_start, 12 / 0.22), step.run(decode_start_ref, 12 / 0.22)
    assert all(map(torch.equal, found, wanted))
    assert not torch.equal(found[2], step.run(decode_start)[2])

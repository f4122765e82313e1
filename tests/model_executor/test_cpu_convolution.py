"""The compiled operation of short convolutions, against a convolution of whole requests in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from cpu_ops import DTYPES, assert_close
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.model_executor import cpu_extension
from tercet.model_executor.layers.short_convolution import ConvolutionWeights

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
ops = torch.ops.tercet_cpu
CONTEXT = 24


@dataclass
class Requests:
    """Requests whose first tokens are cached: (cached tokens, new tokens) of each, and all that they store."""

    lens: list[tuple[int, int]]
    width: int
    channels: int
    dtype: torch.dtype
    has_bias: bool

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(1)
        count = len(self.lens)
        self.projected = torch.randn(count, CONTEXT, 3, self.channels, generator=g).to(self.dtype)
        self.inputs = self.projected[:, :, 0] * self.projected[:, :, 2]
        weight = torch.randn(self.channels, 1, self.width, generator=g)
        self.weights = ConvolutionWeights(weight, torch.randn(self.channels, generator=g) if self.has_bias else None)
        self.slots = torch.randperm(count * CONTEXT, generator=g).view(count, CONTEXT).int() + 1

    def pool(self) -> torch.Tensor:
        """The second of three layers, with the inputs of the cached tokens. All else is NaN."""
        pool = torch.full((self.slots.numel() + 1, 3, self.channels), torch.nan, dtype=self.dtype)[:, 1]
        for request, (cached, _) in enumerate(self.lens):
            pool[self.slots[request, :cached].long()] = self.inputs[request, :cached]
        return pool

    def expected(self, request: int) -> torch.Tensor:
        """The outputs of the new tokens of a request, float64."""
        cached, new = self.lens[request]
        inputs = F.pad(self.inputs[request, : cached + new].double().t(), (self.width - 1, 0))
        bias = None if self.weights.bias is None else self.weights.bias.double()
        sums = F.conv1d(inputs[None], self.weights.weight.double(), bias, groups=self.channels)[0].t()
        return (sums * self.projected[request, : cached + new, 1].double())[cached:]

    def run(self, chosen: list[int], pool: torch.Tensor) -> list[torch.Tensor]:
        """The outputs of the new tokens of each chosen request, in one step."""
        news = [self.lens[request][1] for request in chosen]
        spans = [range(self.lens[request][0], sum(self.lens[request])) for request in chosen]
        positions = torch.tensor([position for span in spans for position in span])
        requests = torch.tensor(chosen).repeat_interleave(torch.tensor(news))
        starts = None if all(new == 1 for new in news) else F.pad(torch.tensor(news).cumsum(0), (1, 0))
        out = ops.short_convolution(
            self.projected[requests, positions].flatten(1), self.weights.by_token(), self.weights.float_bias(),
            positions, self.slots[requests, positions].long(), self.slots, torch.tensor(chosen), starts, pool,
        )  # fmt: skip
        return list(out.split(news))


@st.composite
def requests(draw: st.DrawFn) -> Requests:
    decodes = draw(st.booleans())
    news = st.just(1) if decodes else st.integers(1, 12)
    lens = draw(st.lists(st.tuples(st.integers(0, 11), news), min_size=1, max_size=5))
    channels = draw(st.sampled_from([1, 20, 32, 33, 96]))
    return Requests(lens, draw(st.integers(1, 5)), channels, draw(st.sampled_from(DTYPES)), draw(st.booleans()))


@settings(max_examples=60, deadline=None)
@given(drawn=requests())
def test_tokens_read_those_before_them_and_have_the_same_bits_alone(drawn: Requests) -> None:
    everyone = list(range(len(drawn.lens)))
    pool = drawn.pool()
    for request, out in zip(everyone, drawn.run(everyone, pool), strict=True):
        assert_close(out, drawn.expected(request), drawn.dtype)
        end = sum(drawn.lens[request])
        assert torch.equal(pool[drawn.slots[request, :end].long()], drawn.inputs[request, :end])
        assert pool[drawn.slots[request, end:].long()].isnan().all(), "nothing else is written"
        assert torch.equal(drawn.run([request], drawn.pool())[0], out)


def test_a_prompt_in_chunks_has_the_same_bits() -> None:
    whole = Requests([(0, 20)], 4, 64, torch.bfloat16, True)
    (expected,) = whole.run([0], whole.pool())
    for chunk in (1, 2, 7):
        pool, outs = whole.pool(), []
        for cached in range(0, 20, chunk):
            whole.lens = [(cached, min(chunk, 20 - cached))]
            outs += whole.run([0], pool)
        assert torch.equal(torch.cat(outs), expected)


def test_a_recorded_step_of_fewer_requests() -> None:
    batch = Requests([(5, 1), (0, 1), (11, 1), (1, 1)], 3, 40, torch.float32, False)
    everyone, graph, pool = list(range(4)), torch.classes.tercet_cpu.Graph(), batch.pool()
    positions = torch.tensor([cached for cached, _ in batch.lens])
    arguments = (
        batch.projected[torch.tensor(everyone), positions].flatten(1), batch.weights.by_token(), None, positions,
        batch.slots[torch.tensor(everyone), positions].long(), batch.slots, torch.tensor(everyone), None, pool,
    )  # fmt: skip
    graph.record(4, 4, 4)
    out = ops.short_convolution(*arguments)
    graph.finish()
    for count in (4, 2):
        out.fill_(7)
        graph.run(count, count, count)
        assert torch.equal(out[:count], torch.cat(batch.run(everyone[:count], batch.pool())))
        assert (out[count:] == 7).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"projected": torch.zeros(2, 11)}, "projected must"),
        ({"positions": torch.tensor([0, 6])}, "positions"),
        ({"slots": torch.tensor([1, 9])}, "slots"),
        ({"rows": torch.tensor([0, 2])}, "there is no row 2, but 2 rows"),
        ({"slot_table": torch.full((2, 6), 9, dtype=torch.int32)}, "there is no slot 9, but 9 slots"),
        ({"starts": torch.tensor([0, 1, 1])}, "token 1 is of no request"),
        ({"starts": torch.tensor([1, 1, 2])}, "starts must begin with 0, got 1"),
        ({"rows": torch.tensor([0])}, "without starts every request has one new token"),
        ({"stored": torch.zeros(9, 4).double()}, "stored must be"),
        ({"stored": torch.zeros(4, 9).t()}, "rows of stored must be contiguous"),
        ({"weight": torch.zeros(0, 4)}, "a convolution must have weights"),
        ({"bias": torch.zeros(3)}, "bias must"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, torch.Tensor], message: str) -> None:
    arguments: dict[str, torch.Tensor | None] = {
        "projected": torch.zeros(2, 12),
        "weight": torch.zeros(3, 4),
        "bias": None,
        "positions": torch.tensor([0, 5]),
        "slots": torch.tensor([1, 2]),
        "slot_table": torch.zeros(2, 6, dtype=torch.int32),
        "rows": torch.tensor([0, 1]),
        "starts": None,
        "stored": torch.zeros(9, 4),
    }
    assert not ops.short_convolution(*arguments.values()).any()
    with pytest.raises(RuntimeError, match=message):
        ops.short_convolution(*(arguments | changes).values())

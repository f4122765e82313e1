"""A mixture of experts as one compiled operation, against the linear layers of its experts: every kind of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_weights import FORMS, group_of

from tercet.model_executor import cpu_extension
from tercet.model_executor.layers.activation import gated_activation
from tercet.model_executor.layers.packing import interleave, pack, pack_bias, pack_gated
from tercet.model_executor.layers.quantized_weight import SUPER_BLOCK, QuantizedWeight, quantize
from tercet.srt.model_files.experts_config import ClampedGate

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
ops = torch.ops.tercet_cpu
GATE = ClampedGate(alpha=1.702, limit=1.0)
"""Its limit is reached often."""
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


class Kind(NamedTuple):
    """A kind of layers: the type of x, what a weight becomes, and what it may become."""

    dtype: torch.dtype
    convert: Callable[[torch.Tensor], Any]
    bits: int | None = None
    """of weights that multiply quantized rows"""
    compact: bool = False
    multiple: int = 4
    """what the lengths of rows are multiples of"""


def stored(form: str) -> Callable[[torch.Tensor], Any]:
    """Rounds to a form. Those that only files have get scales of about the size that rounding to 4 or 8 bits gives."""

    def convert(weight: torch.Tensor) -> QuantizedWeight:
        if form in ("int4", "int8", "e2m1"):
            return quantize(weight, form)
        rounded = quantize(weight, "int4" if form == "q4_k" else "int8")
        scales = rounded.scales.float().repeat_interleave(1 if form == "q4_k" else 2, 1)
        if form == "mixed":
            return rounded._replace(scales=scales, minima=torch.full_like(scales, 0.01))
        has_minima = form != "q6_k"
        integers = (scales * 1000).round().clamp(1, 127).to(torch.int8)
        return QuantizedWeight(
            rounded.values if form == "q4_k" else rounded.values.clamp(-32, 31),
            integers,
            -integers if has_minima else None,
            torch.full((len(weight), weight.shape[1] // SUPER_BLOCK, 1 + has_minima), 0.001, dtype=FLOAT16),
        )

    return convert


KINDS: dict[str, Kind] = {
    "float32": Kind(FLOAT32, lambda w: w),
    "widened bfloat16": Kind(FLOAT32, lambda w: w.bfloat16()),
    "bfloat16": Kind(BFLOAT16, lambda w: w.bfloat16()),
    **{f"float32, {form}": Kind(FLOAT32, stored(form), multiple=group_of(form)) for form in FORMS},
    **{
        f"{str(dtype)[6:]}, quantized rows, int{bits}": Kind(
            dtype, lambda w, form=f"int{bits}": quantize(w, form), bits, multiple=32
        )
        for dtype in (FLOAT32, BFLOAT16, FLOAT16)
        for bits in (8, 4)
    },
}
if cpu_extension.load() and ops.multiplies_bfloat16():
    KINDS["compact"] = Kind(BFLOAT16, lambda w: w.bfloat16(), compact=True)
    KINDS |= {f"bfloat16, {form}": Kind(BFLOAT16, stored(form), multiple=group_of(form)) for form in FORMS}


class Experts:
    """Experts of one kind with random weights."""

    def __init__(
        self,
        kind: Kind,
        num_experts: int,
        hidden: int,
        inner: int,
        seed: int = 0,
        *,
        biased: bool = False,
        gate: ClampedGate | None = None,
        corrected: str | None = None,
    ) -> None:
        """`corrected`: "sigmoids" or "softmax" if the router has corrections of them. They are even, so that those of
        other experts are far apart."""
        generator = torch.Generator().manual_seed(seed)

        def draw(rows: int, columns: int) -> list[Any]:
            shape = num_experts, rows, columns
            return [kind.convert(w) for w in torch.randn(shape, generator=generator) * columns**-0.5]

        self.kind, self.hidden, self.inner = kind, hidden, inner
        self.gate_ups = [pack_gated(w, compact=kind.compact) for w in draw(2 * inner, hidden)]
        self.downs = [pack(w, compact=kind.compact) for w in draw(hidden, inner)]
        self.gate = gate
        self.sigmoids = corrected == "sigmoids"
        self.least_sum, self.scale = (0.25, 2.5) if corrected else (0.0, 1.0)
        self.corrections = torch.randint(-1, 2, (num_experts,), generator=generator).float() * 2 if corrected else None
        self.gate_up_biases: list[torch.Tensor] = []
        self.down_biases: list[torch.Tensor] = []
        self.plain_gate_up_biases = torch.randn(num_experts, 2 * inner, generator=generator)
        if biased:
            self.gate_up_biases = [pack_bias(interleave(bias)) for bias in self.plain_gate_up_biases]
            self.down_biases = [pack_bias(bias) for bias in torch.randn(num_experts, hidden, generator=generator)]

    def __call__(self, x: torch.Tensor, logits: torch.Tensor, per_token: int, normalized: bool = True) -> torch.Tensor:
        weights = self.gate_ups, self.downs, self.gate_up_biases, self.down_biases
        arguments = x, logits, *weights, self.inner, per_token, normalized, *(self.gate or (None, None))
        router = self.sigmoids, self.corrections, self.least_sum, self.scale
        if self.kind.bits is not None:
            return ops.quantized_experts(*arguments, self.kind.bits, *router)
        return ops.experts(*arguments, *router)

    def of_one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """The result of one expert in float32, by the operations of linear layers."""
        gate_up, down, bits = self.gate_ups[expert], self.downs[expert], self.kind.bits
        of_gate_up, of_down = (biases[expert] if biases else None for biases in (self.gate_up_biases, self.down_biases))
        if self.gate is not None:
            inner = self._clamped(expert, x)
        elif bits is not None:
            inner = ops.quantized_gated_linear(x, gate_up, of_gate_up, self.inner, bits)
        else:
            inner = ops.gated_linear(x, gate_up, of_gate_up, self.inner)
        if bits is not None:
            return ops.quantized_linear(inner, down, of_down, self.hidden, bits, True)
        return ops.linear(inner, down, of_down, self.hidden, True)

    def _clamped(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """The activation of one expert in float32, rounded to the type of x."""
        panels, bits, lanes = self.gate_ups[expert], self.kind.bits, cpu_extension.lanes()
        width = 2 * lanes * -(-self.inner // lanes)
        if bits is not None:
            products = ops.quantized_linear(x, panels, None, width, bits, True)
        else:
            products = ops.linear(x, panels, None, width, True)
        halves = products.unflatten(1, (-1, 2, lanes)).transpose(1, 2).flatten(2)[..., : self.inner].flatten(1)
        if self.gate_up_biases:
            halves = halves + self.plain_gate_up_biases[expert]
        assert self.gate is not None
        return gated_activation(halves, self.gate).to(x.dtype)

    def reference(self, x: torch.Tensor, logits: torch.Tensor, per_token: int, normalized: bool) -> torch.Tensor:
        """The same in float64, from the float32 results of each expert."""
        wide = logits.double()
        shares, ranked = wide.sigmoid() if self.sigmoids else wide.softmax(-1), logits
        if self.corrections is not None:
            ranked = (shares + self.corrections).float()  # torch rounds sigmoids of equal logits in several ways
        chosen = torch.zeros_like(shares)
        order = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :per_token]
        chosen.scatter_(1, order, shares.gather(1, order))
        if normalized:
            chosen /= chosen.sum(-1, keepdim=True).clamp(min=self.least_sum)
        chosen *= self.scale
        out = torch.zeros(x.shape, dtype=torch.float64)
        for expert in range(logits.shape[1]):
            tokens = (chosen[:, expert] > 0).nonzero().flatten()
            out[tokens] += chosen[tokens, expert, None] * self.of_one(expert, x[tokens]).double()
        return out


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Rounded once: half of the last bit, and the errors of float32 sums."""
    error = (found.double() - expected).abs()
    allowed = torch.finfo(found.dtype).eps / 2 * expected.abs() + 2e-6 * expected.abs().max().clamp(min=1)
    assert (error <= allowed).all(), (error - allowed).max()


def inputs(dtype: torch.dtype, tokens: int, hidden: int, num_experts: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    return x, 2 * torch.randn(tokens, num_experts, generator=generator)


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    tokens=st.one_of(st.integers(1, 16), st.integers(17, 150)),
    num_experts=st.integers(1, 8),
    share=st.floats(0, 1),
    words=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    normalized=st.booleans(),
    tied=st.booleans(),
    biased=st.booleans(),
    gate=st.sampled_from([None, None, GATE]),
    corrected=st.sampled_from([None, "sigmoids", "softmax"]),
    seed=st.integers(0, 2**31),
)
def test_drawn_experts(
    kind: str,
    tokens: int,
    num_experts: int,
    share: float,
    words: tuple[int, int],
    normalized: bool,
    tied: bool,
    biased: bool,
    gate: ClampedGate | None,
    corrected: str | None,
    seed: int,
) -> None:
    drawn = KINDS[kind]
    hidden, inner = (drawn.multiple * (count if drawn.multiple <= 32 else 1) for count in words)
    experts = Experts(drawn, num_experts, hidden, inner, seed, biased=biased, gate=gate, corrected=corrected)
    per_token = max(1, round(share * num_experts))
    x, logits = inputs(drawn.dtype, tokens, hidden, num_experts, seed)
    if tied or corrected:
        logits = logits.round()
    found = experts(x, logits, per_token, normalized)
    assert found.dtype == drawn.dtype
    expected = experts.reference(x, logits, per_token, normalized)
    if gate is None or drawn == KINDS["float32"]:
        assert_close(found, expected)
    else:  # the activation may be rounded in another way
        assert (found - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("gate", [None, GATE], ids=["silu", "clamped"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_batch(kind: str, gate: ClampedGate | None) -> None:
    """Alone, with any neighbours, in any order, and with any number of threads."""
    drawn = KINDS[kind]
    size = max(64, drawn.multiple)
    experts = Experts(drawn, 8, size, size, biased=gate is not None, gate=gate)
    x, logits = inputs(drawn.dtype, 300, size, 8)
    logits[100:] += torch.tensor([9.0, 0, 0, 0, 0, 0, 0, 0])  # an expert with several blocks of rows
    generator = torch.Generator().manual_seed(1)
    before = ops.num_threads()
    everything = experts(x, logits, 3)
    try:
        for threads in (1, 2, 3):
            ops.set_num_threads(threads)
            assert torch.equal(experts(x, logits, 3), everything)
            for count in (1, 1, 2, 3, 7, 13, 40, 140):
                rows = torch.randperm(300, generator=generator)[:count]
                assert torch.equal(experts(x[rows], logits[rows], 3), everything[rows]), (threads, count)
    finally:
        ops.set_num_threads(before if before != torch.get_num_threads() else 0)


@pytest.mark.parametrize("gate", [None, GATE], ids=["silu", "clamped"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_step_has_the_bits_of_launched_ones(kind: str, gate: ClampedGate | None) -> None:
    drawn, tokens = KINDS[kind], 20
    size = max(64, drawn.multiple)
    experts = Experts(drawn, 6, size, size, biased=gate is not None, gate=gate)
    x, logits = (torch.empty_like(part) for part in inputs(drawn.dtype, tokens, size, 6))
    graph, norm = torch.classes.tercet_cpu.Graph(), torch.ones(size)
    graph.record(tokens, tokens, tokens)
    inner = experts(ops.rms_norm(x, None, norm, 1e-5), logits, 2)
    out = experts(ops.rms_norm(inner, None, norm, 1e-5), logits, 3, False)  # takes memory of the first one
    graph.finish()
    for seed, rows in enumerate((20, 1, 2, 19, 7, 1, 20)):
        now = inputs(drawn.dtype, rows, size, 6, seed)
        x[:rows], logits[:rows] = now
        graph.run(rows, 1, 1)
        inner = experts(ops.rms_norm(now[0], None, norm, 1e-5), now[1], 2)
        expected = experts(ops.rms_norm(inner, None, norm, 1e-5), now[1], 3, False)
        assert torch.equal(out[:rows], expected), rows


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("tokens", [1, 3, 200])
def test_all_tokens_may_have_the_same_experts(dtype: torch.dtype, tokens: int) -> None:
    experts = Experts(KINDS[str(dtype)[6:]], 5, 64, 48)
    x, _ = inputs(dtype, tokens, 64, 5)
    for wanted in range(5):
        logits = torch.full((tokens, 5), -1e4)
        logits[:, wanted] = 0
        assert torch.equal(experts(x, logits, 1), experts.of_one(wanted, x).to(dtype))


def test_of_equal_logits_the_first_experts_are_chosen() -> None:
    experts = Experts(KINDS["float32"], 4, 64, 48)
    x, _ = inputs(FLOAT32, 1, 64, 4)
    for logits, chosen in (
        ([1.0, 1.0, 1.0, 1.0], (0, 1)),
        ([0.0, 1.0, 1.0, 1.0], (1, 2)),
        ([1.0, 0.0, 1.0, 5.0], (0, 3)),
        ([-torch.inf, 0.0, -torch.inf, -torch.inf], (0, 1)),
        ([0.0, -0.0, 0.0, -1.0], (0, 1)),
    ):
        of_chosen = torch.full((1, 4), -torch.inf)
        of_chosen[0, list(chosen)] = torch.tensor(logits)[list(chosen)]
        assert torch.equal(experts(x, torch.tensor([logits]), 2), experts(x, of_chosen, 2)), logits


@pytest.mark.parametrize("gate", [None, GATE], ids=["silu", "clamped"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_nan_changes_no_other_row(kind: str, gate: ClampedGate | None) -> None:
    drawn = KINDS[kind]
    size = max(64, drawn.multiple)
    experts = Experts(drawn, 4, size, size, biased=gate is not None, gate=gate)
    x, logits = inputs(drawn.dtype, 9, size, 4)
    expected = experts(x, logits, 2)
    x[3], logits[3] = torch.nan, torch.nan
    logits[5, 1], logits[6, 2] = torch.nan, torch.inf
    found = experts(x, logits, 2)
    others = torch.tensor([0, 1, 2, 4, 7, 8])
    assert found[[3, 5, 6]].isnan().all()
    assert torch.equal(found[others], expected[others])


def test_some_experts_may_be_compact() -> None:
    """A weight of bfloat16 with too many exponents does not become compact."""
    if "compact" not in KINDS:
        pytest.skip("this build does not multiply bfloat16")
    plain, mixed = Experts(KINDS["bfloat16"], 4, 64, 64), Experts(KINDS["compact"], 4, 64, 64)
    mixed.gate_ups[1], mixed.downs[2] = plain.gate_ups[1], plain.downs[2]
    assert len({panels.dtype for panels in (*mixed.gate_ups, *mixed.downs)}) == 2
    x, logits = inputs(BFLOAT16, 40, 64, 4)
    assert torch.equal(mixed(x, logits, 2), plain(x, logits, 2))


def test_each_weight_may_have_a_kind_of_its_own() -> None:
    kinds = [KINDS["float32"], KINDS["widened bfloat16"], *(KINDS[f"float32, {form}"] for form in FORMS)]
    experts, size = Experts(kinds[0], len(kinds), SUPER_BLOCK, SUPER_BLOCK), SUPER_BLOCK
    for number, kind in enumerate(kinds):
        of_kind = Experts(kind, 1, size, size, seed=number)
        experts.gate_ups[number], experts.downs[-1 - number] = of_kind.gate_ups[0], of_kind.downs[0]
    x, logits = inputs(FLOAT32, 50, size, len(kinds))
    assert_close(experts(x, logits, 3), experts.reference(x, logits, 3, True))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float32, quantized rows, int8"])
def test_there_may_be_no_rows(kind: str) -> None:
    experts = Experts(KINDS[kind], 4, 64, 64)
    x, logits = inputs(KINDS[kind].dtype, 0, 64, 4)
    assert experts(x, logits, 2).shape == (0, 64)


@pytest.mark.parametrize("kind", ["float32", "float32, quantized rows, int8"])
def test_wrong_arguments_are_refused(kind: str) -> None:
    experts = Experts(KINDS[kind], 4, 64, 96)
    x, logits = inputs(FLOAT32, 3, 64, 4)
    for arguments, error in (
        ((x[:, :32].contiguous(), logits, 2), "packed must have shape"),
        ((x.t(), logits, 2), "x must be contiguous"),
        ((x, logits[:2], 2), "logits must have shape"),
        ((x, logits.double(), 2), "logits must be Float"),
        ((x, logits[:, :3].contiguous(), 2), "there must be weights of 3 experts, got 4 and 4"),
        ((x, logits, 0), "a token must have 1 to 4 experts, got 0"),
        ((x, logits, 5), "a token must have 1 to 4 experts, got 5"),
    ):
        with pytest.raises(RuntimeError, match=error):
            experts(*arguments)
    experts.sigmoids = True
    with pytest.raises(RuntimeError, match="sigmoids need corrections"):
        experts(x, logits, 2)
    experts.corrections = torch.zeros(3)
    with pytest.raises(RuntimeError, match="corrections must have shape"):
        experts(x, logits, 2)
    experts.corrections, experts.sigmoids = None, False
    experts.inner = 0
    with pytest.raises(RuntimeError, match="must have columns, got 64 and 0"):
        experts(x, logits, 2)
    experts.inner, gate_up = 96, experts.gate_ups[3]
    experts.gate_ups[3] = gate_up[:-1]
    with pytest.raises(RuntimeError, match="packed must have shape"):
        experts(x, logits, 2)
    experts.gate_ups[3] = gate_up
    down = experts.downs.pop()
    with pytest.raises(RuntimeError, match="there must be weights of 4 experts, got 4 and 3"):
        experts(x, logits, 2)
    experts.downs.append(down)
    experts.down_biases = [pack_bias(torch.zeros(64))] * 4
    with pytest.raises(RuntimeError, match="there must be biases of 4 experts, got 0 and 4"):
        experts(x, logits, 2)
    experts.gate_up_biases = [pack_bias(torch.zeros(64))] * 4
    with pytest.raises(RuntimeError, match="bias must have shape"):
        experts(x, logits, 2)


def test_other_types_are_refused() -> None:
    experts = Experts(KINDS["float32"], 4, 64, 96)
    x, logits = inputs(FLOAT16, 3, 64, 4)
    with pytest.raises(RuntimeError, match="x must be float or bfloat16, got Half"):
        experts(x, logits, 2)
    quantized = Experts(KINDS["float32, quantized rows, int4"], 4, 64, 96)
    with pytest.raises(RuntimeError, match="weights must have 4 or 8 bits"):
        ops.quantized_experts(x, logits, quantized.gate_ups, quantized.downs, [], [], 96, 2, True, None, None, 5)
    with pytest.raises(RuntimeError, match="alpha and limit must be given together"):
        ops.experts(x.float(), logits, experts.gate_ups, experts.downs, [], [], 96, 2, True, None, 7.0)

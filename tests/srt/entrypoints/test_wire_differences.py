"""Small differences between servers that clients and the test suites of other servers have tripped over."""

from __future__ import annotations

from typing import Any

import pytest
from fake_http import CONTEXT_LEN, Site, error_of, text_of
from starlette.routing import Route

HI = {"role": "user", "content": "hi"}
CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 3}},
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    CHAT: {"messages": [HI], "max_tokens": 3},
}


# Paths


def test_every_path_may_end_with_a_slash() -> None:
    # Without these settings, /metrics, /v1/streams and /v1/responses/{response_id} are 404.
    site = Site(enable_metrics=True, resume_grace=1.0, response_store_mib=1)
    stored = site.good("/v1/responses", {"input": "a", "max_output_tokens": 1})["id"]
    for route in site.app.routes:
        assert isinstance(route, Route) and route.methods
        path = route.path.replace("{model:path}", "tiny").replace("{response_id}", stored)
        method = "GET" if "GET" in route.methods else "POST"
        plain, slash = (site.request(method, where) for where in (path, f"{path}/"))
        assert plain.status_code == slash.status_code != 404, path
    assert site.good("/v1/completions/", BODIES["/v1/completions"])["choices"][0]["text"] == text_of(3)
    site.close()


@pytest.mark.parametrize("path", BODIES)
def test_query_parameters_of_other_services_have_no_effect(site: Site, path: str) -> None:
    assert site.post(f"{path}?api-version=2024-10-21", BODIES[path]).status_code == 200
    assert site.get("/v1/models?api-version=2024-10-21").status_code == 200
    assert site.post(f"{path}?beta=true", BODIES[path]).status_code == 200, "a client for Anthropic's API sends it"
    assert error_of(site.post(f"{path}?api_version=1", BODIES[path]))["param"] == "api_version"


# Fields


@pytest.mark.parametrize("path", BODIES)
def test_an_empty_stop_string_is_none(site: Site, path: str) -> None:
    for stop in ("", []):
        body = {**BODIES[path], "stop": stop}
        if path == "/generate":
            body = {"text": "a", "sampling_params": {"max_new_tokens": 3, "stop": stop}}
        site.good(path, body)
        assert site.scheduler.received[-1].options.sampling.stop_strings == ()
    if path != "/generate":
        assert "non-empty strings" in site.refused(path, {**BODIES[path], "stop": [""]})["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_stream_options_of_generate(site: Site, stream: bool) -> None:
    body = {**BODIES["/generate"], "stream": stream, "stream_options": {"include_usage": True}}
    assert site.post("/generate", body).status_code == 200
    assert site.refused("/generate", {**body, "stream_options": {"x": 1}})["param"] == "stream_options.x"


@pytest.mark.parametrize("path", BODIES)
def test_a_limit_beyond_the_context_is_cut(site: Site, path: str) -> None:
    body = {**BODIES[path], "max_tokens": 10**9}
    if path == "/generate":
        body = {"text": "a", "sampling_params": {"max_new_tokens": 10**9}}
    site.good(path, body)
    request = site.scheduler.received[0]
    assert len(request.input_ids) // 4 + (request.options.sampling.max_new_tokens or 0) == CONTEXT_LEN


@pytest.mark.parametrize("value", ["in-memory", "in_memory", "24h", None])
def test_prompt_cache_retention(site: Site, value: str | None) -> None:
    site.good(CHAT, {**BODIES[CHAT], "prompt_cache_retention": value, "store": False})
    assert site.refused(CHAT, {**BODIES[CHAT], "store": True})["param"] == "store"


@pytest.mark.parametrize("path", BODIES)
def test_a_prompt_that_is_too_long_is_told_in_the_words_that_libraries_look_for(site: Site, path: str) -> None:
    """litellm looks for the first words (in lower case), LangChain for the code anywhere in the text."""
    long = {"text": "x" * 300, "prompt": "x" * 300, "messages": [{**HI, "content": "x" * 300}]}
    body = {name: long.get(name, value) for name, value in BODIES[path].items()}
    error = site.refused(path, body)
    assert error["code"] == "context_length_exceeded" and "context_length_exceeded" in error["message"]
    assert f"this model's maximum context length is {CONTEXT_LEN} tokens" in error["message"].lower()
    assert "KV pool" not in error["message"]


def test_reasoning_effort_and_the_variable_of_the_same_name_must_agree(site: Site) -> None:
    same = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}}
    site.good(CHAT, {**BODIES[CHAT], **same})
    assert site.scheduler.prompt_texts()[-1].endswith("<assistant>(low)")
    error = site.refused(CHAT, {**BODIES[CHAT], **same, "reasoning_effort": "high"})
    assert error["param"] == "reasoning_effort" and "got 'high' and 'low'" in error["message"]


# What an agent sends back of an answer

ASSISTANT: list[dict[str, Any]] = [
    {"content": "Yes.", "refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": None},
    {"content": "Yes.", "refusal": None, "annotations": [], "tool_calls": []},
    {"content": "Yes.", "provider_specific_fields": None},
    {"content": "Yes.", "provider_specific_fields": {}},
    {"content": "Yes.", "provider_specific_fields": {"refusal": None}},
    {"content": "Yes.", "parsed": None},
    {"content": "Yes.", "parsed": {"answer": [1, None]}},
]


@pytest.mark.parametrize("extra", ASSISTANT)
def test_what_libraries_add_to_an_assistants_message_changes_nothing(site: Site, extra: dict[str, Any]) -> None:
    site.good(CHAT, {**BODIES[CHAT], "messages": [HI, {"role": "assistant", **extra}, HI]})
    assert site.scheduler.prompt_texts() == ["<user>hi\n<assistant>Yes.\n<user>hi\n<assistant>"]


@pytest.mark.parametrize("message", [{"content": None}, {}])
def test_an_assistants_message_without_content_is_empty(site: Site, message: dict[str, Any]) -> None:
    site.good(CHAT, {**BODIES[CHAT], "messages": [HI, {"role": "assistant", **message}, HI]})
    assert site.scheduler.prompt_texts() == ["<user>hi\n<assistant>\n<user>hi\n<assistant>"]
    error = site.refused(CHAT, {**BODIES[CHAT], "messages": [{"role": "user", **message}]})
    assert error["param"] == "messages[0].content"


# Streams


@pytest.mark.parametrize("n", [1, 2])
def test_continuous_usage_counts_from_0_and_never_stands_still(site: Site, n: int) -> None:
    """The chunk of the role comes before the first token, and the last text and the finish reason are one chunk."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = site.stream(CHAT, {**BODIES[CHAT], "n": n, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0 and counts == sorted(counts)
    spoken = [chunk["usage"]["completion_tokens"] for chunk in chunks if "role" not in chunk["choices"][0]["delta"]]
    assert len(set(spoken)) == len(spoken) == 3 * n
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == counts[-1] == 3 * n
    ends = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert len(ends) == n and all(end["delta"]["content"] for end in ends)


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_where_the_cached_tokens_were(site: Site, path: str) -> None:
    body = {**BODIES[path], "return_cached_tokens_details": True}
    answer = site.good(path, body)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    details = {"cached_tokens_details": {"device": cached, "host": 0}}
    assert answer["sglext"] == details
    *chunks, extension, usage = site.stream(path, {**body, "stream_options": {"include_usage": True}})
    assert all("sglext" not in chunk for chunk in (*chunks, usage)) and usage["usage"] == answer["usage"]
    assert (extension["choices"], extension["sglext"], extension["usage"]) == ([], details, None)
    assert "sglext" not in site.good(path, BODIES[path])


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_token_strs(site: Site, path: str) -> None:
    body = {"prompt": "é<eos>", "return_token_strs": True}
    assert site.good(path, body)["token_strs"] == ["Ã", "©", "<eos>"]
    assert site.good(path, {**body, "prompt": ["a", ""]})["token_strs"] == [["a"], []]
    assert site.good(path, {"messages": [HI], "return_token_strs": True})["token_strs"][:3] == ["<", "u", "s"]
    assert "token_strs" not in site.good(path, {"prompt": "a"})

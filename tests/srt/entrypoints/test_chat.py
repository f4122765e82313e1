from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_http import BOS_TOKEN, CONTEXT_LEN, EOS, Site, text_of, with_template
from patience import PATIENCE_S
from tokenizers.processors import TemplateProcessing

from tercet.srt.io_struct import AbortFinish

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def no_tokenizer() -> Iterator[Site]:
    site = Site(skip_tokenizer_init=True)
    yield site
    site.close()


def test_one_answer(site: Site) -> None:
    answer = site.good(PATH, {"model": "tiny", "messages": HI, "max_tokens": 5})
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_600_000_000
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text_of(5)},
                "logprobs": None,
                "finish_reason": "length",
                "matched_stop": None,
            }
        ],
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 5,
            "total_tokens": 25,
            "prompt_tokens_details": {"cached_tokens": 19},
        },
    }


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"messages": HI}, "<user>hi\n<assistant>"),
        (
            {"messages": [{"role": "developer", "content": "be"}, {"role": "user", "content": "hi", "name": "Jo"}]},
            "<system>be\n<user>hi(Jo)\n<assistant>",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            "<user>ab\n<assistant>",
        ),
        ({"messages": HI, "add_generation_prompt": False}, "<user>hi\n"),
        (
            {"messages": HI, "documents": [{"title": "T", "text": "x"}, {"title": "U", "text": "y"}]},
            "<documents>T: x;U: y;<user>hi\n<assistant>",
        ),
        ({"messages": HI, "documents": []}, "<user>hi\n<assistant>"),
        ({"messages": HI, "chat_template_kwargs": {"mood": ":)"}}, "<user>hi\n<assistant>:)"),
        ({"messages": HI, "chat_template_kwargs": {"chat": 1, "variables": 1}}, "<user>hi\n<assistant>"),
        (
            {"messages": [*HI, {"role": "assistant", "content": "Well"}], "continue_final_message": True},
            "<user>hi\n<assistant>Well",
        ),
        (
            {
                "messages": [*HI, {"role": "assistant", "content": "Well"}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
            "<user>hi\n<assistant>Well",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "content": "", "tool_calls": []}]},
            "<user>hi\n<assistant>\n<assistant>",
        ),
    ],
)
def test_messages_become_a_prompt(site: Site, body: dict[str, Any], prompt: str) -> None:
    site.good(PATH, {**body, "max_tokens": 1})
    assert site.scheduler.prompt_texts() == [prompt]


def test_a_template_gets_the_fields_that_were_sent(site: Site) -> None:
    site.manager.inputs.tokenizer = with_template("{{ messages | tojson }}{{ tools }}")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    sent = [
        {"role": "developer", "content": "be", "name": "Jo"},
        {"role": "assistant", "tool_calls": [{**call, "function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
        {"role": "assistant", "reasoning_content": "why"},
    ]
    tokens = site.good("/tokenize", {"messages": sent})["tokens"]
    assert json.loads(bytes(tokens).decode().removesuffix("None")) == [
        {"role": "system", "content": "be", "name": "Jo"},
        {"role": "assistant", "tool_calls": [call], "content": None},
        sent[2],
        {"role": "assistant", "content": "", "reasoning_content": "why", "thinking": "why"},
    ]


def test_a_template_gets_the_tools_that_were_sent(site: Site) -> None:
    site.manager.inputs.tokenizer = with_template("{{ tools | tojson }}{# <tool_call> {{ messages }} #}")
    tools = [
        {"type": "function", "function": {"name": "f", "description": "D", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "g"}},
    ]
    sent = [{"type": "function", "function": {"strict": False, **tools[0]["function"]}}, tools[1]]
    tokens = site.good("/tokenize", {"messages": HI, "tools": sent})["tokens"]
    assert json.loads(bytes(tokens)) == tools


def test_only_the_template_writes_special_tokens(site: Site) -> None:
    """A prompt that the tokenizer opened again would begin with two tokens of the same kind."""
    tokenizer = with_template("<bos>{{ messages[0].content }}")
    tokenizer.backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_TOKEN)])
    site.manager.inputs.tokenizer = tokenizer
    site.good("/v1/completions", {"prompt": "hi", "max_tokens": 1})
    site.good(PATH, {"messages": HI, "max_tokens": 1})
    site.good("/v1/responses", {"input": "hi", "max_output_tokens": 1})
    assert site.scheduler.prompts() == [[BOS_TOKEN, *b"hi"]] * 3


def test_documents_need_a_template_that_reads_them(site: Site) -> None:
    body = {"messages": HI, "documents": [{"title": "T", "text": "x"}]}
    same = {**body, "chat_template_kwargs": {"documents": body["documents"]}}
    assert site.good(PATH, {**same, "max_tokens": 1})["usage"]["completion_tokens"] == 1
    refused = site.refused(PATH, {**body, "chat_template_kwargs": {"documents": [{"title": "U"}]}})
    assert refused["param"] == "documents" and "must be equal" in refused["message"]
    site.manager.inputs.tokenizer = with_template("{{ messages[0].content }}")
    refused = site.refused(PATH, body)
    assert refused["param"] == "documents" and "does not read it" in refused["message"]
    assert site.good(PATH, {"messages": HI, "documents": [], "max_tokens": 1})["usage"]["prompt_tokens"] == 2


def test_the_limit_is_the_context_by_default(site: Site) -> None:
    site.good(PATH, {"messages": HI})
    assert site.scheduler.received[0].options.sampling.max_new_tokens == CONTEXT_LEN - 20


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}]
)
def test_both_names_of_the_limit(site: Site, fields: dict[str, int]) -> None:
    site.good(PATH, {"messages": HI, **fields})
    assert site.scheduler.received[0].options.sampling.max_new_tokens == 3


def test_a_stream(site: Site) -> None:
    site.scheduler.stop_after = 8
    events = site.stream(PATH, {"messages": HI})
    assert len({one["id"] for one in events}) == 1
    assert all(one["object"] == "chat.completion.chunk" and "usage" not in one for one in events)
    choices = [one["choices"][0] for one in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(one["delta"]) == {"content"} for one in choices[1:])
    assert "".join(one["delta"]["content"] for one in choices) == text_of(8)
    assert [one["finish_reason"] for one in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["delta"]["content"]  # the last text and the end are one chunk
    assert (choices[-1]["finish_reason"], choices[-1]["matched_stop"]) == ("stop", EOS)


def test_no_delta_but_the_first_is_an_empty_text(site: Site) -> None:
    site.scheduler.say("H", "", "i", "")
    first, *others = (one["choices"][0]["delta"] for one in site.stream(PATH, {"messages": HI}))
    assert first == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in others) == "Hi"
    assert {"content": ""} not in others


def test_the_first_chunk_counts_no_tokens_because_it_has_no_text(site: Site) -> None:
    usage = {"continuous_usage_stats": True}
    events = site.stream(PATH, {"messages": HI, "max_tokens": 5, "stream_options": usage})
    assert events[0]["usage"]["completion_tokens"] == 0 and events[-1]["usage"]["completion_tokens"] == 5


def test_a_stream_of_several_choices(site: Site) -> None:
    options = {"include_usage": True}
    events = site.stream(PATH, {"messages": HI, "n": 3, "max_tokens": 5, "stream_options": options})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 15
    assert events[-1]["usage"]["prompt_tokens"] == 20
    assert all(one["usage"] is None for one in events[:-1])
    for index in range(3):
        mine = [one["choices"][0] for one in events[:-1] if one["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(one["delta"]["content"] for one in mine) == text_of(5)
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + ["length"]


def test_token_ids(site: Site) -> None:
    body = {"messages": HI, "max_tokens": 5, "return_token_ids": True}
    answer = site.good(PATH, body)
    assert bytes(answer["prompt_token_ids"]) == b"<user>hi\n<assistant>"
    assert answer["choices"][0]["token_ids"] == [0, 1, 2, 3, 4]
    events = site.stream(PATH, body)
    assert [one.get("prompt_token_ids") is not None for one in events] == [True] + [False] * (len(events) - 1)
    ids = [token for one in events for token in one["choices"][0].get("token_ids", [])]
    assert ids == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "messages", "messages is required"),
        ({"messages": []}, "messages", "1 to 10000 messages, got 0"),
        ({"messages": "hi"}, "messages", "expected array, got str"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content is required"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "messages[0].role is required"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "invalid enum value 'robot'"),
        ({"messages": [{"role": "function", "content": "a"}]}, "messages[0].role", "the older form of tool"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "got int"),
        (
            {"messages": [*HI, {"role": "user", "content": [{"type": "text"}]}]},
            "messages[1].content[0].text",
            "required",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].image_url",
            "prompts and answers are text only",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "messages[0].content[0].type",
            "content of type 'video' is not supported",
        ),
        ({"messages": [{"role": "user", "content": "a", "weight": 1}]}, "messages[0].weight", "unknown field 'weight'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "tex": "a"}]}]},
            "messages[0].content[0].tex",
            "in messages[0].content[0]; did you mean text",
        ),
        ({"messages": HI, "response_format": {"type": "json"}}, "response_format.type", "invalid enum value"),
        ({"messages": HI, "logprobs": 1}, "logprobs", "bool"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be in [0, 20], got 21"),
        ({"messages": HI, "top_logprobs": -1}, "top_logprobs", "must be in [0, 20], got -1"),
        ({"messages": HI, "echo": True}, "echo", "an answer does not repeat the chat"),
        ({"messages": HI, "store": True}, "store", "answers are not stored"),
        ({"messages": HI, "service_tier": "flex"}, "service_tier", "the server has one service tier"),
        (
            {"messages": HI, "max_completion_tokens": -1},
            "max_completion_tokens",
            "max_completion_tokens must be at least",
        ),
        ({"messages": HI, "max_tokens": -1}, "max_tokens", "max_tokens must be at least 0"),
        (
            {"messages": HI, "max_tokens": 1, "max_completion_tokens": 2},
            "max_tokens",
            "must be equal if both are given, got 2 and 1",
        ),
        ({"messages": HI, "prompt": "a"}, "prompt", "unknown field 'prompt'"),
        (
            {"messages": HI, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "exclude each other",
        ),
        (
            {"messages": HI, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
            "must not contain messages",
        ),
        ({"messages": HI, "chat_template": "{{ 7 * 7 }}"}, "chat_template", "a request cannot supply a chat template"),
        ({"messages": HI, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "must not contain self"),
        ({"messages": HI, "chat_template_kwargs": {"continue_final_message": 1}}, "chat_template_kwargs", "must not"),
        (
            {"messages": HI, "chat_template_kwargs": {"tools": 1, "add_generation_prompt": 1}},
            "chat_template_kwargs",
            "must not contain add_generation_prompt, tools",
        ),
        ({"messages": [{"role": "user", "content": "x" * 240}]}, "messages", "at most 255 fit"),
        ({"messages": HI * 10_001}, "messages", "1 to 10000 messages, got 10001"),
        ({"messages": HI * 10_000}, "messages", "maximum context length"),
        ({"messages": [], "continue_final_message": True}, "messages", "got 0"),
        ({"messages": [{"role": "user"}], "continue_final_message": True}, "messages[0].content", "is required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}], "continue_final_message": True},
            "messages[0].content[0].text",
            "is required",
        ),
        ({"messages": HI, "stream_options": {}}, "stream_options", "only with stream: true"),
    ],
)
def test_bad_input_is_refused(site: Site, body: dict[str, Any], param: str, says: str) -> None:
    error = site.refused(PATH, body)
    assert says in error["message"]
    assert error["param"] == param
    assert site.idle()


def test_a_long_chat_is_rendered_off_the_loop(site: Site) -> None:
    error = site.refused(PATH, {"messages": [{"role": "user", "content": "x" * 80_000}]})
    assert error["code"] == "context_length_exceeded"


def test_another_model_is_not_found(site: Site) -> None:
    assert site.refused(PATH, {"model": "gpt-5", "messages": HI}, 404)["code"] == "model_not_found"


def test_an_abort_by_the_client_is_a_finish(site: Site) -> None:
    site.scheduler.fail = (2, AbortFinish("asked for"))
    (choice,) = site.good(PATH, {"messages": HI})["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("abort", text_of(2))


def test_a_failure_in_a_stream_is_one_event(site: Site) -> None:
    site.scheduler.fail = (2, AbortFinish("not a number", 500, "InvalidLogits"))
    events = site.stream(PATH, {"messages": HI, "n": 2})
    assert events[-1]["error"]["message"] == "not a number"
    assert sum("error" in one for one in events) == 1
    assert site.idle()


def test_chat_needs_a_tokenizer(no_tokenizer: Site) -> None:
    for fields in ({}, {"logprobs": True}):
        error = no_tokenizer.refused(PATH, {"messages": HI, **fields})
        assert "--skip-tokenizer-init" in error["message"] and error["param"] == "messages"


def test_a_chat_that_is_being_rendered_can_be_aborted_and_is_drained(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long chat is rendered in a thread, before its prompt can be tokenised."""
    entered, gate = threading.Event(), threading.Event()

    def render(*args: object, **kwargs: object) -> str:
        entered.set()
        assert gate.wait(PATIENCE_S)
        return "a"

    assert site.manager.inputs.tokenizer is not None
    monkeypatch.setattr(site.manager.inputs.tokenizer, "apply_chat_template", render)

    async def work() -> None:
        body = {"messages": [{"role": "user", "content": "x" * 80_000}], "max_tokens": 2}
        for ends in ("is aborted", "is drained"):
            entered.clear()
            gate.clear()
            task = asyncio.ensure_future(site.client.post("/v1/chat/completions", json={**body, "rid": "mine"}))
            await asyncio.to_thread(entered.wait, 20)
            assert site.manager.num_unfinished == 1
            if ends == "is aborted":
                assert (await site.client.post("/abort_request", json={"rid": "mine"})).json() == {"aborted": True}
                answer = await asyncio.wait_for(task, PATIENCE_S)
                assert answer.json()["choices"][0]["finish_reason"] == "abort"
                gate.set()
            else:
                site.manager.draining = True
                gate.set()
                assert (await task).json()["choices"][0]["message"]["content"] == text_of(2)

    try:
        site.run(work())
    finally:
        gate.set()
    assert site.idle()

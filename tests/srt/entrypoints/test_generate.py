from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_http import CONTEXT_LEN, EOS, Site, byte_tokenizer, events_of, text_of

from tercet.srt.errors import QueueFull
from tercet.srt.io_struct import AbortFinish

SHORT = {"max_new_tokens": 3}


@pytest.fixture
def incremental() -> Iterator[Site]:
    site = Site(incremental_streaming_output=True)
    yield site
    site.close()


def test_one_prompt_gives_an_object(site: Site) -> None:
    answer = site.good("/generate", {"text": "hé", "sampling_params": {"max_new_tokens": 6}, "rid": "mine"})
    assert set(answer) == {"text", "output_ids", "meta_info"}
    assert answer["text"] == text_of(6)
    assert answer["output_ids"] == [0, 1, 2, 3, 4, 5]
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta.pop("cached_tokens_details") == {"device": 2, "host": 0}
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 6},
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "cached_tokens": 2,
        "num_retractions": 0,
        "num_recoveries": 0,
        "weight_version": "default",
    }
    assert site.scheduler.prompt_texts() == ["hé"]


def test_put_is_post(site: Site) -> None:
    assert site.request("PUT", "/generate", {"text": "a"}).json()["text"] == text_of(128)


def test_token_ids_go_as_they_are(site: Site) -> None:
    site.good("/generate", {"input_ids": [5, 257, 0], "sampling_params": SHORT})
    assert site.scheduler.prompts() == [[5, 257, 0]]


def test_a_stop_names_what_matched(site: Site) -> None:
    site.scheduler.stop_after = 2
    answer = site.good("/generate", {"text": "a"})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


@pytest.mark.parametrize("body", [{"text": ["a"]}, {"text": ["a", "bb"]}, {"input_ids": [[97], [98, 98]]}])
def test_a_list_gives_a_list(site: Site, body: dict[str, Any]) -> None:
    answers = site.good("/generate", {**body, "sampling_params": SHORT, "rid": "r"})
    count = len(next(iter(body.values())))
    assert [one["meta_info"]["prompt_tokens"] for one in answers] == [1, 2][:count]
    assert [one["meta_info"]["id"] for one in answers] == (["r"] if count == 1 else ["r_0", "r_1"])
    assert all(one["text"] == text_of(3) for one in answers)


def test_n_samples_stand_together(site: Site) -> None:
    sampling = {"max_new_tokens": 2, "n": 3, "sampling_seed": 10}
    answers = site.good("/generate", {"text": ["a", "bb"], "sampling_params": sampling})
    assert [one["meta_info"]["prompt_tokens"] for one in answers] == [1, 1, 1, 2, 2, 2]
    assert [one.options.sampling.sampling_seed for one in site.scheduler.received] == [10, 11, 12] * 2


def test_a_list_of_each_has_one_for_each_prompt(site: Site) -> None:
    body = {
        "text": ["a", "bb"],
        "rid": ["first", "second"],
        "cache_salt": ["x", "y"],
        "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2, "n": 2}],
    }
    answers = site.good("/generate", body)
    assert [one["meta_info"]["id"] for one in answers] == ["first", "second", "second"]
    assert [one["meta_info"]["completion_tokens"] for one in answers] == [1, 2, 2]
    assert [one.options.cache_salt for one in site.scheduler.received] == ["x", "y", "y"]


def test_every_sampling_parameter_arrives(site: Site) -> None:
    given = {
        "max_new_tokens": 7,
        "min_new_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 4,
        "min_p": 0.125,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -1.5},
        "sampling_seed": -9,
        "ignore_eos": True,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    site.good("/generate", {"text": "a", "sampling_params": given})
    sampling = site.scheduler.received[0].options.sampling
    assert {name: getattr(sampling, name) for name in given} == given


def test_max_new_tokens_absent_is_128_and_null_is_the_rest_of_the_context(site: Site) -> None:
    site.good("/generate", {"text": "a"})
    site.good("/generate", {"text": "a", "sampling_params": {"max_new_tokens": None}})
    limits = [one.options.sampling.max_new_tokens for one in site.scheduler.received]
    assert limits == [128, CONTEXT_LEN - 1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_a_priority_needs_priority_scheduling(path: str, body: dict[str, Any]) -> None:
    site = Site(enable_priority_scheduling=False)
    error = site.refused(path, {**body, "priority": -3})
    assert error["param"] == "priority"
    assert "must be 0 on a server without --enable-priority-scheduling, got -3" in error["message"]
    assert site.scheduler.received == []
    site.good(path, {**body, "priority": 0})
    site.close()


def test_each_prompt_may_have_its_own_priority(site: Site) -> None:
    site.good("/generate", {"text": ["a", "b"], "priority": [5, -6], "sampling_params": SHORT})
    assert sorted(one.options.priority for one in site.scheduler.received) == [-6, 5]


def test_extra_key_is_cache_salt(site: Site) -> None:
    site.good("/generate", {"text": "a", "extra_key": "k", "sampling_params": SHORT})
    assert site.scheduler.received[0].options.cache_salt == "k"
    assert site.refused("/generate", {"text": "a", "extra_key": "k", "cache_salt": "k"})["param"] == "extra_key"


def test_a_stream_is_cumulative(site: Site) -> None:
    events = site.stream("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 8}})
    assert [one["text"] for one in events] == [text_of(i) for i in range(1, 9)]
    assert [one["output_ids"] for one in events] == [list(range(i)) for i in range(1, 9)]
    assert all("index" not in one for one in events)
    assert [one["meta_info"]["completion_tokens"] for one in events] == list(range(1, 9))
    assert [one["meta_info"]["finish_reason"] for one in events[:-1]] == [None] * 7
    assert all(not {"e2e_latency", "cached_tokens_details"} & set(one["meta_info"]) for one in events[:-1])
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert events[-1]["meta_info"]["e2e_latency"] > 0


def test_an_incremental_stream_has_what_is_new(incremental: Site) -> None:
    incremental.scheduler.step = 3
    events = incremental.stream("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 8}})
    assert "".join(one["text"] for one in events) == text_of(8)
    assert [one["output_ids"] for one in events] == [[0, 1, 2], [3, 4, 5], [6, 7]]


@pytest.mark.parametrize("body", [{"text": ["a", "bb"]}, {"text": "a", "sampling_params": {"n": 2, **SHORT}}])
def test_a_streamed_batch_has_an_index(site: Site, body: dict[str, Any]) -> None:
    events = site.stream("/generate", {"sampling_params": SHORT, **body})
    assert {one["index"] for one in events} == {0, 1}
    for index in (0, 1):
        mine = [one for one in events if one["index"] == index]
        assert mine[-1]["text"] == text_of(3)
        assert [one["meta_info"]["finish_reason"] is None for one in mine] == [True] * (len(mine) - 1) + [False]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "text", "exactly one of text and input_ids is required, got neither"),
        ({"text": "a", "input_ids": [1]}, "text", "got both"),
        ({"text": ""}, "text", "the prompt is empty"),
        ({"text": ["a", ""]}, "text[1]", "the prompt is empty"),
        ({"text": []}, "text", "at least one prompt"),
        ({"input_ids": []}, "input_ids", "the prompt is empty"),
        ({"input_ids": [[1], []]}, "input_ids[1]", "the prompt is empty"),
        ({"input_ids": [1, [2]]}, "input_ids", "not a mix"),
        ({"input_ids": [258]}, "input_ids", "must be in [0, 258), got 258"),
        ({"input_ids": [-1]}, "input_ids", "must be in [0, 258), got -1"),
        ({"input_ids": [10**40]}, "input_ids", "must be in [0, 258)"),
        ({"text": "x" * 256}, "text", "the prompt has 256 tokens; at most 255 fit"),
        ({"text": "x" * 1_000_000}, "text", "at most"),
        ({"text": 5}, "text", "expected str | array | null, got int"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens", "at least 0"),
        ({"text": "a", "sampling_params": {"n": 10**9}}, "sampling_params.n", "[1, 128]"),
        ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n", "[1, 128]"),
        ({"text": "a", "sampling_params": {"top_k": 2**40}}, "sampling_params.top_k", "<= 2147483647"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [258]}}, "sampling_params.stop_token_ids", "below 258"),
        (
            {"text": "a", "sampling_params": {"logit_bias": {"x": 1}}},
            "sampling_params.logit_bias",
            "must be token ids, got 'x'",
        ),
        ({"prompt": "a"}, "prompt", "unknown field 'prompt'; did you mean text?"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature", "got str"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params", "a single object"),
        ({"text": ["a"], "sampling_params": [{}, {}]}, "sampling_params", "a list of 1"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"n": 0}]}, "sampling_params[1].n", "[1, 128]"),
        ({"text": ["a", "b"], "rid": ["r"]}, "rid", "a list of 2, got a list of 1"),
        ({"text": ["a", "b"], "rid": ["r", "r"]}, "rid", "in use"),
        ({"text": "a", "rid": ""}, "rid", "1 to 256 characters"),
        ({"text": "a", "cache_salt": "x" * 257}, "cache_salt", "at most 256"),
        ({"text": ["a"] * 1025}, "text", "at most 1024 prompts"),
        ({"text": ["a"] * 1000, "sampling_params": {"n": 5}}, "n", "at most 4096, got 5000"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(site: Site, body: dict[str, Any], param: str, says: str) -> None:
    for stream in (False, True):
        error = site.refused("/generate", {**body, "stream": stream})
        assert says in error["message"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
    assert site.idle()


def test_a_failure_before_the_first_output_has_its_status(site: Site) -> None:
    for stream in (False, True):
        for n in (1, 3):
            site.scheduler.fail = (0, AbortFinish.of(QueueFull("the queue is full", retry_after_s=n)))
            body = {"text": "a", "stream": stream, "sampling_params": {"n": n}}
            answer = site.post("/generate", body)
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == str(n)
            assert answer.json()["error"]["code"] == "queue_full"
            assert answer.json()["error"]["message"] == "the queue is full"
            assert site.idle()


def test_a_failure_in_one_piece_has_its_status(site: Site) -> None:
    site.scheduler.fail = (2, AbortFinish("not a number", 500, "InvalidLogits"))
    error = site.refused("/generate", {"text": ["a", "b"]}, 500)
    assert error["type"] == "invalid_logits"
    assert site.idle()


@pytest.mark.parametrize("n", [1, 3])
def test_a_failure_in_a_stream_is_one_event(site: Site, n: int) -> None:
    site.scheduler.fail = (2, AbortFinish("not a number", 500, "InvalidLogits"))
    events = site.stream("/generate", {"text": "a", "sampling_params": {"n": n}})
    assert [list(one) for one in events if "error" in one] == [["error"]]
    assert events[-1]["error"]["type"] == "invalid_logits"
    assert site.idle()


def test_one_that_fails_takes_its_companions_along(site: Site) -> None:
    """The second prompt is refused after the first was sent."""
    site.refused("/generate", {"text": ["a", "x" * 300]})
    assert len(site.scheduler.received) == 1
    assert site.idle()


def test_an_abort_that_the_client_asked_for_is_an_answer(site: Site) -> None:
    async def both(stream: bool) -> tuple[int, bytes]:
        body = {"text": "a", "rid": "mine", "stream": stream}
        site.scheduler.delay_s = 0.01
        running = site.client.post("/generate", json=body)
        answer, aborted = await _while_running(site, running, {"rid": "mine"})
        assert aborted == {"aborted": True}
        return answer.status_code, answer.content

    status, content = site.run(both(False))
    assert status == 200 and b'"finish_reason":{"type":"abort"' in content
    status, content = site.run(both(True))
    assert status == 200 and b'"finish_reason":{"type":"abort"' in content and content.endswith(b"data: [DONE]\n\n")
    assert site.idle()


async def _while_running(site: Site, request: Any, abort: dict[str, Any]) -> tuple[Any, Any]:
    task = asyncio.ensure_future(request)
    while not site.scheduler.running:
        await asyncio.sleep(0)
    aborted = (await site.client.post("/abort_request", json=abort)).json()
    return await task, aborted


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_request_keeps_its_text(site: Site, stream: bool) -> None:
    site.scheduler.gate = True
    site.scheduler.unsent = 4

    async def work() -> bytes:
        request = site.client.post("/generate", json={"text": "a", "rid": "mine", "stream": stream})
        task = asyncio.ensure_future(request)
        while not site.scheduler.held:
            await asyncio.sleep(0)
        site.scheduler.release()
        await asyncio.sleep(0)
        while not site.scheduler.held:
            await asyncio.sleep(0)
        assert (await site.client.post("/abort_request", json={"rid": "mine"})).json() == {"aborted": True}
        return (await task).content

    content = site.run(work())
    last = events_of(content)[-1] if stream else json.loads(content)
    assert last["text"] == text_of(5)
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["completion_tokens"] == 5
    assert site.idle()


def test_a_text_with_a_token_that_the_model_has_no_row_for(site: Site) -> None:
    site.manager.inputs.tokenizer = byte_tokenizer("[PAD]")
    for path, body, param in (
        ("/generate", {"text": ["a", "b[PAD]"]}, "text[1]"),
        ("/v1/completions", {"prompt": "[PAD]"}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "[PAD]"}]}, "messages"),
    ):
        error = site.refused(path, body)
        assert "'[PAD]' (id 258), but the model's vocabulary has only" in error["message"]
        assert error["param"] == param
    assert site.idle()

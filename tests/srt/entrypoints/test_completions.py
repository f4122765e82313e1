from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_http import CONTEXT_LEN, EOS, Site, text_of

from tercet.srt.io_struct import AbortFinish

PATH = "/v1/completions"


def test_one_prompt(site: Site) -> None:
    answer = site.good(PATH, {"model": "tiny", "prompt": "hé", "max_tokens": 5})
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_600_000_000
    assert answer == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {"index": 0, "text": text_of(5), "logprobs": None, "finish_reason": "length", "matched_stop": None}
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_defaults(site: Site) -> None:
    site.good(PATH, {"prompt": "a"})
    sampling = site.scheduler.received[0].options.sampling
    assert sampling.max_new_tokens == 16
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.n) == (1.0, 1.0, -1, 1)


def test_max_tokens_is_cut_to_the_room_there_is(site: Site) -> None:
    site.good(PATH, {"prompt": "a", "max_tokens": 10**6})
    assert site.scheduler.received[0].options.sampling.max_new_tokens == CONTEXT_LEN - 1


def test_every_sampling_parameter_arrives(site: Site) -> None:
    same = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 4,
        "min_p": 0.125,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -1.5},
        "stop": "x",
        "stop_token_ids": [3],
        "ignore_eos": True,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    given = {**same, "max_tokens": 7, "min_tokens": 2, "seed": -9, "cache_salt": "salt", "rid": "mine"}
    answer = site.good(PATH, {"prompt": "a", **given})
    assert answer["id"] == "mine"
    request = site.scheduler.received[0]
    assert {name: getattr(request.options.sampling, name) for name in same} == same
    assert (request.options.sampling.max_new_tokens, request.options.sampling.min_new_tokens) == (7, 2)
    assert request.options.sampling.sampling_seed == -9
    assert request.options.cache_salt == "salt"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", [[97, 98]]),
        ([97, 98], [[97, 98]]),
        (["a", "bb"], [[97], [98, 98]]),
        ([[97], [98, 98]], [[97], [98, 98]]),
    ],
)
def test_prompts_come_as_texts_or_ids(site: Site, prompt: Any, prompts: list[list[int]]) -> None:
    answer = site.good(PATH, {"prompt": prompt, "max_tokens": 2})
    assert site.scheduler.prompts() == prompts
    assert [one["index"] for one in answer["choices"]] == list(range(len(prompts)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_choices_are_ordered_by_prompt_and_then_by_sample(site: Site) -> None:
    answer = site.good(PATH, {"prompt": ["a", "bb"], "n": 3, "max_tokens": 2, "return_token_ids": True})
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [one["prompt_token_ids"] for one in answer["choices"]] == [[97]] * 3 + [[98, 98]] * 3
    assert [one["token_ids"] for one in answer["choices"]] == [[0, 1]] * 6
    # Each prompt counts once, and so does what was cached of it.
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert answer["usage"]["completion_tokens"] == 12


def test_a_stop_names_what_matched(site: Site) -> None:
    site.scheduler.stop_after = 1
    (choice,) = site.good(PATH, {"prompt": "a"})["choices"]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", EOS)


def test_a_stream(site: Site) -> None:
    events = site.stream(PATH, {"prompt": "a", "max_tokens": 8})
    assert len({one["id"] for one in events}) == 1
    assert all(one["object"] == "text_completion" and "usage" not in one for one in events)
    choices = [one["choices"][0] for one in events]
    assert "".join(one["text"] for one in choices) == text_of(8)
    assert all(one["text"] for one in choices), "token 3 has no text yet and makes no chunk"
    assert [one["finish_reason"] for one in choices] == [None] * (len(choices) - 1) + ["length"]
    assert all("matched_stop" not in one for one in choices[:-1])


def test_a_stream_of_several_choices(site: Site) -> None:
    events = site.stream(PATH, {"prompt": ["a", "bb"], "n": 2, "max_tokens": 9})
    texts = dict.fromkeys(range(4), "")
    finished = []
    for one in events:
        (choice,) = one["choices"]
        assert choice["index"] not in finished
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"] is not None:
            finished.append(choice["index"])
    assert set(texts.values()) == {text_of(9)}
    assert sorted(finished) == [0, 1, 2, 3]


def test_usage_comes_last_in_a_chunk_of_its_own(site: Site) -> None:
    events = site.stream(PATH, {"prompt": ["a", "bb"], "max_tokens": 3, "stream_options": {"include_usage": True}})
    assert all(one["usage"] is None and one["choices"] for one in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_continuous_usage_counts_what_there_is_so_far(site: Site) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = site.stream(PATH, {"prompt": "a", "max_tokens": 3, "stream_options": options})
    assert [one["usage"]["completion_tokens"] for one in events] == [1, 2, 3, 3]
    events = site.stream(PATH, {"prompt": "a", "max_tokens": 3, "stream_options": {"continuous_usage_stats": True}})
    assert [one["usage"]["completion_tokens"] for one in events] == [1, 2, 3]
    assert events[-1]["choices"]


def test_token_ids_of_a_stream(site: Site) -> None:
    events = site.stream(PATH, {"prompt": "a", "max_tokens": 5, "return_token_ids": True})
    choices = [one["choices"][0] for one in events]
    assert [one["token_ids"] for one in choices] == [[0], [1], [2], [3], [4]], "no id is left out"
    assert choices[0]["prompt_token_ids"] == [97]
    assert all("prompt_token_ids" not in one for one in choices[1:])


@pytest.mark.parametrize("model", ["tiny", "/models/tiny-1", "default", None])
def test_names_of_the_model(site: Site, model: str | None) -> None:
    assert site.good(PATH, {"model": model, "prompt": "a"})["model"] == "tiny"


def test_another_model_is_not_found(site: Site) -> None:
    error = site.refused(PATH, {"model": "gpt-5", "prompt": "a", "stream": True}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'gpt-5'" in error["message"] and "'tiny'" in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "prompt", "prompt is required"),
        ({"prompt": None}, "prompt", "got null"),
        ({"prompt": ""}, "prompt", "the prompt is empty"),
        ({"prompt": []}, "prompt", "at least one prompt"),
        ({"prompt": [[]]}, "prompt[0]", "the prompt is empty"),
        ({"prompt": ["a", ""]}, "prompt[1]", "the prompt is empty"),
        ({"prompt": ["a", 5]}, "prompt", "not a mix"),
        ({"prompt": ["a", [5]]}, "prompt", "not a mix"),
        ({"prompt": [5, [5]]}, "prompt", "not a mix"),
        ({"prompt": [[5, "a"]]}, "prompt[0][1]", "expected int, got str"),
        ({"prompt": [258]}, "prompt", "[0, 258)"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "max_tokens must be at least 0"),
        ({"prompt": "a", "max_tokens": -5}, "max_tokens", "max_tokens must be at least 0"),
        ({"prompt": "a", "max_tokens": 10**25}, "max_tokens", "expected int <="),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "got float"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens", "min_tokens must be at most max_tokens (16), got 17"),
        ({"prompt": "a", "seed": 2**63}, "seed", "expected int <="),
        ({"prompt": "a", "temperature": -1}, "temperature", "at least 0"),
        ({"prompt": "a", "top_p": 0}, "top_p", "(0, 1]"),
        ({"prompt": "a", "n": 129}, "n", "[1, 128]"),
        ({"prompt": ["a"] * 33, "n": 128}, "n", "prompts times n must be at most 4096, got 4224"),
        ({"prompt": "a", "n": True}, "n", "got bool"),
        ({"prompt": "a", "stop": [""]}, "stop", "non-empty"),
        ({"prompt": "a", "stop": ["x"] * 33}, "stop", "at most 32"),
        ({"prompt": "a", "stop_regex": "(sampling_seed"}, "stop_regex", "'(sampling_seed'"),
        ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias", "[-100, 100]"),
        ({"prompt": "a", "logit_bias": {"5": "x"}}, "logit_bias", "got str"),
        (
            {"prompt": "a", "logit_bias": {"1" * 5000: 1}},
            "logit_bias",
            "the keys of logit_bias must be token ids, got '111",
        ),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "logprobs must be in [0, 20], got 21"),
        ({"prompt": "a", "logprobs": -1}, "logprobs", "logprobs must be in [0, 20], got -1"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "logprobs must be a number of tokens"),
        ({"prompt": "a", "top_logprobs": 2}, "top_logprobs", "accepted: null or 0"),
        ({"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs", "echo with logprobs"),
        ({"prompt": "a", "best_of": 2}, "best_of", "accepted: null or 1"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "only with stream: true"),
        (
            {"prompt": "a", "stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "did you mean include_usage",
        ),
        ({"messages": []}, "messages", "unknown field 'messages'; did you mean prompt?"),
        ({"prompt": "a", "max_token": 1}, "max_token", "did you mean max_tokens"),
        ({"prompt": "a", "rid": "x" * 257}, "rid", "1 to 256"),
        ({"prompt": "a", "rid": ""}, "rid", "1 to 256"),
        ({"prompt": "x" * 256}, "prompt", "at most 255 fit"),
        ({"prompt": ["a"] * 1025}, "prompt", "at most 1024 prompts"),
        ({"prompt": ["a"] * 40, "n": 128}, "n", "at most 4096"),
    ],
)
def test_bad_input_is_refused(site: Site, body: dict[str, Any], param: str, says: str) -> None:
    error = site.refused(PATH, body)
    assert says in error["message"]
    assert error["param"] == param
    assert site.idle()


def test_a_long_prompt_has_the_code_that_clients_look_for(site: Site) -> None:
    assert site.refused(PATH, {"prompt": "x" * 256})["code"] == "context_length_exceeded"


def test_a_failure_in_a_stream_is_one_event(site: Site) -> None:
    site.scheduler.fail = (2, AbortFinish("gone", 503, "EngineDead"))
    events = site.stream(PATH, {"prompt": ["a", "b"]})
    assert events[-1]["error"]["code"] == "engine_dead"
    assert sum("error" in one for one in events) == 1
    assert site.idle()


def test_a_batch_that_is_being_submitted_is_aborted_whole(site: Site) -> None:
    site.scheduler.mute = True
    count = 50

    async def abort_it() -> Any:
        body = {"prompt": ["a"] * count, "rid": "all"}
        task = asyncio.create_task(site.client.post("/v1/completions", json=body))
        while not site.scheduler.received:
            await asyncio.sleep(0)
        aborted = await site.client.post("/abort_request", json={"rid": "all"})
        assert aborted.json() == {"aborted": True}
        return (await task).json()

    answer = site.run(abort_it())
    assert [one["finish_reason"] for one in answer["choices"]] == ["abort"] * count
    assert len(site.scheduler.received) < count
    assert site.idle()


def test_a_batch_may_not_take_the_name_of_a_running_request(site: Site) -> None:
    site.scheduler.mute = True

    async def meet() -> list[Any]:
        first = asyncio.create_task(site.client.post("/generate", json={"text": "a", "rid": "name"}))
        while not site.scheduler.received:
            await asyncio.sleep(0)
        refused = await site.client.post("/v1/completions", json={"prompt": ["a", "b"], "rid": "name"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "rid"
        await site.client.post("/abort_request", json={"rid": "name"})
        return (await first).json()

    assert site.run(meet())["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(site.scheduler.received) == 1


def test_a_batch_is_aborted_by_its_name(site: Site) -> None:
    site.scheduler.mute = True
    body = {"prompt": ["a", "bb"], "rid": "both", "max_tokens": 3}

    async def abort_it() -> Any:
        task = asyncio.create_task(site.client.post(PATH, json=body))
        while len(site.scheduler.running) < 2:
            await asyncio.sleep(0)
        again = await site.client.post(PATH, json=body)
        assert again.status_code == 400 and "in use" in again.text
        aborted = await site.client.post("/abort_request", json={"rid": "both"})
        assert aborted.json() == {"aborted": True}
        return (await task).json()

    answer = site.run(abort_it())
    assert [one["finish_reason"] for one in answer["choices"]] == ["abort", "abort"]
    assert answer["usage"]["prompt_tokens"] == 3
    assert site.idle()
    assert site.good("/abort_request", {"rid": "both"}) == {"aborted": False}

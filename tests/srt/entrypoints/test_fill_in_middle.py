"""The field `suffix` of /v1/completions: fill in the middle."""

from __future__ import annotations

from typing import Any

import pytest
from fake_http import FIM, Site, text_of, with_template

PATH = "/v1/completions"
PRE, SUF, MID = FIM["pre"], FIM["suf"], FIM["mid"]


def test_the_prompt_has_both_texts_and_the_answer_only_the_middle(site: Site) -> None:
    answer = site.good(PATH, {"prompt": "ab", "suffix": "cd", "max_tokens": 5, "return_token_ids": True})
    ids = [PRE, *b"ab", SUF, *b"cd", MID]
    assert site.scheduler.prompts() == [ids]
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text_of(5), "length")
    assert choice["prompt_token_ids"] == ids
    assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("suffix", [None, ""])
def test_no_suffix(site: Site, suffix: str | None) -> None:
    site.good(PATH, {"prompt": "ab", "suffix": suffix, "echo": True})
    assert site.scheduler.prompts() == [[*b"ab"]]
    assert site.scheduler.received[0].options.sampling.stop_token_ids is None


def test_an_empty_prompt_inserts_at_the_start_of_a_file(site: Site) -> None:
    site.good(PATH, {"prompt": "", "suffix": "cd"})
    assert site.scheduler.prompts() == [[PRE, SUF, *b"cd", MID]]


def test_each_prompt_of_a_list_has_the_suffix(site: Site) -> None:
    answer = site.good(PATH, {"prompt": ["a", "bb"], "suffix": "c", "n": 2, "max_tokens": 3})
    assert site.scheduler.prompts() == [[PRE, 97, SUF, 99, MID]] * 2 + [[PRE, 98, 98, SUF, 99, MID]] * 2
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3]


def test_a_stream_has_the_same_text(site: Site) -> None:
    body = {"prompt": "ab", "suffix": "cd", "max_tokens": 9, "logprobs": 1, "n": 2}
    whole = {one["index"]: one["text"] for one in site.good(PATH, body)["choices"]}
    streamed = dict.fromkeys(whole, "")
    for event in site.stream(PATH, body):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == whole == {0: text_of(9), 1: text_of(9)}


def test_log_probabilities_are_those_of_the_middle(site: Site) -> None:
    (choice,) = site.good(PATH, {"prompt": "ab", "suffix": "cd", "max_tokens": 3, "logprobs": 1})["choices"]
    assert len(choice["logprobs"]["tokens"]) == 3
    assert choice["logprobs"]["text_offset"][0] == 0


def test_the_tokens_that_end_the_middle_are_stop_tokens(site: Site) -> None:
    site.good(PATH, {"prompt": "a", "suffix": "b", "stop_token_ids": [9]})
    assert site.scheduler.received[0].options.sampling.stop_token_ids == sorted({*FIM.values(), 9})


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": "a", "echo": True}, "echo", "echo is not allowed with suffix"),
        ({"prompt": [97]}, "suffix", "got token ids"),
        ({"prompt": [[97], [98]]}, "suffix", "got token ids"),
        ({"prompt": "a" * 400}, "prompt", "at most 251 fit beside the suffix"),
        ({"prompt": ["a", "a" * 400]}, "prompt[1]", "at most 251 fit beside the suffix"),
        ({"prompt": "a", "suffix": "b" * 400}, "suffix", "the suffix and the tokens around it have 403 tokens"),
        ({"prompt": ["a"], "suffix": "b" * 400}, "suffix", "the suffix and the tokens around it have 403 tokens"),
        ({"prompt": "a", "suffix": ["b"]}, "suffix", "got array"),
        ({"prompt": "a", "suffix": 5}, "suffix", "got int"),
    ],
)
def test_refusals(site: Site, body: dict[str, Any], param: str, message: str) -> None:
    error = site.refused(PATH, {"suffix": "b", **body})
    assert error["param"] == param
    assert message in error["message"]
    assert site.idle()


def test_a_model_without_tokens_for_it_refuses_a_suffix() -> None:
    site = Site(tokenizer=with_template(""))
    error = site.refused(PATH, {"prompt": "a", "suffix": "b"})
    assert (error["param"], error["code"]) == ("suffix", "unsupported_field")
    assert "this model has none" in error["message"]
    site.good(PATH, {"prompt": "a", "suffix": ""})
    site.close()

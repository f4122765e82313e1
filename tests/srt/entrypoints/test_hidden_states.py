from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_http import CONTEXT_LEN, Site

from tercet.srt.entrypoints.native import GENERATE_CODEC, prompts_of
from tercet.srt.entrypoints.request_names import RequestNames
from tercet.srt.entrypoints.routing import Server


def body(**fields: Any) -> dict[str, Any]:
    return {"text": "abc", "sampling_params": {"max_new_tokens": 3}, "return_hidden_states": True, **fields}


def vector(place: int) -> list[float]:
    return [float(place)] * 8


def test_a_list_for_the_prompt_and_a_vector_for_each_token_that_was_read(site: Site) -> None:
    """The shape of SGLang's answer, which its users concatenate."""
    found = site.good("/generate", body())["meta_info"]["hidden_states"]
    assert found == [[vector(0), vector(1), vector(2)], vector(3), vector(4)]


@pytest.mark.parametrize("max_new", [0, 1])
def test_without_an_output_that_was_read_there_is_only_the_prompt(site: Site, max_new: int) -> None:
    meta = site.good("/generate", body(sampling_params={"max_new_tokens": max_new}))["meta_info"]
    assert meta["hidden_states"] == [[vector(0), vector(1), vector(2)]]


def test_each_prompt_of_a_list_says_whether(site: Site) -> None:
    first, second = site.good("/generate", body(text=["ab", "abcd"], return_hidden_states=[False, True]))
    assert "hidden_states" not in first["meta_info"] and len(second["meta_info"]["hidden_states"][0]) == 4
    assert "hidden_states" not in site.good("/generate", body(return_hidden_states=False))["meta_info"]


def test_the_flag_is_needed_and_a_stream_has_none(site: Site) -> None:
    refused = site.refused("/generate", body(stream=True))
    assert refused["param"] == "return_hidden_states" and "stream" in refused["message"]
    bare = Site(enable_return_hidden_states=False)
    refused = bare.refused("/generate", body())
    assert refused["param"] == "return_hidden_states" and "--enable-return-hidden-states" in refused["message"]
    bare.good("/generate", body(return_hidden_states=False))
    bare.close()
    assert site.idle() and not site.scheduler.received


def test_the_number_of_states_is_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all samples of a request together: prompts times n."""
    monkeypatch.setattr("tercet.managers.input_processor.MAX_HIDDEN_VALUES", 8 * 12)
    site.good("/generate", body(sampling_params={"max_new_tokens": 9}))
    refused = site.refused("/generate", body(sampling_params={"max_new_tokens": 10}))
    assert refused["param"] == "return_hidden_states" and "at most 12 tokens" in refused["message"]
    site.good("/generate", body(sampling_params={"max_new_tokens": 3, "n": 2}))
    site.good("/generate", body(text=["abc", "ab"], sampling_params={"max_new_tokens": 3}))
    for more in ({"text": ["abc", "ab", "a"]}, {"sampling_params": {"max_new_tokens": 3, "n": 3}}):
        assert "at most 4 tokens" in site.refused("/generate", body(**more))["message"]
    assert "max_new_tokens None" in site.refused("/generate", body(sampling_params={"max_new_tokens": None}))["message"]
    assert site.idle()


def test_no_limit_is_stricter_than_the_context(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.managers.input_processor.MAX_HIDDEN_VALUES", 8 * CONTEXT_LEN)
    site.scheduler.stop_after = 2
    site.good("/generate", body(sampling_params={"max_new_tokens": None}))
    site.good("/generate", body(sampling_params={"max_new_tokens": 10**6}))


def test_many_numbers_are_written_in_a_thread(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.srt.entrypoints.sse._MAX_VALUES_IN_LOOP", 8)
    calls, in_thread = [], asyncio.to_thread

    async def to_thread(*args: Any) -> Any:
        calls.append(args)
        return await in_thread(*args)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    assert len(site.good("/generate", body())["meta_info"]["hidden_states"]) == 3
    assert len(calls) == 1


def test_the_field_reaches_the_scheduler(site: Site) -> None:
    prompts, _, _ = prompts_of(Server(site.manager, "0"), GENERATE_CODEC.convert(body()), RequestNames())
    assert prompts[0].options.return_hidden_states

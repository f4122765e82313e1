"""Log probabilities in the formats of all APIs. The fake scheduler gives a token the log probability -id / 4."""

from __future__ import annotations

from typing import Any

import fake_http
import msgspec
import pytest
from fake_http import BOS_TOKEN, EOS, Site, byte_tokenizer, text_of
from fake_results import fake_logprobs
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from tercet.srt.entrypoints import sse
from tercet.srt.entrypoints.openai.logprobs import CompletionLogprobWriter, _finite
from tercet.srt.io_struct import AbortFinish, Counts, GenerateReq, TextOut, TokenOut
from tercet.srt.logprobs import MAX_INPUT_VALUES, LogprobOptions, Logprobs, NewLogprobs

HI = [{"role": "user", "content": "a"}]
GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"


def native(site: Site, **body: Any) -> Any:
    given = {"text": "abcd", "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
    return site.good(GENERATE, {**given, **body})["meta_info"]


def of(*ids: int) -> list[list[Any]]:
    return [[-token / 4, token, None] for token in ids]


def test_sglangs_lists(site: Site) -> None:
    meta = native(site, logprob_start_len=1, top_logprobs_num=2, token_ids_logprob=[8, 9])
    assert meta["input_token_logprobs"] == [[None, 98, None], *of(99, 100)]
    assert meta["output_token_logprobs"] == of(0, 1, 2)
    assert meta["input_top_logprobs"] == [None, of(0, 1), of(0, 1)]
    assert meta["output_top_logprobs"] == [of(0, 1)] * 3
    assert meta["input_token_ids_logprobs"] == [None, of(8, 9), of(8, 9)]
    assert meta["output_token_ids_logprobs"] == [of(8, 9)] * 3


@pytest.mark.parametrize("start", [-1, 0, 1, 3, 4])
def test_the_rule_of_the_length(site: Site, start: int) -> None:
    meta = native(site, logprob_start_len=start)
    listed = meta["input_token_logprobs"]
    assert meta["prompt_tokens"] == (4 if start < 0 else start) + len(listed)
    assert [entry[0] is None for entry in listed] == [True, False, False, False][: len(listed)]
    assert set(meta) & {"input_top_logprobs", "output_top_logprobs", "input_token_ids_logprobs"} == set()


def test_texts(site: Site) -> None:
    meta = native(site, input_ids=[97, 0xF0], text=None, logprob_start_len=0, return_text_in_logprobs=True)
    assert [entry[2] for entry in meta["input_token_logprobs"]] == ["a", "\\xf0"]
    assert [entry[2] for entry in meta["output_token_logprobs"]] == ["\x00", "\x01", "\x02"]


def test_each_prompt_has_its_own_options(site: Site) -> None:
    body = {
        "text": ["ab", "cd", "ef"],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": [True, False, True],
        "logprob_start_len": [0, 0, 2],
        "top_logprobs_num": [1, 2, 0],
        "token_ids_logprob": [[5], [], [6, 7]],
    }
    first, second, third = (answer["meta_info"] for answer in site.good(GENERATE, body))
    assert first["input_token_logprobs"] == [[None, 97, None], *of(98)] and first["output_top_logprobs"] == [of(0)]
    assert first["output_token_ids_logprobs"] == [of(5)]
    assert not any("logprobs" in name for name in second)
    assert third["input_token_logprobs"] == [] and third["output_token_ids_logprobs"] == [of(6, 7)]
    same = site.good(GENERATE, {**body, "token_ids_logprob": [4], "return_logprob": True})
    assert [answer["meta_info"]["output_token_ids_logprobs"] for answer in same] == [[of(4)]] * 3


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_repeats_all_so_far(site: Site, n: int) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 4, "n": n}, "return_logprob": True}
    events = site.stream(GENERATE, {**body, "logprob_start_len": 0, "top_logprobs_num": 1})
    for event in events:
        meta = event["meta_info"]
        assert meta["output_token_logprobs"] == of(*event["output_ids"])
        assert meta["output_top_logprobs"] == [of(0)] * len(event["output_ids"])
        assert meta["input_token_logprobs"] == [[None, 97, None], *of(98, 99)]
        assert meta["input_top_logprobs"] == [None, of(0), of(0)]
    assert len(events) == 4 * n


def test_an_incremental_stream_has_what_is_new() -> None:
    site = Site(incremental_streaming_output=True)
    site.scheduler.step = 3
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 7}, "return_logprob": True, "logprob_start_len": 1}
    metas = [event["meta_info"] for event in site.stream(GENERATE, body)]
    assert [meta["output_token_logprobs"] for meta in metas] == [of(0, 1, 2), of(3, 4, 5), of(6)]
    assert [meta.get("input_token_logprobs") for meta in metas] == [[[None, 98, None], *of(99)], None, None]
    site.close()


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"logprob_start_len": -2}, "logprob_start_len", "at least 0, or -1"),
        ({"logprob_start_len": 5, "return_logprob": True}, "logprob_start_len", "prompt tokens (4), got 5"),
        ({"top_logprobs_num": 101}, "top_logprobs_num", "must be in [0, 100], got 101"),
        ({"top_logprobs_num": -1}, "top_logprobs_num", "must be in [0, 100], got -1"),
        ({"top_logprobs_num": [1]}, "top_logprobs_num", "single value"),
        ({"token_ids_logprob": [0] * 1025}, "token_ids_logprob", "at most 1024 ids, got 1025"),
        ({"token_ids_logprob": [258], "return_logprob": True}, "token_ids_logprob", "in [0, 258), got 258"),
        ({"token_ids_logprob": [-1], "return_logprob": True}, "token_ids_logprob", "in [0, 258), got -1"),
        ({"token_ids_logprob": [1, [2]]}, "token_ids_logprob", "not a mix"),
        ({"token_ids_logprob": [[2]]}, "token_ids_logprob", "single value"),
        ({"return_logprob": [True]}, "return_logprob", "single value"),
        ({"return_logprob": 1}, "return_logprob", "bool"),
        ({"return_text_in_logprobs": "yes"}, "return_text_in_logprobs", "bool"),
    ],
)
def test_bad_input_is_refused(site: Site, body: dict[str, Any], param: str, message: str) -> None:
    error = site.refused(GENERATE, {"text": "abcd", **body})
    assert error["param"] == param and message in error["message"]
    assert site.idle()


def test_what_modifies_log_probabilities_that_are_off_is_accepted(site: Site) -> None:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1}, "logprob_start_len": 900, "top_logprobs_num": 3}
    meta = site.good(GENERATE, {**body, "token_ids_logprob": [9999], "return_text_in_logprobs": True})["meta_info"]
    assert not any("logprobs" in name for name in meta)
    site.good(CHAT, {"messages": HI, "max_tokens": 1, "top_logprobs": 5})
    assert all(req.options.logprobs is None for req in site.scheduler.received)


def test_the_size_of_an_answer_is_bounded(site: Site) -> None:
    site.manager.inputs.facts = msgspec.structs.replace(site.manager.facts, max_req_input_len=10**6)
    ids, asked = [1] * 4096, list(range(256))
    body = {"input_ids": ids, "return_logprob": True, "token_ids_logprob": asked, "logprob_start_len": 0}
    error = site.refused(GENERATE, body)
    assert error["param"] == "logprob_start_len" and str(MAX_INPUT_VALUES) in error["message"]


def test_completions(site: Site) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "logprobs": 1}
    assert site.good(COMPLETIONS, body)["choices"][0]["logprobs"] == {
        "tokens": ["\x00", "\x01"],
        "token_logprobs": [0.0, -0.25],
        "top_logprobs": [{"\x00": 0.0}, {"\x00": 0.0, "\x01": -0.25}],
        "text_offset": [0, 1],
    }


def test_what_lm_eval_sends(site: Site) -> None:
    """Several prompts of token ids with echo. It reads [number of context tokens:-1]."""
    prompts = [[104, 105, 0xC3, 0xA9], [BOS_TOKEN, 97]]
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    first, second = site.good(COMPLETIONS, {**body, "temperature": 0})["choices"]
    assert first["text"] == "hié" + text_of(1)
    assert first["logprobs"] == {
        "tokens": ["h", "i", "\\xc3", "\\xa9", "\x00"],
        "token_logprobs": [None, -105 / 4, -0xC3 / 4, -0xA9 / 4, 0.0],
        "top_logprobs": [
            None,
            {"\x00": 0.0, "i": -105 / 4},
            {"\x00": 0.0, "\\xc3": -0xC3 / 4},
            {"\x00": 0.0, "\\xa9": -0xA9 / 4},
            {"\x00": 0.0},
        ],
        "text_offset": [0, 1, 2, 2, 3],
    }
    assert second["text"] == "a" + text_of(1)
    assert second["logprobs"]["tokens"] == ["<bos>", "a", "\x00"]
    assert second["logprobs"]["text_offset"] == [0, 0, 1]


@pytest.mark.parametrize(
    ("prompt", "skip", "text", "offsets"),
    [
        ([97, BOS_TOKEN, 98, EOS, 99], True, "abc", [0, 1, 1, 2, 2, 3]),
        ([97, BOS_TOKEN, 98, EOS, 99], False, "a<bos>b<eos>c", [0, 1, 6, 7, 12, 13]),
        ("a<bos>b", True, "a<bos>b", [0, 1, 6, 7]),
        ([97, 0xC3], True, "a\ufffd", [0, 1, 2]),  # it ends within a character
        ([97, 0xE2, 0x82], True, "a\ufffd", [0, 1, 1, 2]),
    ],
)
def test_tokens_of_an_echo_are_where_its_text_has_them(
    site: Site, prompt: Any, skip: bool, text: str, offsets: list[int]
) -> None:
    body = {"prompt": prompt, "max_tokens": 1, "logprobs": 0, "echo": True, "skip_special_tokens": skip}
    (choice,) = site.good(COMPLETIONS, body)["choices"]
    assert choice["text"] == text + text_of(1)
    assert choice["logprobs"]["text_offset"] == offsets


@given(st.lists(st.sampled_from([0x61, 0x62, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF]), max_size=12))
def test_a_token_is_where_the_text_has_it_also_after_a_broken_character(ids: list[int]) -> None:
    tokenizer = byte_tokenizer()
    writer = CompletionLogprobWriter(tokenizer, LogprobOptions(), skip_special_tokens=True, prompt_is_text=False)
    offsets = []
    for token in ids:
        new = NewLogprobs(None, Logprobs(own=bytes(4)))
        tokens = TokenOut(rid="a", token_ids=[token], finish=None, counts=Counts(1, 1), logprobs=new)
        offsets += writer.write(TextOut(tokens=tokens, text="")).text_offset
    text = tokenizer.decode(ids)
    assert offsets == sorted(offsets)
    for token, offset in zip(ids, offsets, strict=True):
        if token < 0x80:
            assert text[offset] == chr(token)


@pytest.mark.parametrize(("skip", "offsets"), [(True, [0, 1, 1]), (False, [0, 1, 6])])
def test_generated_special_tokens_take_place_in_a_text_that_shows_them(skip: bool, offsets: list[int]) -> None:
    writer = CompletionLogprobWriter(byte_tokenizer(), LogprobOptions(), skip_special_tokens=skip, prompt_is_text=False)
    new = NewLogprobs(None, Logprobs(own=bytes(4 * 3)))
    ids = [97, BOS_TOKEN, 98]
    tokens = TokenOut(rid="a", token_ids=ids, finish=None, counts=Counts(1, 3), logprobs=new)
    text = "ab" if skip else "a<bos>b"
    assert writer.write(TextOut(tokens=tokens, text=text)).text_offset == offsets


def test_a_token_that_is_added_before_a_text_is_at_its_beginning(site: Site) -> None:
    """The echo is the client's own text, which lacks the added tokens."""
    tokenizer = site.manager.inputs.tokenizer = byte_tokenizer()
    special = [("<bos>", BOS_TOKEN), ("<eos>", EOS)]
    tokenizer.backend.post_processor = TemplateProcessing(single="<bos> <eos> $A", special_tokens=special)
    (choice,) = site.good(COMPLETIONS, {"prompt": "ab", "max_tokens": 1, "logprobs": 0, "echo": True})["choices"]
    assert choice["text"] == "ab" + text_of(1)
    assert choice["logprobs"]["tokens"] == ["<bos>", "<eos>", "a", "b", "\x00"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 2]


def test_of_tokens_with_one_text_the_most_probable_counts(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site.manager.inputs.tokenizer, "token_text", lambda token: "same")
    (choice,) = site.good(COMPLETIONS, {"prompt": "ab", "max_tokens": 2, "logprobs": 2})["choices"]
    assert choice["logprobs"]["token_logprobs"] == [0.0, -0.25]
    assert choice["logprobs"]["top_logprobs"] == [{"same": 0.0}, {"same": 0.0}]


def test_echo_without_log_probabilities(site: Site) -> None:
    for prompts in (["hé", "b"], [[104, 0xC3, 0xA9], [98]]):
        body = {"prompt": prompts, "max_tokens": 2, "echo": True, "n": 2}
        choices = site.good(COMPLETIONS, body)["choices"]
        assert [choice["text"] for choice in choices] == [prompt + text_of(2) for prompt in ("hé", "hé", "b", "b")]
        assert all(choice["logprobs"] is None for choice in choices)


@pytest.mark.parametrize("large", [False, True])
def test_a_stream_of_completions_loses_no_token(site: Site, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr(sse, "_MAX_VALUES_IN_LOOP", 0)
    body = {"prompt": "hé", "max_tokens": 7, "logprobs": 2, "echo": True}
    whole = site.good(COMPLETIONS, body)["choices"][0]
    chunks = [event["choices"][0] for event in site.stream(COMPLETIONS, body)]
    assert len(chunks) == 7 or large  # also for the token without text
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for name, items in whole["logprobs"].items():
        assert [item for chunk in chunks for item in chunk["logprobs"][name]] == items


def test_chat(site: Site) -> None:
    body = {"messages": HI, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    nul = {"token": "\x00", "logprob": 0.0, "bytes": [0]}
    assert site.good(CHAT, body)["choices"][0]["logprobs"] == {
        "content": [
            {**nul, "top_logprobs": [nul]},
            {"token": "\x01", "logprob": -0.25, "bytes": [1], "top_logprobs": [nul]},
        ],
        "refusal": None,
    }
    plain = site.good(CHAT, {**body, "top_logprobs": 0})["choices"][0]["logprobs"]
    assert [entry["top_logprobs"] for entry in plain["content"]] == [[], []]


def test_a_stream_of_a_chat_loses_no_token(site: Site) -> None:
    site.scheduler.stop_after = 6
    body = {"messages": HI, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
    whole = site.good(CHAT, body)["choices"][0]["logprobs"]["content"]
    choices = [event["choices"][0] for event in site.stream(CHAT, body)]
    content = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert content == whole and len(whole) == 6
    assert choices[0]["logprobs"] is None and choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("num_tokens", [0, 2])
def test_an_end_without_tokens_has_no_log_probabilities(
    site: Site, path: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine sends none with the end of a request that is aborted."""
    monkeypatch.setattr(
        fake_http, "fake_logprobs", lambda request, done, ids: fake_logprobs(request, done, ids) if ids else None
    )
    site.scheduler.fail = (num_tokens, AbortFinish("asked for"))
    body: dict[str, Any] = (
        {"prompt": "ab", "logprobs": 1} if path == COMPLETIONS else {"messages": HI, "logprobs": True}
    )
    found = [site.good(path, body)["choices"][0]["logprobs"]]
    chunks = [event["choices"][0] for event in site.stream(path, body)]
    assert chunks[-1]["finish_reason"] == "abort"
    found.append(chunks[-1]["logprobs"])
    name = "tokens" if path == COMPLETIONS else "content"
    assert [len(one[name]) for one in found] == [num_tokens, min(num_tokens, 1)]


@pytest.mark.parametrize(("num_computed", "tokens", "offsets"), [(0, [], []), (2, ["a", "b"], [0, 1])])
def test_an_echo_that_is_aborted_lists_what_was_computed(
    site: Site, num_computed: int, tokens: list[str], offsets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def partial(request: GenerateReq, done: int, ids: list[int]) -> NewLogprobs:
        shorter = msgspec.structs.replace(request, input_ids=request.input_ids[: 4 * num_computed])
        found = fake_logprobs(shorter, done, ids)
        return found if num_computed else msgspec.structs.replace(found, input=None)

    monkeypatch.setattr(fake_http, "fake_logprobs", partial)
    site.scheduler.fail = (0, AbortFinish("asked for"))
    (choice,) = site.good(COMPLETIONS, {"prompt": "abcd", "echo": True, "logprobs": 0})["choices"]
    assert (choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]) == (tokens, offsets)
    listed = native(site, logprob_start_len=0).get("input_token_logprobs", [])
    assert [entry[1] for entry in listed] == [ord(token) for token in tokens]
    assert [entry[0] for entry in listed] == [None, -98 / 4][: len(tokens)]


def test_the_engine_computes_those_of_the_prompt_only_for_an_echo(site: Site) -> None:
    """It cannot take these tokens from the prefix cache."""
    for echo, start in ((True, 0), (False, -1)):
        site.good(COMPLETIONS, {"prompt": "ab", "max_tokens": 1, "logprobs": 20, "echo": echo})
        options = site.scheduler.received[-1].options.logprobs
        assert options is not None and (options.logprob_start_len, options.top_logprobs_num) == (start, 20)


def test_a_token_out_of_reach_has_a_number() -> None:
    assert _finite(float("-inf")) == -9999.0 and _finite(-3.5) == -3.5


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            GENERATE,
            {"input_ids": [1], "return_logprob": True, "return_text_in_logprobs": True},
            "return_text_in_logprobs",
        ),
        (COMPLETIONS, {"prompt": [1], "logprobs": 0}, "logprobs"),
        (COMPLETIONS, {"prompt": [1], "echo": True}, "echo"),
    ],
)
def test_without_a_tokenizer_there_are_no_texts(path: str, body: dict[str, Any], param: str) -> None:
    site = Site(skip_tokenizer_init=True)
    error = site.refused(path, body)
    assert error["param"] == param and "--skip-tokenizer-init" in error["message"]
    answer = site.good(GENERATE, {"input_ids": [1, 2], "return_logprob": True, "logprob_start_len": 0})
    assert answer["meta_info"]["input_token_logprobs"] == [[None, 1, None], *of(2)]
    site.close()

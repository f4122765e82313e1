from __future__ import annotations

from typing import Any

import pytest
from fake_http import BOS_TOKEN, CONTEXT_LEN, Site, with_template
from tokenizers.processors import TemplateProcessing

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_a_text(site: Site, path: str) -> None:
    answer = site.good(path, {"model": "tiny", "prompt": "hé"})
    assert answer == {"tokens": [104, 195, 169], "count": 3, "max_model_len": CONTEXT_LEN}


def test_special_tokens_in_a_text_are_found(site: Site) -> None:
    assert site.good("/tokenize", {"prompt": "a<eos>"})["tokens"] == [97, 256]


def test_several_texts(site: Site) -> None:
    answer = site.good("/tokenize", {"prompt": ["a", "", "bb"]})
    assert answer == {"tokens": [[97], [], [98, 98]], "count": [1, 0, 2], "max_model_len": CONTEXT_LEN}
    answer = site.good("/tokenize", {"prompt": ["a ", ""], "return_token_strs": True})
    assert answer["token_strs"] == [["a", "Ġ"], []]


def test_special_tokens_are_added_to_texts_and_not_to_chats(site: Site) -> None:
    tokenizer = with_template("{{ messages[0].content }}")
    tokenizer.backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_TOKEN)])
    site.manager.inputs.tokenizer = tokenizer
    for body, default in (({"prompt": "hi"}, True), ({"prompt": ["hi"]}, True), ({"messages": HI}, False)):
        for given in (None, True, False):
            tokens = site.good("/tokenize", {**body, "add_special_tokens": given})["tokens"]
            expected = [BOS_TOKEN, *b"hi"] if given or (given is None and default) else [*b"hi"]
            assert tokens == ([expected] if isinstance(body.get("prompt"), list) else expected)


def test_a_chat(site: Site) -> None:
    answer = site.good("/tokenize", {"messages": HI, "chat_template_kwargs": {"mood": "!"}})
    assert bytes(answer["tokens"]) == b"<user>hi\n<assistant>!"
    assert answer["count"] == 21
    answer = site.good("/tokenize", {"messages": HI, "add_generation_prompt": False})
    assert bytes(answer["tokens"]) == b"<user>hi\n"


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_token_ids(site: Site, path: str) -> None:
    assert site.good(path, {"tokens": [104, 195, 169]}) == {"text": "hé", "prompt": "hé"}
    assert site.good(path, {"tokens": [[104], [195, 169], []]})["prompt"] == ["h", "é", ""]
    assert site.good(path, {"tokens": [97, 256]})["text"] == "a"
    assert site.good(path, {"tokens": [97, 256], "skip_special_tokens": False})["text"] == "a<eos>"
    assert site.good(path, {"tokens": []})["text"] == ""
    assert site.good(path, {"tokens": [0]})["text"] == "\0"


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/tokenize", {}, "prompt", "exactly one of prompt and messages is required, got neither"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt", "got both"),
        ("/tokenize", {"prompt": []}, "prompt", "at least one prompt"),
        ("/tokenize", {"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
        ("/tokenize", {"prompt": 5}, "prompt", "got int"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt", "at most"),
        ("/tokenize", {"prompt": ["a", "x" * 100_000]}, "prompt[1]", "at most"),
        ("/tokenize", {"messages": [{**HI[0], "content": "x" * 100_000}]}, "messages", "at most"),
        (
            "/tokenize",
            {"prompt": "a", "add_generation_prompt": True},
            "add_generation_prompt",
            "is allowed only with messages",
        ),
        ("/tokenize", {"messages": []}, "messages", "1 to 10000 messages"),
        ("/detokenize", {}, "tokens", "tokens is required"),
        ("/detokenize", {"tokens": [0, 257, 258]}, "tokens", "[0, 258), got 258"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "[0, 258), got -1"),
        ("/detokenize", {"tokens": [10**30]}, "tokens", "[0, 258), got a number of more than 64 bits"),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens", "not a mix"),
        ("/detokenize", {"tokens": [[]] * 1025}, "tokens", "at most 1024"),
    ],
)
def test_bad_input_is_refused(site: Site, path: str, body: dict[str, Any], param: str, says: str) -> None:
    error = site.refused(path, body)
    assert says in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_another_model_is_not_found(site: Site, path: str) -> None:
    body = {"prompt": "a"} if path == "/tokenize" else {"tokens": []}
    assert site.refused(path, {**body, "model": "gpt"}, 404)["code"] == "model_not_found"


def test_without_a_tokenizer() -> None:
    site = Site(skip_tokenizer_init=True)
    for path, body in [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/tokenize", {"messages": HI}),
    ]:
        error = site.refused(path, body)
        assert "--skip-tokenizer-init" in error["message"] and error["param"] in body
    assert site.good("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})["output_ids"] == [0]
    site.close()

"""Log probabilities on the real model in fp32 are those of `transformers`, through HTTP as lm-eval asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from default_model import model_path, prompts, transformers_model
from toy_engine import REAL_SERVER, ServerProcess

from tercet.srt.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.e2e

TOKENIZER = load_tokenizer(str(model_path()))
PROMPTS = prompts(TOKENIZER, 16)
FLAGS = ["--port", "0", "--dtype", "float32", "--max-total-tokens", "16384", "--chunked-prefill-size", "64"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    server = ServerProcess(tmp_path_factory.mktemp("r"), FLAGS, module=REAL_SERVER)
    with server, server.ready().client() as client:
        yield client


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def reference(ids: list[int]) -> torch.Tensor:
    """The log probabilities behind each token: float64 [len(ids), vocab]."""
    with torch.inference_mode():
        return transformers_model()(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def test_what_lm_eval_sends(client: httpx.Client) -> None:
    chosen = [PROMPTS[0], PROMPTS[6], PROMPTS[8]]
    body = {"prompt": chosen, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    for prompt, choice in zip(chosen, post(client, "/v1/completions", body)["choices"], strict=True):
        found = choice["logprobs"]
        expected = reference(prompt)
        assert len(found["tokens"]) == len(prompt) + 1 == len(found["text_offset"]) == len(found["top_logprobs"])
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        for place, token in enumerate(prompt[1:], start=1):
            value, top = found["token_logprobs"][place], found["top_logprobs"][place]
            assert abs(value - expected[place - 1, token]) < 1e-4
            assert abs(max(top.values()) - expected[place - 1].max()) < 1e-4 and value in top.values()
        assert abs(found["token_logprobs"][-1] - expected[-1].max()) < 1e-4


def test_any_start_with_and_without_a_cached_prefix(client: httpx.Client) -> None:
    """The longest prompt has several chunks, and its logits several blocks."""
    prompt = PROMPTS[15]
    assert len(prompt) > 2 * 64
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "temperature": 0}, "return_logprob": True}
    answers = []
    for start in (0, 0, 100, len(prompt) - 2):
        if not answers:
            client.post("/flush_cache")
        answers.append(post(client, "/generate", {**body, "logprob_start_len": start, "top_logprobs_num": 3}))
    first, *others = (answer["meta_info"] for answer in answers)
    assert [meta["cached_tokens"] for meta in (first, *others)] == [0, 0, 100, len(prompt) - 2]
    for meta in others:
        size = len(meta["input_token_logprobs"])
        assert meta["output_token_logprobs"] == first["output_token_logprobs"]
        assert meta["input_token_logprobs"][1:] == first["input_token_logprobs"][-size + 1 :]
        assert meta["input_top_logprobs"][1:] == first["input_top_logprobs"][-size + 1 :]
    ids = [*prompt, *answers[0]["output_ids"]]
    expected = reference(ids)
    entries = first["input_token_logprobs"][1:] + first["output_token_logprobs"]
    tops = first["input_top_logprobs"][1:] + first["output_top_logprobs"]
    for place, (entry, top) in enumerate(zip(entries, tops, strict=True), start=1):
        assert entry[1] == ids[place] and abs(entry[0] - expected[place - 1, ids[place]]) < 1e-4
        for value, token, _ in top:
            assert abs(value - expected[place - 1, token]) < 1e-4


def test_a_chat_spells_its_answer(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Write 🎉 and 你好"}], "max_tokens": 24, "seed": 5}
    choice = post(client, "/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 2})["choices"][0]
    content = choice["logprobs"]["content"]
    spelt = b"".join(bytes(entry["bytes"]) for entry in content).decode(errors="replace")
    assert spelt.removesuffix("<|im_end|>") == choice["message"]["content"]
    assert all(entry["logprob"] <= entry["top_logprobs"][0]["logprob"] <= 0 for entry in content)


def test_scores_of_labels(client: httpx.Client) -> None:
    query, items, labels = PROMPTS[6], [PROMPTS[0], PROMPTS[8]], [5, 28, 1000]
    body = {"query": query, "items": items, "label_token_ids": labels}
    for row, item in zip(post(client, "/v1/score", body)["scores"], items, strict=True):
        assert row == pytest.approx(reference(query + item)[-1, labels].exp().tolist(), rel=1e-3)
    shares = post(client, "/v1/score", {**body, "apply_softmax": True})["scores"]
    assert shares[0] == pytest.approx(reference(query + items[0])[-1, labels].softmax(-1).tolist(), rel=1e-3)

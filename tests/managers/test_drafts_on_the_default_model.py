"""A LocalEngine of the default model returns the same tokens with and without drafts, in fewer steps."""

from __future__ import annotations

import json
from typing import Any

import pytest
from default_model import model_path

from tercet import LocalEngine
from tercet.managers.draft_cost import DraftCost
from tercet.srt.sampling_params import SamplingParams

TEXT = (
    "Tercet is an engine that serves language models. The scheduler owns the memory of keys and values, and the runner "
    "owns the model. A step of the scheduler computes parts of prompts, or the next tokens of the running requests."
)
COPY = f"<|im_start|>user\nRepeat this text word by word:\n\n{TEXT}<|im_end|>\n<|im_start|>assistant\n{TEXT[:40]}"
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "copy": (COPY, {}),
    "copy with logprobs": (COPY, {}),
    "drawn": (COPY, {"temperature": 0.5, "sampling_seed": 3}),
    "penalties": (COPY, {"frequency_penalty": 0.3, "presence_penalty": 0.2}),
    "json": ("A fox as JSON: ", {"json_schema": '{"type": "object", "properties": {"name": {"type": "string"}}}'}),
    "stop": (COPY, {"stop": ["the runner"]}),
    "bias": ("One, two, three, one, two,", {"logit_bias": {"28": -2.0}, "min_new_tokens": 20}),
}
PEOPLE = [
    {"name": "Ada Lovelace", "role": "analyst", "city": "London"},
    {"name": "Grace Hopper", "role": "admiral", "city": "New York"},
    {"name": "Alan Turing", "role": "analyst", "city": "Manchester"},
]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "role": {"enum": ["analyst", "admiral"]},
        "city": {"type": "string"},
    },
    "required": ["name", "role", "city"],
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 3, "maxItems": 3}
SCHEMA_AS_TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}


def repeated(people: list[dict[str, str]]) -> str:
    text = json.dumps(people)
    return f"<|im_start|>user\nRepeat this JSON:\n\n{text}<|im_end|>\n<|im_start|>assistant\n"


SAME = repeated(PEOPLE)
CONSTRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "right": (SAME, {"json_schema": json.dumps(SCHEMA)}),
    "right with logprobs": (SAME, {"json_schema": json.dumps(SCHEMA)}),
    "right, drawn": (SAME, {"json_schema": json.dumps(SCHEMA), "temperature": 0.6, "sampling_seed": 4}),
    "wrong keys": (repeated([{"City": person["city"]} for person in PEOPLE]), {"json_schema": json.dumps(SCHEMA)}),
    "llguidance": (SAME, {"structural_tag": json.dumps(SCHEMA_AS_TAG)}),
    "regex": (COPY, {"regex": "[a-zA-Z ,.]{30,}", "stop": ["owns the model"]}),
    "penalties": (SAME, {"json_schema": json.dumps(SCHEMA), "presence_penalty": 0.1}),
    "end": (SAME, {"json_schema": json.dumps(PERSON), "min_new_tokens": 40}),
}
"""Drafts are right in most of these requests, and forbidden in one."""


def answers(
    requests: dict[str, tuple[str, dict[str, Any]]], **settings: Any
) -> tuple[dict[str, tuple[list[int], Any, list[Any]]], int, LocalEngine]:
    """The tokens, finish reason and log probabilities of each request, and how often a step returned tokens of one."""
    engine = LocalEngine(model_path(), max_total_tokens=8192, random_seed=1, **settings)
    for rid, (prompt, own) in requests.items():
        given = {"temperature": 0.0, "max_new_tokens": 60, **own}
        options = {"return_logprob": True, "top_logprobs_num": 2} if "logprobs" in rid else {}
        engine.add_request(rid, prompt, SamplingParams(**given), **options)
    found: dict[str, tuple[list[int], Any, list[Any]]] = {rid: ([], None, []) for rid in requests}
    num_outputs = 0
    while any(finish is None for _, finish, _ in found.values()):
        result = engine.step()
        num_outputs += len(result.new_tokens)
        for rid, ids in result.new_tokens.items():
            found[rid][0].extend(ids)
        for rid, lists in result.logprobs.items():
            found[rid][2].extend(lists["output_top_logprobs"])
        for rid, finish in result.finish_reasons.items():
            found[rid] = (found[rid][0], finish, found[rid][2])
    return found, num_outputs, engine


@pytest.mark.parametrize(
    ("dtype", "requests"),
    [("float32", REQUESTS), ("bfloat16", REQUESTS), ("bfloat16", CONSTRAINED)],
    ids=["texts in float32", "texts", "grammars"],
)
def test_tokens_and_log_probabilities_are_the_same_in_fewer_steps(
    dtype: str, requests: dict[str, tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured time of steps has no influence on the number of drafts here."""
    monkeypatch.setattr(DraftCost, "observe", lambda *_: None)
    plain, num_outputs, _ = answers(requests, dtype=dtype)
    drafted, num_drafted_outputs, engine = answers(requests, dtype=dtype, speculative_algorithm="NGRAM")
    assert drafted == plain
    assert num_drafted_outputs < 0.8 * num_outputs
    speculation = engine.scheduler.state().speculation
    assert speculation is not None and speculation.accept_rate > 0.4
    assert not engine.scheduler.planner._proposer._histories  # type: ignore[union-attr]


def test_a_prediction_saves_steps_and_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A right prediction, one with another token in its middle, and one of another text."""
    monkeypatch.setattr(DraftCost, "observe", lambda *_: None)
    engine = LocalEngine(model_path(), max_total_tokens=8192, random_seed=1, speculative_algorithm="NGRAM")

    def answer(prediction: str | list[int]) -> tuple[list[int], int]:
        params = SamplingParams(temperature=0.0, max_new_tokens=80, ignore_eos=True)
        engine.add_request("r", "Write a short story about a fox.", params, prediction=prediction)
        ids: list[int] = []
        num_outputs = 0
        while engine.has_unfinished():
            new = engine.step().new_tokens.get("r", ())
            ids += new
            num_outputs += bool(new)
        return ids, num_outputs

    plain, num_plain = answer("")
    changed = [*plain[:40], 0, *plain[41:]]
    results = [answer(prediction) for prediction in (plain, changed, "1 2 3 4 5 6 7 8 9 10 11 12")]
    assert [ids for ids, _ in results] == [plain] * 3
    (_, num_right), (_, num_changed), (_, num_other) = results
    assert num_right < num_changed < 0.4 * num_plain
    assert num_other <= num_plain
    assert engine.tokenizer is not None
    assert answer(engine.tokenizer.decode(plain))[1] < 0.4 * num_plain

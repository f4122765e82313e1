"""The requests of a run: all features, each with one right answer, because it is greedy or has a seed."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_PROSE = (Path(__file__).resolve().parents[2] / "LICENSE").read_text(encoding="utf-8")
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_NUMBER = "NUMBER OF THE SCHEMA"
_TOOL = {"name": "weather", "description": "Tells the weather", "parameters": _SCHEMA}


@dataclass(frozen=True)
class Case:
    """A request. The same body always has the same answer."""

    name: str
    method: str
    path: str
    body: dict[str, Any]
    can_stream: bool
    has_new_schema: bool = False
    """`drawn` gives each request another schema, which allows the same texts. So it must be compiled."""

    def encoded(self, streamed: bool, **more: Any) -> bytes:
        return json.dumps({**self.body, **({"stream": True} if streamed else {}), **more}).encode()

    def drawn(self, rng: random.Random) -> Case:
        """The case for one request."""
        if not self.has_new_schema:
            return self
        return replace(self, body=json.loads(json.dumps(self.body).replace(_NUMBER, f"{rng.getrandbits(64):x}")))


def make_cases(rng: random.Random, max_tokens: int) -> list[Case]:
    """About thirty requests. `max_tokens`: the length of the longest answers."""
    cases: list[Case] = []

    def prompt() -> str:
        at = rng.randrange(len(_PROSE) - 400)
        return _PROSE[at : at + rng.randrange(10, 400)]

    def tokens() -> int:
        return rng.randint(max(max_tokens // 2, 1), max_tokens)

    def post(name: str, path: str, can_stream: bool, **body: Any) -> None:
        cases.append(Case(name, "POST", path, body, can_stream))

    def generate(name: str, sampling: dict[str, Any], **body: Any) -> None:
        prompts = body if {"text", "input_ids"} & body.keys() else {"text": prompt(), **body}
        sampling = {"max_new_tokens": tokens(), "ignore_eos": True, "temperature": 0, **sampling}
        post(name, "/generate", True, **prompts, sampling_params=sampling)

    seeded = {"temperature": 1.5, "sampling_seed": rng.randrange(1 << 30)}
    penalties = {"frequency_penalty": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2}
    logprobs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    for index in range(3):
        generate(f"greedy {index}", {})
        generate(f"seeded {index}", {"temperature": 3.0, "sampling_seed": index})
    generate("filters", {**seeded, "top_k": 40, "top_p": 0.9, "min_p": 0.01})
    generate("penalties", {**seeded, **penalties, "min_new_tokens": max_tokens // 3})
    generate("stop strings", {**seeded, "stop": ["e", "an", "\n\n"], "no_stop_trim": True})
    generate("rare stop string", {**seeded, "stop": ["the the", "zzz"], "ignore_eos": False})
    generate("stop pattern", {**seeded, "stop_regex": ["[aeiou]{3}", r"\d\d"]})
    generate("stop tokens", {**seeded, "stop_token_ids": list(range(100, 2000, 7))})
    generate("three samples", {**seeded, "n": 3})
    generate("log probabilities", {**seeded, "max_new_tokens": max(max_tokens // 3, 1)}, **logprobs)
    generate("logit bias", {**seeded, "logit_bias": {str(token): 5.0 for token in range(300, 340)}})
    generate("two prompts", {}, text=[prompt(), prompt()])
    generate("token ids", {}, input_ids=[rng.randrange(20, 40000) for _ in range(20)])
    generate("no tokens", {"max_new_tokens": 0})
    generate("pattern", {**seeded, "regex": "[a-c]{4,12}( [0-9]{2}){0,9}!"})
    generate("schema", {**seeded, "json_schema": _SCHEMA, "max_new_tokens": 60})
    generate("grammar", {**seeded, "ebnf": 'root ::= ("ab" | "cd" | "e"){3,20} "."', "max_new_tokens": 60})

    def completion(name: str, **body: Any) -> None:
        post(name, "/v1/completions", True, prompt=prompt(), max_tokens=tokens(), **body)

    completion("completion", temperature=0)
    completion("completions with a seed", temperature=1, seed=7, n=2, stop=["q", "zz"])
    completion("echo with log probabilities", temperature=1, seed=3, echo=True, logprobs=2)

    def chat(name: str, **body: Any) -> None:
        messages = [{"role": "system", "content": prompt()[:60]}, {"role": "user", "content": prompt()[:120]}]
        post(name, "/v1/chat/completions", True, messages=messages, max_tokens=tokens(), seed=5, **body)

    chat("chat", temperature=0)
    chat("chat with log probabilities", temperature=1, logprobs=True, top_logprobs=3, stream_options=None)
    chat("chat with a schema", temperature=1, response_format=_response_format())
    chat("tool call", temperature=1, tools=[{"type": "function", "function": _TOOL}], tool_choice="required")
    messages = [{"role": "user", "content": prompt()}]
    post("message", "/v1/messages", False, messages=messages, max_tokens=tokens(), temperature=0)
    post("response", "/v1/responses", True, input=prompt(), max_output_tokens=tokens(), temperature=0)

    post("embeddings", "/v1/embeddings", False, input=[prompt(), "a", prompt()])
    post("score", "/v1/score", False, query=prompt(), items=[" yes", " no"], label_token_ids=[100, 200, 300])
    post("tokenize", "/tokenize", False, prompt=prompt())
    post("detokenize", "/detokenize", False, tokens=[rng.randrange(20, 40000) for _ in range(30)])
    cases.append(Case("models", "GET", "/v1/models", {}, False))
    return cases


def new_schema_cases(rng: random.Random) -> list[Case]:
    """Requests whose schemas must be compiled. That of words takes long, and that of a pattern is short."""
    words = sorted({"".join(rng.choices("abcdefghijklmnop", k=rng.randint(3, 9))) for _ in range(200)})
    of_words = _wrapped({"description": _NUMBER, "type": "array", "items": {"enum": words}})
    of_pattern = _wrapped({"description": _NUMBER, "type": "string", "pattern": "^[a-c]{2,9}( [0-9]{2})?$"})
    seeded = {"temperature": 1.5, "sampling_seed": rng.randrange(1 << 30), "max_new_tokens": 60}

    def generate(name: str, schema: dict[str, Any]) -> Case:
        body = {"text": "It is", "sampling_params": {**seeded, "json_schema": schema}}
        return Case(name, "POST", "/generate", body, True, True)

    chat = {"messages": [{"role": "user", "content": "Which words?"}], "max_tokens": 60, "seed": 5}
    chat["response_format"] = _response_format(of_words)
    return [
        generate("new schema of words", of_words),
        generate("new schema of a pattern", of_pattern),
        Case("chat with a new schema", "POST", "/v1/chat/completions", chat, True, True),
    ]


def _wrapped(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema, "b": schema}, "required": ["a", "b"]}


def _response_format(schema: dict[str, Any] = _SCHEMA) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}

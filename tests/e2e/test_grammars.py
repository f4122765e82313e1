"""Structured output over HTTP on the real model, beside grammars that mean harm."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from toy_engine import REAL_SERVER, ServerProcess

pytestmark = pytest.mark.e2e

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
}
CHAIN = {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(4000)}, "$ref": "#/$defs/a0"}
BOMBS: list[tuple[str, Any]] = [
    ("regex", "("),
    ("regex", "(a{1,1000}){1,1000}" * 20),
    ("regex", "(" * 50_000),
    ("ebnf", "root ::= missing"),
    ("ebnf", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ("ebnf", "\n".join(["root ::= a0", *(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(60)), 'a60 ::= "x"'])),
    ("json_schema", CHAIN),
    ("json_schema", {"$ref": "#"}),
    ("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000),
    ("json_schema", {"enum": ["x" * 1_000_000]}),
    ("json_schema", {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(2500)}, "not": {}}),
    ("structural_tag", "[]"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ["--port", "0", "--max-total-tokens", "16384"]
    with ServerProcess(tmp_path_factory.mktemp("r"), flags, module=REAL_SERVER) as server:
        yield server.ready()


def chat(client: httpx.Client, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "Describe a person."}], "max_tokens": 60, **fields}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_ways_to_ask_for_structure(server: ServerProcess) -> None:
    with server.client() as client:
        formats: list[dict[str, Any]] = [
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "p", "schema": PERSON, "strict": True},
                }
            },
            {"structured_outputs": {"json": PERSON}},
            {"json_schema": json.dumps(PERSON)},
        ]
        for fields in formats:
            person = json.loads(chat(client, temperature=1.0, seed=3, **fields)["choices"][0]["message"]["content"])
            assert set(person) == {"name", "age"} and 0 <= person["age"] <= 99
        answer = chat(client, n=3, temperature=2.0, structured_outputs={"choice": ["red", "blue"]})
        assert len(answer["choices"]) == 3
        assert all(one["message"]["content"] in ("red", "blue") for one in answer["choices"])
        native = {"text": "Letters: ", "sampling_params": {"ebnf": 'root ::= ("a" | "b"){3}', "max_new_tokens": 9}}
        assert len(client.post("/generate", json=native).json()["text"]) == 3
        streamed = ""
        body = {"prompt": "A number: ", "regex": "[0-9]{5}", "stream": True, "max_tokens": 12}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    streamed += json.loads(line[6:])["choices"][0]["text"]
        assert len(streamed) == 5 and streamed.isdigit()


def test_harmful_grammars_end_their_own_requests_alone(server: ServerProcess) -> None:
    scheduler = server.children["scheduler"]

    def send(bomb: tuple[str, Any]) -> tuple[str, httpx.Response]:
        kind, text = bomb
        with server.client() as client:
            body = {"text": "a", "sampling_params": {kind: text, "max_new_tokens": 40, "temperature": 1.0}}
            return kind, client.post("/generate", json=body, timeout=120)

    with server.client() as client, ThreadPoolExecutor(len(BOMBS)) as pool:
        plain = {"text": "Once", "sampling_params": {"max_new_tokens": 8, "temperature": 0.0}}
        expected = client.post("/generate", json=plain).json()["output_ids"]
        answers = pool.map(send, BOMBS)
        for _ in range(10):
            assert client.post("/generate", json=plain).json()["output_ids"] == expected
        for kind, answer in answers:
            if answer.status_code != 200:  # a pattern that is only large may be followed
                assert answer.status_code == 400, answer.text
                error = answer.json()["error"]
                assert error["param"] == f"sampling_params.{kind}" or kind in error["message"]
        fine = {"text": "a", "sampling_params": {"json_schema": PERSON, "max_new_tokens": 60}}
        assert set(json.loads(client.post("/generate", json=fine).json()["text"])) == {"name", "age"}
    assert server.children["scheduler"] == scheduler
    os.kill(scheduler, 0)

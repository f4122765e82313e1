"""The fields that constrain an output: which of them go together, and the field that an error names."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator
from typing import Any

import pytest
from fake_http import Site
from field_walks import Effect, Table, Walk, check

from tercet.srt.entrypoints.openai.structured import ANY_OBJECT, MAX_CHOICES, _one_of
from tercet.srt.entrypoints.openai.structured_protocol import JsonSchemaFormat, ResponseFormat, StructuredOutputs
from tercet.srt.errors import InvalidRequest
from tercet.srt.grammar_spec import MAX_GRAMMAR_BYTES, GrammarSpec
from tercet.srt.io_struct import AbortFinish
from tercet.srt.sampling_params import SamplingParams

COMPLETION = {"prompt": "a", "max_tokens": 2}
SCHEMA = {"type": "object"}


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    assert site.idle()
    site.close()


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"regex": "a", "ebnf": "b"}, "ebnf", "got regex and ebnf"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "got response_format and regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required with type"),
        (
            {"response_format": {"type": "text", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema",
            "allowed only with type json_schema, got type text",
        ),
        ({"response_format": {"type": "json_object", "triggers": []}}, "response_format.triggers", "structural_tag"),
        (
            {"response_format": {"type": "json_object", "structures": []}},
            "response_format.structures",
            "structural_tag",
        ),
        ({"response_format": {"type": "text", "format": {}}}, "response_format.format", "got type text"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to 1000 texts"),
        ({"structured_outputs": {"choice": ["a"] * 1001}}, "structured_outputs.choice", "1 to 1000 texts"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "got an empty one"),
        ({"structured_outputs": {"guided": "a"}}, "structured_outputs.guided", "unknown field"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "regex", "bytes long"),
        (
            {"structured_outputs": {"choice": ["a" * (MAX_GRAMMAR_BYTES + 1)]}},
            "structured_outputs",
            f"structured_outputs must be at most {MAX_GRAMMAR_BYTES} bytes long, got {MAX_GRAMMAR_BYTES + 1}",
        ),
        ({"structural_tag": "a" * (MAX_GRAMMAR_BYTES + 1)}, "structural_tag", "structural_tag must be"),
        # What the judge of grammars says names the field of the client.
        ({"regex": "bad"}, "regex", "the grammar is bad"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "bad"}}}, "response_format", "is bad"),
        ({"structured_outputs": {"grammar": "bad"}}, "structured_outputs", "the grammar is bad"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_wrong_constraint_names_its_field(
    site: Site, path: str, fields: dict[str, Any], param: str, says: str
) -> None:
    base = COMPLETION if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    error = site.refused(path, json.dumps({**base, **fields}).encode())
    assert error["param"] == param and says in error["message"]
    assert not site.scheduler.received


def test_the_native_dialect_names_the_prompt_whose_grammar_is_wrong(site: Site) -> None:
    params: list[dict[str, Any]] = [{"regex": "a"}, {"regex": "bad"}]
    error = site.refused("/generate", {"text": ["a", "b"], "sampling_params": params})
    assert error["param"] == "sampling_params[1].regex"
    error = site.refused("/generate", {"text": "a", "sampling_params": {"json_schema": {"bad": 1}}})
    assert error["param"] == "sampling_params.json_schema"
    error = site.refused("/generate", {"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}})
    assert error["param"] == "sampling_params.ebnf" and "only one of" in error["message"]


TOOL = {"type": "function", "function": {"name": "f"}}
HI = {"messages": [{"role": "user", "content": "a"}]}
FAILING: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {**COMPLETION, "regex": "a+"}, "regex"),
    ("/v1/completions", {**COMPLETION, "structured_outputs": {"grammar": "b"}}, "structured_outputs"),
    ("/v1/chat/completions", {**HI, "response_format": {"type": "json_object"}}, "response_format"),
    ("/v1/chat/completions", {**HI, "tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ("/generate", {"text": "a", "sampling_params": {"ebnf": "b"}}, "sampling_params.ebnf"),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_object"}}}, "text.format"),
]


@pytest.mark.parametrize(("path", "body", "param"), FAILING)
def test_a_grammar_that_fails_later_names_its_field(site: Site, path: str, body: dict[str, Any], param: str) -> None:
    """A limit of the grammar was reached after the first token: status 400, or the last event of the stream."""

    def fail_after(num_tokens: int) -> None:
        kind = site.scheduler.received[-1].options.sampling.grammar
        assert kind is not None
        site.scheduler.fail = (num_tokens, AbortFinish.of(InvalidRequest("it is too complex", param=kind.kind)))

    site.post(path, body)
    fail_after(1)
    error = site.refused(path, body)
    assert (error["param"], error["message"], error["type"]) == (param, "it is too complex", "invalid_request_error")
    assert site.post(path, {**body, "stream": True}).status_code == 400, "nothing was sent before"
    fail_after(2)
    last = site.stream(path, body)[-1]
    if path == "/v1/responses":  # errors of its events have no param
        assert last["response"]["error"]["message"] == f"{param}: it is too complex"
    else:
        assert last["error"]["param"] == param and last["error"]["message"] == "it is too complex"


def test_a_format_without_a_schema_is_any_object(site: Site) -> None:
    any_schema = {"type": "json_schema", "json_schema": {"name": "x"}}
    site.good("/v1/completions", {**COMPLETION, "response_format": any_schema})
    assert site.scheduler.received[-1].options.sampling.json_schema == ANY_OBJECT


def test_an_empty_schema_allows_any_value(site: Site) -> None:
    given = {"type": "json_schema", "json_schema": {"schema": {}}}
    site.good("/v1/completions", {**COMPLETION, "response_format": given})
    assert site.scheduler.received[-1].options.sampling.json_schema == "{}"


@pytest.mark.parametrize("num_choices", [1, 1000])
def test_the_fewest_and_the_most_choices(site: Site, num_choices: int) -> None:
    site.good("/v1/completions", {**COMPLETION, "structured_outputs": {"choice": ["a"] * num_choices}})
    assert site.scheduler.received[0].options.sampling.regex == "|".join("a" * num_choices)


def test_a_choice_stands_for_its_own_characters_only() -> None:
    texts = [*string.printable, "a|b", "a\\d", "aa", "(?i)a", "[^a]"]
    for text in texts:
        pattern = _one_of([text, "other"])
        assert [one for one in texts if re.fullmatch(pattern, one)] == [text]
    assert len(_one_of(["a"] * MAX_CHOICES).split("|")) == MAX_CHOICES


def test_a_lone_surrogate_is_no_grammar(site: Site) -> None:
    assert site.refused("/v1/completions", json.dumps({**COMPLETION, "regex": "\udfff"}).encode())["message"] != ""
    with pytest.raises(InvalidRequest, match="valid Unicode"):
        SamplingParams(regex="\udfff")


def test_an_engine_without_a_tokenizer_has_no_grammars() -> None:
    site = Site(skip_tokenizer_init=True)
    error = site.refused("/generate", {"input_ids": [1], "sampling_params": {"regex": "a"}})
    assert error["param"] == "sampling_params.regex" and "needs a tokenizer" in error["message"]
    error = site.refused("/v1/completions", {"prompt": [1], "structured_outputs": {"choice": ["a"]}})
    assert error["message"].startswith("structured_outputs needs a tokenizer"), "the client has sent no pattern"
    site.close()


def test_an_engine_without_grammars_says_so(site: Site) -> None:
    site.manager.grammars = None
    error = site.refused("/v1/completions", {**COMPLETION, "regex": "a"})
    assert error["param"] == "regex" and "not supported" in error["message"]


INTEGER = '{"type":"integer"}'


def tag(schema: str = INTEGER) -> str:
    return (
        f'{{"type":"structural_tag","structures":[{{"begin":"<a>","schema":{schema},"end":"</a>"}}],"triggers":["<a"]}}'
    )


def grammar(value: Any, kind: str, text: str) -> tuple[Any, Effect]:
    return value, lambda seen: seen.req.options.sampling.grammar == GrammarSpec(kind, text)


RESPONSE_FORMAT: Table = {
    "type": grammar("json_object", "json_schema", '{"type":"object"}'),
    "json_schema": grammar({"schema": {"type": "integer"}}, "json_schema", INTEGER),
    "structures": grammar(json.loads(tag())["structures"], "structural_tag", tag().replace('["<a"]', "[]")),
    "triggers": grammar(["<a"], "structural_tag", '{"type":"structural_tag","triggers":["<a"]}'),
    "format": grammar({"type": "any_text"}, "structural_tag", '{"type":"structural_tag","format":{"type":"any_text"}}'),
}
JSON_SCHEMA_FORMAT: Table = {"schema": grammar({"type": "integer"}, "json_schema", INTEGER)}
STRUCTURED_OUTPUTS: Table = {
    "json": grammar({"type": "integer"}, "json_schema", INTEGER),
    "json_object": grammar(True, "json_schema", '{"type":"object"}'),
    "regex": grammar("a+", "regex", "a+"),
    "choice": grammar(["a.b", "c"], "regex", r"a\.b|c"),
    "grammar": grammar('root ::= "a"', "ebnf", 'root ::= "a"'),
    "structural_tag": grammar(tag(), "structural_tag", tag()),
}


def in_format(name: str, value: Any) -> dict[str, Any]:
    kind = "text" if value is None else "json_schema" if name == "json_schema" else "structural_tag"
    given = {"type": kind, name: value} if name != "type" else {"type": value or "text"}
    if name == "structures" and value is not None:
        given["triggers"] = []
    return {"prompt": "a", "max_tokens": 2, "response_format": given}


def in_schema(name: str, value: Any) -> dict[str, Any]:
    made = {"type": "json_schema", "json_schema": {"name": "x", name: value}}
    return {"prompt": "a", "max_tokens": 2, "response_format": made}


def in_structured(name: str, value: Any) -> dict[str, Any]:
    base = {"prompt": "a", "max_tokens": 2}
    return base if value is None else {**base, "structured_outputs": {name: value}}


@pytest.mark.parametrize(
    "walk",
    [
        Walk("/v1/completions", ResponseFormat, RESPONSE_FORMAT, in_format),
        Walk("/v1/completions", JsonSchemaFormat, JSON_SCHEMA_FORMAT, in_schema),
        Walk("/v1/completions", StructuredOutputs, STRUCTURED_OUTPUTS, in_structured),
    ],
    ids=lambda walk: walk.cls.__name__,
)
def test_every_field_arrives(site: Site, walk: Walk) -> None:
    check(site, walk, labels={"name", "description"})

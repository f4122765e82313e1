from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from fake_http import Site
from patience import PATIENCE_S

import tercet
from tercet.srt.entrypoints.endpoints import ENDPOINTS
from tercet.srt.entrypoints.error_handlers import ErrorBody, ErrorEnvelope
from tercet.srt.entrypoints.openapi import (
    answer_table,
    answer_types,
    body_types,
    field_table,
    options_table,
    render,
    write_docs,
)
from tercet.srt.entrypoints.wire import answer_fields_of, doc, fields_of

DOCS = Path(tercet.__file__).parent / "docs" / "api.md"


def walk(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from walk(one)


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    site = Site()
    document: dict[str, Any] = site.get("/openapi.json").json()
    site.close()
    return document


def test_every_route_is_in_the_document(site: Site, spec: dict[str, Any]) -> None:
    routes = {
        (route.path.replace(":path", ""), method.lower())  # type: ignore[attr-defined]
        for route in site.app.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    assert {(path, method) for path, methods in spec["paths"].items() for method in methods} == routes


def test_every_reference_leads_somewhere(spec: dict[str, Any]) -> None:
    schemas = spec["components"]["schemas"]
    refs = [one["$ref"] for one in walk(spec) if isinstance(one, dict) and "$ref" in one]
    assert refs
    for ref in refs:
        assert ref.removeprefix("#/components/schemas/") in schemas


def test_operation_ids_are_unique(spec: dict[str, Any]) -> None:
    ids = [one["operationId"] for one in walk(spec) if isinstance(one, dict) and "operationId" in one]
    assert len(ids) == len(set(ids))


def test_the_schema_says_what_is_refused(spec: dict[str, Any]) -> None:
    properties = spec["components"]["schemas"]["ChatBody"]["properties"]
    assert properties["function_call"]["enum"] == [None, "none", "auto"]
    assert spec["components"]["schemas"]["ChatBody"]["required"] == ["messages"]
    assert spec["components"]["schemas"]["ChatBody"]["additionalProperties"] is False
    best_of = spec["components"]["schemas"]["ChatBody"]["properties"]["best_of"]
    assert json.dumps(best_of["enum"]) == "[null, 1]"


def test_every_field_is_described(spec: dict[str, Any]) -> None:
    for cls in body_types(ENDPOINTS):
        assert cls.__doc__
        properties = spec["components"]["schemas"][cls.__name__]["properties"]
        assert set(properties) == {field.name for field in fields_of(cls)}
        assert all(one.get("description") for one in properties.values())


def test_every_field_of_an_answer_is_described(spec: dict[str, Any]) -> None:
    for cls in (*answer_types(ENDPOINTS), ErrorEnvelope, ErrorBody):
        schema = spec["components"]["schemas"][cls.__name__]
        fields = answer_fields_of(cls)
        assert list(schema["properties"]) == [field.name for field in fields]
        for field in fields:
            assert field.description and field.description.rstrip(".") == field.description
        described = {name for name, one in schema["properties"].items() if one.get("description")}
        assert described == set(schema["properties"]) - {cls.__struct_config__.tag_field}


class Choice(msgspec.Struct, tag="choice", tag_field="kind"):
    text: Annotated[str | None, doc("What | was said")]
    stop: Annotated[int | str | msgspec.UnsetType, doc("Why")] = msgspec.UNSET
    note: Annotated[str | None, doc("A note")] = None
    kept: Annotated[Literal[False], doc("Always false")] = False


def test_the_table_of_an_answer_says_what_may_be_null_and_what_may_be_absent() -> None:
    assert answer_table(Choice).splitlines() == [
        "| field of Choice | type | what it is |",
        "|---|---|---|",
        '| `kind` | "choice" | Tells the kinds of this object apart |',
        "| `text` | string or null | What \\| was said |",
        "| `stop` | int or string, may be absent | Why |",
        "| `note` | string or null | A note |",
        "| `kept` | false | Always false |",
    ]


def test_an_answer_without_a_description_is_refused() -> None:
    class Careless(msgspec.Struct):
        text: str

    with pytest.raises(AssertionError, match=r"Careless\.text has no description"):
        answer_table(Careless)


def test_the_answers_are_found_with_their_parts() -> None:
    names = [cls.__name__ for cls in answer_types(ENDPOINTS)]
    assert names[:5] == ["GenerateAnswer", "MetaInfo", "StopFinish", "LengthFinish", "AbortFinish"]
    assert {"Completion", "ChatCompletion", "ChatChunk", "Delta", "ModelCard", "Load", "LoadDetail"} < set(names)
    assert len(names) == len(set(names))


def test_the_page_needs_no_other_host(site: Site) -> None:
    answer = site.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"https?://|<script|src=|@import", answer.text)
    for endpoint in ENDPOINTS:
        assert endpoint.path.replace(":path", "") in answer.text


def test_docs_api_md_is_up_to_date() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert render(text, ENDPOINTS) == text, "out of date: scripts/check --fix writes it anew"


def test_docs_api_md_has_every_body_and_every_answer() -> None:
    blocks = set(re.findall(r"<!-- generated: (\w+) -->", DOCS.read_text(encoding="utf-8")))
    documented = [*body_types(ENDPOINTS), *answer_types(ENDPOINTS), ErrorEnvelope, ErrorBody]
    assert blocks == {cls.__name__ for cls in documented} | {"endpoints", "options"}


def test_every_endpoint_that_runs_a_model_has_a_tenant_a_priority_and_time_limits() -> None:
    head, _, *rows = [line.strip("| ").split(" | ") for line in options_table(ENDPOINTS).splitlines()]
    assert set(head[1:]) == {
        "/generate",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
    }
    named = {option: dict(zip(head[1:], cells, strict=True)) for option, *cells in rows}
    for option in ("cache_salt", "priority", "waiting_timeout", "running_timeout"):
        assert set(named[f"`{option}`"].values()) == {"yes"}
    tenant, session = named["`tenant`"], named["`session_id`"]
    assert (tenant.pop("/generate"), tenant.pop("/v1/messages")) == ("yes", "`metadata.user_id`")
    assert set(tenant.values()) == {"`user`"}
    assert session["/v1/responses"] == "yes" and session["/v1/score"] == "no"


def test_check_fix_writes_every_generated_document(tmp_path: Path) -> None:
    """The program in scripts/check, run on documents whose tables are out of date."""
    script = (DOCS.parents[1] / "scripts" / "check").read_text(encoding="utf-8")
    program = script.split("<<'PY'\n")[1].split("\nPY\n")[0]
    (tmp_path / "docs").mkdir()
    for name in ("api.md", "server_args.md"):
        text = (DOCS.parent / name).read_text(encoding="utf-8")
        stale = tmp_path / "docs" / name
        # What is between the marks of generated blocks, and the rows of the table of flags.
        generated = r"(?s)(<!-- generated: \S+ -->\n).*?(<!-- end -->)" if name == "api.md" else r"(?m)^()()\| `.*\n"
        stale.write_text(re.sub(generated, r"\1\2", text), encoding="utf-8")
        assert stale.read_text(encoding="utf-8") != text
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environ, check=True, timeout=PATIENCE_S)
    for name in ("api.md", "server_args.md"):
        assert (tmp_path / "docs" / name).read_text(encoding="utf-8") == (DOCS.parent / name).read_text(
            encoding="utf-8"
        )


def test_writing_the_docs_changes_the_blocks_only(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- generated: AbortBody -->\nold\n<!-- end -->\nafter\n")
    write_docs(page, ENDPOINTS)
    (abort,) = (cls for cls in body_types(ENDPOINTS) if cls.__name__ == "AbortBody")
    table = field_table(abort)
    assert "| `rid` | string |" in table
    assert page.read_text() == f"before\n<!-- generated: AbortBody -->\n\n{table}\n<!-- end -->\nafter\n"


@pytest.mark.parametrize("path", ["/", "/docs", "/web/style.css", "/web/common.js", "/web/chat.js", "/web/engine.js"])
def test_the_documented_media_type_is_the_one_that_is_sent(site: Site, spec: dict[str, Any], path: str) -> None:
    sent = site.get(path).headers["content-type"].partition(";")[0]
    assert list(spec["paths"][path]["get"]["responses"]["200"]["content"]) == [sent]

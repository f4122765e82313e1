from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_http import Site

import tercet
from tercet.srt.entrypoints.http_server import ENDPOINTS
from tercet.srt.entrypoints.openapi import body_types, field_table, render, write_docs
from tercet.srt.entrypoints.wire import fields_of

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
    assert properties["tool_choice"]["enum"] == [None, "none", "auto"]
    assert spec["components"]["schemas"]["ChatBody"]["required"] == ["messages"]
    assert spec["components"]["schemas"]["ChatBody"]["additionalProperties"] is False
    top_logprobs = spec["components"]["schemas"]["GenerateBody"]["properties"]["top_logprobs_num"]
    assert json.dumps(top_logprobs["enum"]) == "[null, 0]"


def test_every_field_is_described(spec: dict[str, Any]) -> None:
    for cls in body_types(ENDPOINTS):
        assert cls.__doc__
        properties = spec["components"]["schemas"][cls.__name__]["properties"]
        assert set(properties) == {field.name for field in fields_of(cls)}
        assert all(one.get("description") for one in properties.values())


def test_the_page_needs_no_other_host(site: Site) -> None:
    answer = site.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"https?://|<script|src=|@import", answer.text)
    for endpoint in ENDPOINTS:
        assert endpoint.path.replace(":path", "") in answer.text


def test_docs_api_md_is_up_to_date() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert render(text, ENDPOINTS) == text, "run openapi.write_docs(docs/api.md, http_server.ENDPOINTS)"


def test_docs_api_md_has_every_body() -> None:
    blocks = set(re.findall(r"<!-- generated: (\w+) -->", DOCS.read_text(encoding="utf-8")))
    assert blocks == {cls.__name__ for cls in body_types(ENDPOINTS)} | {"endpoints"}


def test_writing_the_docs_changes_the_blocks_only(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- generated: AbortBody -->\nold\n<!-- end -->\nafter\n")
    write_docs(page, ENDPOINTS)
    (abort,) = (cls for cls in body_types(ENDPOINTS) if cls.__name__ == "AbortBody")
    table = field_table(abort)
    assert "| `rid` | string |" in table
    assert page.read_text() == f"before\n<!-- generated: AbortBody -->\n\n{table}\n<!-- end -->\nafter\n"

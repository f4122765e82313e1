"""The API documentation: /openapi.json, /docs, and the tables of docs/api.md.

All of it is made from the declarations of the endpoints and bodies, which also validate requests.
"""

from __future__ import annotations

import asyncio
import functools
import html
import re
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ... import __version__
from .error_handlers import ErrorEnvelope
from .options import OPTION_FIELDS
from .routing import Endpoint, Server
from .wire import Wire, answer_fields_of, fields_of, structs_in, structs_of

_Row = tuple[str, str, str]
"""Name, type and description of a field."""
_REF = "#/components/schemas/{name}"
_BLOCK = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_DOCS_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.2rem .6rem;"
    "border-bottom:1px solid #8884}code{font-size:90%}summary{cursor:pointer}"
)


def endpoints(documented: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
    """The endpoints /openapi.json and /docs, which document the `documented` endpoints and themselves.

    A thread makes them at the first request, because that takes a tenth of a second.
    """

    async def show_spec(server: Server, request: Request, body: None) -> ASGIApp:
        return Response(await asyncio.to_thread(_spec, (*documented, *own)), media_type="application/json")

    async def show_docs(server: Server, request: Request, body: None) -> ASGIApp:
        page = await asyncio.to_thread(docs_page, (*documented, *own))
        return Response(page, media_type="text/html; charset=utf-8", headers=_DOCS_HEADERS)

    own = (
        Endpoint(
            ("GET",), "/openapi.json", "Describes this API as an OpenAPI 3.1 document", show_spec, answer=dict[str, Any]
        ),
        Endpoint(("GET",), "/docs", "Describes this API as an HTML page", show_docs),
    )
    return own


@functools.cache
def _spec(documented: tuple[Endpoint, ...]) -> bytes:
    return msgspec.json.encode(openapi_document(documented))


def openapi_document(documented: Iterable[Endpoint]) -> dict[str, Any]:
    """The OpenAPI 3.1 document. A field with restricted values lists them as its `enum`."""
    documented = list(documented)
    types: list[Any] = [ErrorEnvelope]
    for endpoint in documented:
        types += [kind for kind in (endpoint.answer, endpoint.streams) if kind is not None]
        if endpoint.body is not None:
            types.append(endpoint.body.type)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, Any] = {}
    for endpoint in documented:
        for path in (endpoint.path, *endpoint.aliases):
            operations = {method.lower(): _operation(endpoint, method, path, schema_of) for method in endpoint.methods}
            paths.setdefault(path.replace(":path", ""), {}).update(operations)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tercet", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(endpoint: Endpoint, method: str, path: str, schema_of: dict[str, Any]) -> dict[str, Any]:
    def content(kind: str, of: Any) -> dict[str, Any]:
        return {kind: {"schema": schema_of[repr(of)]}}

    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)", path)
    ]
    parameters += [
        {"name": query.name, "in": "query", "description": query.description, "schema": {"type": query.type}}
        for query in endpoint.query
    ]
    answers: dict[str, Any] = {endpoint.media_type: {}} if endpoint.answer is None else {}
    if endpoint.answer is not None:
        answers |= content("application/json", endpoint.answer)
    if endpoint.streams is not None:
        answers |= content("text/event-stream", endpoint.streams)
    words = re.sub(r"\W+", "_", path).strip("_")
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": f"{method.lower()}_{words}",
        "responses": {
            "200": {"description": "Success", "content": answers},
            "default": {"description": "An error", "content": content("application/json", ErrorEnvelope)},
        },
    }
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": not endpoint.body_may_be_empty,
            "content": content("application/json", endpoint.body.type),
        }
    return operation


@functools.cache
def docs_page(documented: tuple[Endpoint, ...]) -> str:
    """One HTML page. It loads nothing from other hosts."""
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>Tercet</title><style>{_STYLE}</style>"]
    parts.append(f"<h1>Tercet {html.escape(__version__)}</h1><p>OpenAPI document: <code>/openapi.json</code></p>")
    for endpoint in documented:
        where = " ".join((endpoint.path, *endpoint.aliases)).replace(":path", "")
        title = html.escape(f"{'/'.join(endpoint.methods)} {where}")
        parts.append(f"<h3><code>{title}</code></h3><p>{html.escape(endpoint.summary)}</p>")
        for query in endpoint.query:
            parts.append(f"<p><code>?{html.escape(query.name)}=</code> {html.escape(query.description)}</p>")
        for cls in body_types([endpoint]):
            parts.append(_html_table(f"Request: {cls.__name__}", "what it does", _body_rows(cls)))
        for answer in answer_types([endpoint]):
            parts.append(_html_table(f"Answer: {answer.__name__}", "what it is", _answer_rows(answer)))
    return "".join(parts) + "</html>"


def _html_table(title: str, last: str, rows: Iterable[_Row]) -> str:
    def written(row: _Row) -> str:
        name, *others = map(html.escape, row)
        return "<tr>" + "".join(f"<td>{cell}</td>" for cell in (f"<code>{name}</code>", *others)) + "</tr>"

    head = f"<tr><th>field<th>type<th>{last}</tr>"
    body = "".join(map(written, rows))
    return f"<details><summary>{html.escape(title)}</summary><table>{head}{body}</table></details>"


def body_types(documented: Iterable[Endpoint]) -> list[type[Wire]]:
    """The body types and the object types in them. Each occurs once, a body before its parts."""
    found = _with_parts([endpoint.body.type for endpoint in documented if endpoint.body is not None])
    return [cls for cls in found if issubclass(cls, Wire)]


def answer_types(documented: Iterable[Endpoint]) -> list[type[msgspec.Struct]]:
    """The types of answers and stream chunks, and the object types in them. Each occurs once, before its parts."""
    types = [one for endpoint in documented for one in (endpoint.answer, endpoint.streams) if one is not None]
    return _with_parts([cls for one in types for cls in structs_of(one)])


def _with_parts(waiting: list[type[msgspec.Struct]]) -> list[type[msgspec.Struct]]:
    found: list[type[msgspec.Struct]] = []
    while waiting:
        cls = waiting.pop(0)
        if cls not in found:
            found.append(cls)
            waiting = structs_in(cls) + waiting
    return found


def endpoint_table(documented: Iterable[Endpoint]) -> str:
    """A Markdown table of all endpoints."""
    rows = ["| method | path | what it does |", "|---|---|---|"]
    for endpoint in documented:
        paths = " ".join(f"`{path}`" for path in (endpoint.path, *endpoint.aliases)).replace(":path", "")
        query = "".join(f". `?{param.name}=`: {param.description}" for param in endpoint.query)
        rows.append(f"| {' '.join(endpoint.methods)} | {paths} | {endpoint.summary}{query} |")
    return "\n".join(rows) + "\n"


def options_table(documented: Iterable[Endpoint]) -> str:
    """A Markdown table: which endpoints that run a model have a field for which option. A field of another name is
    named."""
    fields = {
        endpoint.path: {field.name for field in fields_of(endpoint.body.type) if field.allowed is None}
        for endpoint in documented
        if endpoint.runs_model and endpoint.body is not None
    }
    lines = [f"| option | {' | '.join(fields)} |", "|---" * (len(fields) + 1) + "|"]
    for option, other in OPTION_FIELDS.items():
        names = (other, "metadata.user_id") if option == "tenant" else (other,)
        cells = [_option_cell(option, names, known) for known in fields.values()]
        lines.append(f"| `{option}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _option_cell(option: str, names: Iterable[str], known: Container[str]) -> str:
    """`names`: what a field for the option may be called. `known`: the fields of a body."""
    if option in known:
        return "yes"
    return next((f"`{name}`" for name in names if name.partition(".")[0] in known), "no")


def field_table(cls: type[Wire]) -> str:
    """A Markdown table of a body's fields."""
    return _table(cls, "what it does", _body_rows(cls))


def answer_table(cls: type[msgspec.Struct]) -> str:
    """A Markdown table of an answer's fields."""
    return _table(cls, "what it is", _answer_rows(cls))


def _table(cls: type[msgspec.Struct], last: str, rows: Iterable[_Row]) -> str:
    """Its head names the type, because other tables refer to it by its name."""
    lines = [f"| field of {cls.__name__} | type | {last} |", "|---|---|---|"]
    for name, *others in rows:
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{name}`", *others)) + " |")
    return "\n".join(lines) + "\n"


def _body_rows(cls: type[Wire]) -> Iterator[_Row]:
    for field in fields_of(cls):
        if field.allowed is None:
            yield field.name, field.type + (", required" if field.required else ""), field.description
        else:
            meaning = f"{field.description[:1].upper()}{field.description[1:]}; only no-op values are accepted"
            yield field.name, field.allowed, meaning


def _answer_rows(cls: type[msgspec.Struct]) -> Iterator[_Row]:
    for field in answer_fields_of(cls):
        yield field.name, field.type + ("" if field.required else ", may be absent"), field.description


def render(text: str, documented: Iterable[Endpoint]) -> str:
    """The Markdown text with its generated blocks replaced.

    A block starts with `<!-- generated: NAME -->`. NAME is `endpoints`, `options`, or the name of a body's, answer's
    or error's type.
    """
    documented = list(documented)
    tables = {cls.__name__: field_table(cls) for cls in body_types(documented)}
    tables |= {cls.__name__: answer_table(cls) for cls in (*answer_types(documented), *_with_parts([ErrorEnvelope]))}
    tables |= {"endpoints": endpoint_table(documented), "options": options_table(documented)}
    return _BLOCK.sub(lambda found: found.group(1) + "\n" + tables[found.group(2)] + "\n" + found.group(3), text)


def write_docs(path: Path, documented: Iterable[Endpoint]) -> None:
    """Updates the generated blocks of a Markdown file."""
    path.write_text(render(path.read_text(encoding="utf-8"), documented), encoding="utf-8")

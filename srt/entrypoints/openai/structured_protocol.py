"""The fields of the OpenAI dialects with which a request constrains its output: `response_format` and vLLM's object."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from ..wire import Wire, doc, only


class JsonSchemaFormat(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`response_format.json_schema`."""

    schema: Annotated[str | dict[str, Any] | None, doc("The JSON schema; default: any JSON object")] = None
    name: Annotated[str | None, doc("A label for the client's own use; it has no effect")] = None
    description: Annotated[str | None, doc("A label for the client's own use; it has no effect")] = None
    strict: Annotated[Any, only("a schema is always enforced", True, False)] = None


class ResponseFormat(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`response_format`."""

    type: Annotated[Literal["text", "json_object", "json_schema", "structural_tag"], doc("The kind of format")]
    json_schema: Annotated[JsonSchemaFormat | None, doc("The schema; only with `type: json_schema`")] = None
    structures: Annotated[
        list[dict[str, Any]] | None,
        doc("Tags, each with `begin`, `schema` and `end`; only with `type: structural_tag`"),
    ] = None
    triggers: Annotated[
        list[str] | None, doc("Texts after which a tag must follow; only with `type: structural_tag`")
    ] = None
    format: Annotated[
        dict[str, Any] | None, doc("A format instead of structures; only with `type: structural_tag`")
    ] = None


class StructuredOutputs(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`structured_outputs`: exactly one of the honoured fields."""

    json: Annotated[str | dict[str, Any] | None, doc("JSON schema that the output matches")] = None
    json_object: Annotated[bool | None, doc("The output is any JSON object")] = None
    regex: Annotated[str | None, doc("Regular expression that the whole output matches")] = None
    choice: Annotated[list[str] | None, doc("The output is one of these texts")] = None
    grammar: Annotated[str | None, doc("Grammar in EBNF that the output matches")] = None
    structural_tag: Annotated[str | dict[str, Any] | None, doc("Tags in free text")] = None
    disable_any_whitespace: Annotated[Any, only("JSON has the server's white space", True, False)] = None
    disable_additional_properties: Annotated[Any, only("the schema's additionalProperties decides", False)] = None
    disable_fallback: Annotated[Any, only("the server's flag --grammar-backend sets it", False)] = None
    whitespace_pattern: Annotated[Any, only("white space in JSON cannot be set")] = None

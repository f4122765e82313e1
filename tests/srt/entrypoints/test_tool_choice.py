"""`tool_choice` as an object: one function that must be called, or the functions that may be called."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_http import Site

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
NAMES = ("f", "g", "h")
PATHS = (CHAT, RESPONSES)


def tool(path: str, name: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "function",
        **({"function": {"name": name, **fields}} if path == CHAT else {"name": name, **fields}),
    }


def allowed(path: str, mode: str, *names: str) -> dict[str, Any]:
    fields = {"mode": mode, "tools": [tool(path, name) for name in names]}
    return {"type": "allowed_tools", **({"allowed_tools": fields} if path == CHAT else fields)}


def body(path: str, choice: Any, **fields: Any) -> dict[str, Any]:
    asks: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"input": "hi"}
    return {**asks, "tools": [tool(path, name) for name in NAMES], "tool_choice": choice, **fields}


def constraint(site: Site) -> Any:
    """The form of the structural tag that the last request had; None without one."""
    tag = site.scheduler.received[-1].options.sampling.structural_tag
    return None if tag is None else json.loads(tag)["format"]


def named(form: Any) -> list[str]:
    """The functions that a form lets the model call."""
    return [name for name in NAMES if json.dumps(f'"name": "{name}"')[1:-1] in json.dumps(form)]


def calls(path: str, answer: Any) -> list[str]:
    if path == CHAT:
        return [call["function"]["name"] for call in answer["choices"][0]["message"].get("tool_calls", [])]
    return [item["name"] for item in answer["output"] if item["type"] == "function_call"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_functions_can_be_called(site: Site, path: str, mode: str) -> None:
    site.scheduler.say("".join(f'<tool_call>{{"name": "{name}"}}</tool_call>' for name in NAMES))
    answer = site.good(path, body(path, allowed(path, mode, "f", "h", "f")))
    form = constraint(site)
    assert named(form) == ["f", "h"]
    assert form["type"] == ("triggered_tags" if mode == "auto" else "tags_with_separator")
    assert calls(path, answer) == ["f", "h"], "even without the grammar, a call of another function is content"


@pytest.mark.parametrize("path", PATHS)
def test_the_prompt_has_all_tools(site: Site, path: str) -> None:
    """So all choices share the cached prefix, which is what OpenAI recommends this type for."""
    for choice in ("auto", allowed(path, "auto", "f"), allowed(path, "required", "g"), tool(path, "h")):
        site.good(path, body(path, choice))
    assert len(set(site.scheduler.prompt_texts())) == 1


@pytest.mark.parametrize("path", PATHS)
def test_all_tools_may_be_called_without_a_grammar(site: Site, path: str) -> None:
    site.good(path, body(path, allowed(path, "auto", *NAMES)))
    assert constraint(site) is None
    site.good(path, body(path, allowed(path, "required", *NAMES)))
    assert named(constraint(site)) == [*NAMES]


def test_a_format_without_a_grammar_is_only_read_so() -> None:
    site = Site(tool_call_parser="pythonic")
    site.scheduler.say("[f(), g()]")
    answer = site.good(CHAT, body(CHAT, allowed(CHAT, "auto", "g")))
    assert constraint(site) is None and calls(CHAT, answer) in ([], ["g"])
    site.good(CHAT, body(CHAT, allowed(CHAT, "required", "g")))
    assert named(constraint(site)) == ["g"]
    site.close()


def test_a_strict_function_that_is_not_allowed_needs_no_grammar(site: Site) -> None:
    tools = [tool(CHAT, "f", strict=True), tool(CHAT, "g")]
    site.good(CHAT, {**body(CHAT, allowed(CHAT, "auto", "g")), "tools": tools})
    assert named(constraint(site)) == ["g"]


def test_an_answer_repeats_the_choice(site: Site) -> None:
    for choice in ("none", allowed(RESPONSES, "auto", "f"), tool(RESPONSES, "g")):
        assert site.good(RESPONSES, body(RESPONSES, choice))["tool_choice"] == choice


@pytest.mark.parametrize("path", PATHS)
def test_a_choice_that_cannot_be_is_refused(site: Site, path: str) -> None:
    for choice, param, says in (
        (allowed(path, "auto"), "tool_choice", "names no function"),
        (allowed(path, "auto", "f", "x"), "tool_choice", "the function 'x'"),
        (allowed(path, "none", "f"), "mode", "none"),
        ({"type": "allowed_tools"}, "allowed_tools" if path == CHAT else "mode", "required with type allowed_tools"),
        ({"type": "function"}, "function" if path == CHAT else "name", "required with type function"),
        ({**tool(path, "f"), **allowed(path, "auto", "f")}, "function" if path == CHAT else "name", "not allowed"),
        ({"type": "custom"}, "type", "custom"),
    ):
        error = site.refused(path, body(path, choice))
        assert error["param"].startswith("tool_choice") and error["param"].endswith(param), error
        assert says in error["message"]
    assert site.scheduler.received == []

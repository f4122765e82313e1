"""Functions in namespaces, as Codex sends them to /v1/responses."""

from __future__ import annotations

from typing import Any

import pytest
from fake_http import Site

PATH = "/v1/responses"
TOOL: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
NAMED = [
    {"type": "function", "name": "f", "description": "Does F."},
    {"type": "function", "name": "g", "description": None},
]
SPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "n",
    "description": "Of N.",
    "tools": NAMED,
}


def test_functions_in_a_namespace(site: Site) -> None:
    site.scheduler.say(
        '<tool_call>{"name": "n__f", "arguments": {}}</tool_call>', '<tool_call>{"name": "f"}</tool_call>'
    )
    tools = [SPACE, TOOL]
    output = site.good(PATH, {"input": "hi", "tools": tools})["output"]
    assert [(one["name"], one.get("namespace")) for one in output] == [("f", "n"), ("f", None)]
    events = site.stream(PATH, {"input": "hi", "tools": tools})
    done = [event for event in events if event["type"].endswith("item.done")]
    assert [(one["item"]["name"], one["item"].get("namespace")) for one in done] == [("f", "n"), ("f", None)]
    assert [event["name"] for event in events if event["type"].endswith("arguments.done")] == ["f", "f"]
    prompt = site.scheduler.prompt_texts()[-1]
    assert '{"name": "n__f", "description": "Of N.\\n\\nDoes F."}' in prompt
    assert '{"name": "n__g", "description": "Of N."}' in prompt
    site.good(PATH, {"input": [{"role": "user", "content": "hi"}, *output]})
    prompt = site.scheduler.prompt_texts()[-1]
    assert (
        f"<tool_call>{output[0]['call_id']} n__f{{}}" in prompt and f"<tool_call>{output[1]['call_id']} f{{}}" in prompt
    )
    assert site.good(PATH, {"input": "hi", "tools": tools})["tools"] == [
        {**SPACE, "tools": [{**one, "parameters": None, "strict": None} for one in NAMED]},
        {**TOOL, "description": None, "strict": None},
    ]


@pytest.mark.parametrize(
    ("tools", "param", "says"),
    [
        ([{"type": "namespace", "name": "n"}], "tools[0].tools", "tools is required"),
        ([{**TOOL, "tools": []}], "tools[0].tools", "not allowed with type function"),
        ([{**SPACE, "strict": True}], "tools[0].strict", "not allowed with type namespace"),
        ([SPACE, {**TOOL, "name": "n__f"}], "tools[1]", "two functions"),
        ([TOOL, {**SPACE, "tools": [NAMED[0], {**NAMED[1], "name": "g h"}]}], "tools[1].tools[1]", "'n__g h'"),
        ([SPACE, {**SPACE, "name": "m"}, {**TOOL, "name": ""}], "tools[2]", "1 to 128 letters"),
    ],
)
def test_what_is_no_namespace_is_refused(site: Site, tools: Any, param: str, says: str) -> None:
    error = site.refused(PATH, {"input": "hi", "tools": tools})
    assert error["param"] == param and says in error["message"]

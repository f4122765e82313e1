"""Functions with `strict: true` that the model may call: each format has a grammar for them, or refuses them."""

from __future__ import annotations

import pytest
from fake_http import Site

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("parser", ["gpt-oss", "pythonic", "gemma", "qwen3_coder"])
def test_a_strict_function_that_no_grammar_can_enforce_is_refused(parser: str) -> None:
    site = Site(tool_call_parser=parser)
    bounded = {"type": "object", "properties": {"x": {"type": "string", "maxLength": 3}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bounded, "strict": True}}
    error = site.refused(PATH, {"messages": HI, "tools": [tool]})
    assert error["param"] == "tools" and "strict: true of the function 'f'" in error["message"]
    assert site.scheduler.received == []
    site.good(PATH, {"messages": HI, "tools": [tool], "tool_choice": "required"})
    tag = site.scheduler.received[-1].options.sampling.structural_tag or ""
    assert "</tool_call>" in tag and "<function=" not in tag, "the format of Hermes"
    site.good(PATH, {"messages": HI, "tools": [{**tool, "function": {**tool["function"], "strict": False}}]})
    assert site.scheduler.received[-1].options.sampling.structural_tag is None
    site.close()


def test_a_strict_call_is_read_in_the_format_that_the_prompt_teaches() -> None:
    site = Site(tool_call_parser="qwen3_coder")
    schema = {"properties": {"x": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    site.scheduler.say("<tool_call>\n<function=f>\n<parameter=x>\ny\n</parameter>\n</function>\n</tool_call>")
    for choice in ("auto", "required"):
        message = site.good(PATH, {"messages": HI, "tools": [tool], "tool_choice": choice})["choices"][0]["message"]
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": "y"}'}
        assert "<function=" in (site.scheduler.received[-1].options.sampling.structural_tag or "")
    site.close()


def test_harmony_has_no_strict_functions() -> None:
    """With its channels, text is not free, and Hermes has none."""
    site = Site(tool_call_parser="hermes", reasoning_parser="gpt-oss")
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    assert "hermes" in site.refused(PATH, {"messages": HI, "tools": [tool]})["message"]
    site.close()

"""The formats in which models write tool calls: names, readers, and the signs of a format in a chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from . import deepseek, gemma, harmony, hermes, llama3_json, mistral, pythonic, qwen3_coder
from .answer_text import AnswerText, Reading
from .tools import Functions


class CallGrammar(NamedTuple):
    """How a call is written, for a grammar. NAME stands for the function's name.

    opening, separator, closing: the text before, between and after all calls. trigger: the part of `begin` that shows
    that a call follows; "": all before NAME. The text before the trigger may be missing. style: of the arguments, as
    in structural tags. like_json: a call begins as other JSON may begin, so no grammar can tell them apart in time.
    """

    begin: str
    end: str
    opening: str = ""
    separator: str = "\n"
    closing: str = ""
    trigger: str = ""
    style: Literal["json", "qwen_xml"] = "json"
    like_json: bool = False


class ToolFormat(NamedTuple):
    """One format. `grammar` None: a call that is required is written in the Hermes format instead, and no function can
    be strict otherwise.

    signs: any of these texts in a chat template shows that its model writes this format. marks: special tokens of some
    tokenizers that the reader must see. ends: others that it reads. They are left out of the content.
    """

    read: Callable[[AnswerText, Functions], Reading[None]]
    signs: tuple[str, ...]
    marks: tuple[str, ...] = ()
    grammar: CallGrammar | None = None
    ends: tuple[str, ...] = ()


TOOL_FORMATS = {
    "gpt-oss": ToolFormat(
        harmony.read_harmony, ("<|channel|>",), (harmony.CHANNEL, harmony.MESSAGE), ends=(harmony.START, *harmony.ENDS)
    ),
    "mistral": ToolFormat(
        mistral.read_mistral,
        ("[TOOL_CALLS]",),
        (mistral.START,),
        CallGrammar('{"name": "NAME", "arguments": ', "}", opening="[TOOL_CALLS][", separator=", ", closing="]"),
        (mistral.CALL_ID, mistral.ARGS),
    ),
    "deepseek_v3": ToolFormat(
        deepseek.read_deepseek,
        (deepseek.START,),
        (deepseek.START, deepseek.CALL_START, deepseek.SEPARATOR),
        CallGrammar(
            f"{deepseek.CALL_START}NAME{deepseek.SEPARATOR}",
            deepseek.CALL_END,
            opening=deepseek.START,
            separator="",
            closing=deepseek.END,
        ),
        (deepseek.CALL_END, deepseek.END),
    ),
    "gemma": ToolFormat(
        gemma.read_gemma, gemma.STARTS, (*gemma.STARTS, *gemma.QUOTES), ends=tuple(gemma.ENDS.values())
    ),
    "qwen3_coder": ToolFormat(
        qwen3_coder.read_qwen3_coder,
        (qwen3_coder.PARAMETER,),
        (qwen3_coder.START,),
        CallGrammar(
            "<tool_call>\n<function=NAME>\n",
            "\n</function>\n</tool_call>",
            trigger=qwen3_coder.FUNCTION,
            style="qwen_xml",
        ),
        (qwen3_coder.END,),
    ),
    "pythonic": ToolFormat(pythonic.read_pythonic, (pythonic.START,), (pythonic.START,), ends=(pythonic.END,)),
    "llama3_json": ToolFormat(
        llama3_json.read_llama3_json,
        (llama3_json.START, '"parameters": dictionary of argument name'),
        (llama3_json.START,),
        CallGrammar('{"name": "NAME", "parameters": ', "}", separator="; ", like_json=True),
    ),
    "hermes": ToolFormat(
        hermes.read_hermes,
        (hermes.START,),
        (hermes.START, hermes.END),
        CallGrammar('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", trigger=hermes.START),
    ),
}
"""The formats by name, in the order in which their signs are looked for."""
_SIGNS_OF_OTHERS = ("<arg_key>", "<minimax:tool_call>", "<|tool_calls_section_begin|>", "<｜DSML｜")
"""Signs of formats that have no reader, some of which use the marks of a format that has one."""


def detect_tool_format(template: str) -> str | None:
    """The name of the format that a chat template shows, or None if it shows none that has a reader."""
    if any(sign in template for sign in _SIGNS_OF_OTHERS):
        return None
    return next((name for name, form in TOOL_FORMATS.items() if any(sign in template for sign in form.signs)), None)

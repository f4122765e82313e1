"""What a request asks for besides text: which functions the model may or must call, and how its answer is read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from ....managers.tokenizer_manager import TokenizerManager
from ...errors import InvalidRequest, UnsupportedField
from ...grammar_spec import ReasoningSpan
from ...sampling_params import SamplingParams
from ...text.answer.answer_parser import AnswerFormat
from ...text.answer.constraint import calls_or, format_under_grammar, may_call, may_stand_beside_calls, must_call
from ...text.answer.reasoning import HARMONY, REASONING_FORMATS
from ...text.answer.tool_formats import TOOL_FORMATS, detect_tool_format
from ...text.answer.tools import Functions
from ...text.tokenizer import Tokenizer
from ..wire import shown
from .chat_protocol import ChatBody
from .structured import grammar_field, grammar_of
from .tool_protocol import Function, ToolChoice

Mode = Literal["none", "auto", "required"]
MAX_NAME_CHARS = 128
_NAME = re.compile(r"[\w.\-]+", re.ASCII)


class AnswerPlan(NamedTuple):
    """How the answers of one request are made and read."""

    tools: list[Mapping[str, Any]] | None = None
    """For the chat template. None: the model must not call any."""
    form: AnswerFormat | None = None
    """None: an answer is content and nothing else."""
    in_one_piece: bool = False
    """Reasoning is streamed as one piece."""
    content_only: bool = False
    """Reasoning is content."""
    reasoning_ends: frozenset[int] = frozenset()
    """The tokens that end reasoning. Empty: no single token does, so the tokens of reasoning cannot be counted."""
    constraint: dict[str, Any] | None = None
    """The structural tag that the answer must match."""
    constrained_by: str = ""
    """The field that asks for the constraint."""
    strict: tuple[str, ...] = ()
    """The functions whose calls follow their schemas."""
    is_closed: bool = False
    """The constraint has no room for free text."""
    most_thoughts: int | None = None
    """The most tokens of reasoning. None: no limit."""
    before_grammar: ReasoningSpan | None = None
    """The reasoning before the text of the grammar, or with a limit. None: the grammar begins with the first token, or
    there is neither."""
    shown_tokens: tuple[int, ...] = ()
    """The special tokens that the reader must see."""


def plan_answer(
    manager: TokenizerManager,
    functions: Sequence[Function],
    choice: Mode | ToolChoice | None,
    *,
    parallel: bool | None = None,
    separate_reasoning: bool | None = None,
    stream_reasoning: bool | None = None,
    most_thoughts: int | None = None,
) -> AnswerPlan:
    """The plan of a request. Raises InvalidRequest and UnsupportedField.

    `most_thoughts`: see AnswerPlan. It needs `limits_reasoning`, and reasoning that is separated.
    """
    offered = _check_functions(functions)
    mode, names = _check_choice(choice, offered)
    reasoning = manager.server_args.reasoning_parser
    tools: list[Mapping[str, Any]] | None = None
    tool_format = None
    if offered and mode != "none":
        tools = [{"type": "function", "function": _plain(function)} for function in offered.values()]
        tool_format = _tool_format_of(manager)
    if reasoning is None and tool_format is None:
        return AnswerPlan()
    content_only = separate_reasoning is False
    form = AnswerFormat(
        reasoning=None if content_only and reasoning != HARMONY else reasoning,
        tools=tool_format,
        functions=Functions({name: offered[name].parameters for name in names} if tools else {}),
        most_calls=1 if parallel is False else None,
    )
    strict = tuple(name for name in names if offered[name].strict)
    plan = AnswerPlan(tools, form, stream_reasoning is False, content_only, strict=strict, most_thoughts=most_thoughts)
    if tool_format is None:
        return plan
    if mode == "auto":
        return _with_optional_calls(plan, excludes=len(names) < len(offered))
    # A small model that must call goes on calling, so several required calls have to be asked for.
    one_function = isinstance(choice, ToolChoice) and choice.function is not None
    return _with_required_calls(plan, names, several=parallel is True and not one_function)


def _with_optional_calls(plan: AnswerPlan, *, excludes: bool) -> AnswerPlan:
    """The plan of an answer that may have calls, with a constraint if they need one. Raises UnsupportedField.

    `excludes`: the request offers functions that must not be called.
    """
    form, strict = plan.form, plan.strict
    assert form is not None and form.tools is not None
    written = format_under_grammar(form.tools, form.functions, strict)
    if strict and (written != form.tools or form.reasoning == HARMONY):
        raise UnsupportedField(
            f"strict: true of the function {shown(strict[0])} is not supported, unless the call is required "
            f"(tool_choice): no grammar enforces its schema in the format of this model's calls ({form.tools}); send "
            "strict: false",
            param="tools",
        )
    # Without a grammar for the model's own calls, calls of functions that are not allowed are content.
    excludes = excludes and written == form.tools
    if not strict and not excludes:
        return plan
    constraint = may_call(written, form.functions, strict, several=form.most_calls is None)
    return _constrained_calls(plan, form, written, constraint)._replace(
        constrained_by="tool_choice" if excludes else "tools"
    )


def _with_required_calls(plan: AnswerPlan, names: Sequence[str], *, several: bool) -> AnswerPlan:
    """The plan of an answer that consists of calls of these functions."""
    form = plan.form
    assert form is not None and form.tools is not None
    written = format_under_grammar(form.tools, form.functions, names)
    constraint = must_call(written, form.functions, names, several=several)
    return _constrained_calls(plan, form, written, constraint)._replace(constrained_by="tool_choice", is_closed=True)


def _constrained_calls(plan: AnswerPlan, form: AnswerFormat, written: str, constraint: dict[str, Any]) -> AnswerPlan:
    """The plan with this constraint, under which the calls have the format `written`."""
    if HARMONY in (form.tools, form.reasoning):
        form = form._replace(reasoning=None)  # the Hermes format has no channels
    return plan._replace(form=form._replace(tools=written), constraint=constraint)


def limits_reasoning(manager: TokenizerManager) -> bool:
    """Whether reasoning can have a limit: the server separates it, and single tokens of the model end it."""
    form, tokenizer = REASONING_FORMATS.get(manager.server_args.reasoning_parser or ""), manager.inputs.tokenizer
    if form is None or tokenizer is None:
        return False
    ends = map(tokenizer.token_to_id, form.ends)
    return all(token is not None and token < manager.facts.vocab_size for token in ends)


def constrained(body: ChatBody, plan: AnswerPlan) -> tuple[ChatBody, AnswerPlan]:
    """The body with one constraint: that of the plan, its own, or a choice between calls and its own.

    Raises InvalidRequest if both exclude each other.
    """
    field = grammar_field(body)
    if field is None:
        if plan.constraint is not None:
            body = msgspec.structs.replace(body, structural_tag=plan.constraint)
        return body, plan
    if plan.tools is None:
        return body, plan
    ((kind, value),) = grammar_of(body).items()
    if kind == "structural_tag" and plan.constraint is None:
        return body, plan  # its tags may be the calls
    if plan.is_closed and field == "response_format" and kind != "structural_tag":
        # It is the format of text, and the answer has none.
        return msgspec.structs.replace(body, response_format=None, structural_tag=plan.constraint), plan
    if plan.is_closed or kind == "structural_tag":
        beside = "a required call" if plan.is_closed else "strict functions or allowed_tools"
        raise InvalidRequest(f"{field} is not possible beside {beside}: both constrain the answer", param=field)
    assert plan.form is not None and plan.form.tools is not None
    if kind == "ebnf" or not may_stand_beside_calls(plan.form.tools):
        raise InvalidRequest(
            f"{field} is not possible beside tools: no grammar can offer the choice between it and calls in "
            f"the format of this model ({plan.form.tools}); send tool_choice none or no tools",
            param=field,
        )
    other = {"type": "regex", "pattern": value} if kind == "regex" else _json_form(value, field)
    tag = calls_or(plan.form.tools, plan.form.functions, plan.strict, other, several=plan.form.most_calls is None)
    chosen = msgspec.structs.replace(body, **{field: None, "structural_tag": tag})
    return chosen, plan._replace(constraint=tag, constrained_by=field, is_closed=True)


def _json_form(schema: str | dict[str, Any], field: str) -> dict[str, Any]:
    """The part of a structural tag for a JSON schema. Raises InvalidRequest."""
    try:
        decoded = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} has a schema that is not JSON: {error}", param=field) from None
    return {"type": "json_schema", "json_schema": decoded}


def see_marks(plan: AnswerPlan, sampling: SamplingParams, tokenizer: Tokenizer | None) -> AnswerPlan:
    """Finds the marks of the formats among the tokens, and makes those visible that are special tokens."""
    form = plan.form
    if form is None or tokenizer is None:
        return plan
    ends = map(tokenizer.token_to_id, form.reasoning_ends())
    plan = plan._replace(reasoning_ends=frozenset(token for token in ends if token is not None))
    if sampling.grammar is not None or plan.most_thoughts is not None:
        form, span = _under_grammar(plan, form, sampling, tokenizer)
        span = span and msgspec.structs.replace(span, max_tokens=plan.most_thoughts)
        plan = plan._replace(form=form, before_grammar=span)
    marks = form.marks()
    if not sampling.skip_special_tokens or not marks & tokenizer.special_texts:
        return plan
    further = (form.ends() - marks) & tokenizer.special_texts
    shown = map(tokenizer.token_to_id, sorted(marks & tokenizer.special_texts | further))
    shown_tokens = tuple(token for token in shown if token is not None)
    return plan._replace(form=form._replace(dropped=tuple(sorted(further))), shown_tokens=shown_tokens)


def _under_grammar(
    plan: AnswerPlan, form: AnswerFormat, sampling: SamplingParams, tokenizer: Tokenizer
) -> tuple[AnswerFormat, ReasoningSpan | None]:
    """How an answer with a grammar is read, and the reasoning before the text of the grammar.

    The scheduler sees the end of the reasoning only if that is a token. Otherwise there is no reasoning, unless the
    grammar has room for it, as a structural tag has.
    """
    starts, ends = (
        tuple(map(tokenizer.token_to_id, marks)) for marks in (form.reasoning_starts(), form.reasoning_ends())
    )
    known = tuple(token for token in ends if token is not None)
    if known and len(known) == len(ends):
        return form, ReasoningSpan(tuple(token for token in starts if token is not None), known)
    has_room = sampling.structural_tag is not None and not plan.is_closed
    return (form if has_room else form._replace(reasoning=None)), None


def _tool_format_of(manager: TokenizerManager) -> str:
    """The name of the format in which the model writes calls."""
    named = manager.server_args.tool_call_parser
    tokenizer = manager.inputs.tokenizer
    if tokenizer is None:
        raise InvalidRequest("tools need a tokenizer, but this engine runs with --skip-tokenizer-init", param="tools")
    template = tokenizer.chat_template(has_tools=True)
    if named != "auto":
        if not template.knows_tools and named != "hermes":
            raise InvalidRequest(
                f"--tool-call-parser {named} needs a chat template with tools, and the template of this server has "
                "none; the operator can choose another template (--chat-template) or hermes",
                param="tools",
            )
        return named
    found = detect_tool_format(template.source) if template.knows_tools else "hermes"
    if found is None:
        raise UnsupportedField(
            "the format of this model's tool calls is not known; the operator can name one with --tool-call-parser: "
            + ", ".join(TOOL_FORMATS),
            param="tools",
        )
    return found


def _check_functions(functions: Sequence[Function]) -> dict[str, Function]:
    offered: dict[str, Function] = {}
    for i, function in enumerate(functions):
        name = function.name
        if not _NAME.fullmatch(name) or len(name) > MAX_NAME_CHARS:
            raise InvalidRequest(
                f"the name of a function must be 1 to {MAX_NAME_CHARS} letters, digits, '_', '-' and '.', got "
                f"{shown(name)}",
                param=f"tools[{i}]",
            )
        if name in offered:
            raise InvalidRequest(f"two functions have the name {shown(name)}", param=f"tools[{i}]")
        kind = (function.parameters or {}).get("type", "object")
        if "object" not in (kind if isinstance(kind, list) else [kind]):
            raise InvalidRequest(
                f"the parameters of the function {shown(name)} must have type object, got {shown(kind)}",
                param=f"tools[{i}]",
            )
        offered[name] = function
    return offered


def _check_choice(choice: Mode | ToolChoice | None, offered: Mapping[str, Function]) -> tuple[Mode, list[str]]:
    """Whether the model may or must call, and the functions that it may call.

    Raises InvalidRequest if it must call, or names, a function that is not offered.
    """
    if isinstance(choice, ToolChoice):
        return _check_named(choice, offered)
    if choice == "required" and not offered:
        raise InvalidRequest("tool_choice is required, but there are no tools", param="tool_choice")
    return choice or "auto", list(offered)


def _check_named(choice: ToolChoice, offered: Mapping[str, Function]) -> tuple[Mode, list[str]]:
    mode: Mode = "required"
    names = [] if choice.function is None else [choice.function.name]
    if choice.allowed_tools is not None:
        mode, names = choice.allowed_tools.mode, [tool.function.name for tool in choice.allowed_tools.tools]
    if not names:
        raise InvalidRequest(
            "allowed_tools names no function; send tool_choice none to allow no calls", param="tool_choice"
        )
    for name in names:
        if name not in offered:
            raise InvalidRequest(
                f"tool_choice names the function {shown(name)}, but tools has {shown(list(offered))}",
                param="tool_choice",
            )
    return mode, list(dict.fromkeys(names))


def _plain(function: Function) -> dict[str, Any]:
    """The function as the chat template gets it: only the fields that were given."""
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {name: value for name, value in fields.items() if value is not None}

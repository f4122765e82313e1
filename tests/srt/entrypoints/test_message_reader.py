"""`MessageReader`: deltas and the count of reasoning tokens, for any pieces of the text and of the token ids."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from tercet.srt.entrypoints.openai.chat_protocol import Delta
from tercet.srt.entrypoints.openai.message_reader import MessageReader
from tercet.srt.entrypoints.openai.tools import AnswerPlan
from tercet.srt.entrypoints.request_names import RequestNames
from tercet.srt.text.answer.answer_parser import AnswerFormat
from tercet.srt.text.answer.tools import Functions

END = 7
FUNCTIONS = Functions({"f": None})
PIECES = ("<think>", "I ", "</th", "ink>", "</think>", "Hi", "\n", '<tool_call>{"name": "f", "arguments": {"x": 1}}')
HARMONY = (
    "<|channel|>analysis<|message|>I think<|end|>",
    "<|start|>assistant<|channel|>final<|message|>Hi<|end|>",
    "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|end|>",
)


def reader_of(**fields: Any) -> MessageReader:
    return MessageReader(AnswerPlan(**fields), RequestNames(b"nonce"), inside_reasoning=False)


def cut(draw: Any, values: Any) -> list[Any]:
    """The values in consecutive pieces; some of them are empty."""
    places = sorted(draw(st.lists(st.integers(0, len(values)), max_size=4)))
    return [values[start:end] for start, end in zip([0, *places], [*places, len(values)], strict=True)]


def fields_in_order(deltas: list[Delta]) -> list[tuple[str, Any]]:
    """What the deltas say, with neighbouring texts of one field joined. No delta is empty."""
    found: list[tuple[str, Any]] = []
    for delta in deltas:
        assert (delta.content, delta.reasoning_content, delta.tool_calls).count(UNSET) == 2
        if isinstance(delta.tool_calls, list):
            (call,) = delta.tool_calls
            assert call.function is not UNSET
            new: tuple[str, Any] = ("arguments", call.function.arguments)
            if call.id is not UNSET:
                new = (f"call {call.index} {call.id} {call.function.name}", call.function.arguments)
        elif delta.content is not UNSET:
            new = ("content", delta.content)
            assert delta.content
        else:
            new = ("reasoning", delta.reasoning_content)
            assert delta.reasoning_content
        if found and found[-1][0] == new[0]:
            found[-1] = (new[0], found[-1][1] + new[1])
        else:
            found.append(new)
    return found


@given(st.data())
def test_the_count_of_reasoning_tokens_does_not_depend_on_the_pieces(data: st.DataObject) -> None:
    """A model can spell the end of its reasoning, and later write it as one token."""
    ends = data.draw(st.sampled_from([frozenset({END}), frozenset()]))
    plan = {"form": AnswerFormat(reasoning="qwen3"), "reasoning_ends": ends}
    said = data.draw(st.sampled_from([["<think>"], []])) + data.draw(st.lists(st.sampled_from(PIECES), max_size=8))
    ids = [END if piece == "</think>" else 0 for piece in said]
    whole = reader_of(**plan)
    whole.count(ids)
    whole.message("".join(said))
    streamed = reader_of(**plan)
    texts, tokens = cut(data.draw, "".join(said)), cut(data.draw, ids)
    for i in range(5):
        streamed.count(tokens[i] if i < len(tokens) else [])
        streamed.deltas(texts[i] if i < len(texts) else "", is_last=i == 4)
    assert streamed.num_reasoning_tokens == whole.num_reasoning_tokens
    if not ends or not "".join(said).lstrip().startswith("<think>"):
        assert whole.num_reasoning_tokens == 0
    elif END in ids:
        assert whole.num_reasoning_tokens == ids.index(END) + 1


def test_the_first_end_of_the_reasoning_counts() -> None:
    reader = reader_of(form=AnswerFormat(reasoning="qwen3"), reasoning_ends=frozenset({END}))
    reader.deltas("<think>", is_last=False)
    for ids in ([0], [END, END, 0], [0, END]):
        reader.count(ids)
    assert reader.num_reasoning_tokens == 2


@pytest.mark.parametrize(
    "form", [AnswerFormat("qwen3", "hermes", FUNCTIONS), AnswerFormat("gpt-oss", "gpt-oss", FUNCTIONS)]
)
@given(st.data())
def test_the_deltas_join_to_the_message(form: AnswerFormat, data: st.DataObject) -> None:
    """Reasoning in one piece, and reasoning as content, change neither the order nor the text."""
    pieces = HARMONY if form.reasoning == "gpt-oss" else PIECES
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=6)))
    plain = fields_in_order(reader_of(form=form).deltas(text, is_last=True))
    texts = cut(data.draw, text)
    for fields in ({}, {"in_one_piece": True}, {"content_only": True}):
        reader = reader_of(form=form, **fields)
        deltas = [delta for i, piece in enumerate(texts) for delta in reader.deltas(piece, is_last=i == len(texts) - 1)]
        told = fields_in_order(deltas)
        message = reader_of(form=form, **fields).message(text)
        assert (message.content or "") == "".join(said for kind, said in told if kind == "content")
        if "content_only" in fields:
            assert message.reasoning_content is UNSET and all(kind != "reasoning" for kind, _ in told)
            continue
        assert told == plain
        assert (message.reasoning_content or "") == "".join(said for kind, said in told if kind == "reasoning")
        if "in_one_piece" in fields:
            pieces_of_reasoning = [delta for delta in deltas if delta.reasoning_content is not UNSET]
            assert len(pieces_of_reasoning) == [kind for kind, _ in plain].count("reasoning")


@pytest.mark.parametrize(
    ("text", "content"), [("", ""), ("<think>I", ""), ("<think>I</think>Hi", "Hi"), (PIECES[-1] + "</tool_call>", None)]
)
def test_only_a_message_of_calls_has_no_content(text: str, content: str | None) -> None:
    form = AnswerFormat(reasoning="qwen3", tools="hermes", functions=FUNCTIONS)
    assert reader_of(form=form).message(text).content == content

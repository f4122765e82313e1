"""Workloads from files: what is read, what is left out, and what is refused with its line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bench_tokenizers import bytes_only, merging

from tercet.benchmarks.recorded_workloads import custom, first_questions, mooncake, sharegpt
from tercet.benchmarks.text_files import MOONCAKE_BLOCK
from tercet.benchmarks.workloads import PromptMaker

TEXTS = PromptMaker(bytes_only(), as_ids=False)
IDS = PromptMaker(bytes_only(), as_ids=True)


def talk(*texts: str, key: str = "value") -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": "human", key: text} for text in texts]}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def lines(*contents: Any) -> Path:
        path = tmp_path / "data.jsonl"
        path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in contents))
        return path

    return lines


def share(tmp_path: Path, entries: Sequence[Any]) -> Path:
    path = tmp_path / "share.json"
    path.write_text(json.dumps(entries))
    return path


def test_sharegpt_asks_first_questions_for_as_much_as_was_answered(tmp_path: Path) -> None:
    entries = [
        talk("hello", "abcdef", "more"),
        talk("alone"),
        talk("q", "too short a question"),
        talk("why", "because"),
    ]
    path = share(tmp_path, entries)
    requests = sharegpt(TEXTS, path, 10, None, None, seed=0)
    assert sorted((one.prompt, one.prompt_len, one.output_len) for one in requests) == [("hello", 5, 6), ("why", 3, 7)]
    assert {one.output_len for one in sharegpt(TEXTS, path, 10, 9, None, seed=0)} == {9}
    assert [one.prompt for one in sharegpt(TEXTS, path, 10, None, 10, seed=0)] == ["why"]
    assert len(sharegpt(TEXTS, path, 1, None, None, seed=0)) == 1
    assert {tuple(one.prompt) for one in sharegpt(IDS, path, 10, None, None, seed=0)} == {
        tuple(b"hello"),
        tuple(b"why"),
    }
    assert first_questions(path) == "hello\n\nq\n\nwhy"


@pytest.mark.parametrize("output_len", [1, 5])
def test_a_given_output_length_counts_instead_of_the_answers(tmp_path: Path, output_len: int) -> None:
    path = share(tmp_path, [talk("hello", "abcdef"), talk("why", "b"), talk("q", "a short question")])
    requests = sharegpt(TEXTS, path, 10, output_len, None, seed=0)
    assert sorted((one.prompt, one.output_len) for one in requests) == [("hello", output_len), ("why", output_len)]


def test_the_order_comes_from_the_seed(tmp_path: Path) -> None:
    path = share(tmp_path, [talk(f"question {i}", "answer") for i in range(30)])
    orders = [[one.prompt for one in sharegpt(TEXTS, path, 30, None, None, seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"a": 1}, "not a list"),
        (["x"], "entry 0: not an object"),
        ([{"conversations": 3}], "must be a list"),
        (
            [talk("a", "b"), {"conversations": [{"value": 1}, {}]}],
            "entry 1: a turn must have a text in content or value",
        ),
        ([talk("ab")], "no usable prompt"),
    ],
)
def test_what_is_not_sharegpt_is_refused(tmp_path: Path, entries: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sharegpt(TEXTS, share(tmp_path, entries), 3, None, None, 0)
    with pytest.raises(ValueError, match="cannot read"):
        sharegpt(TEXTS, tmp_path / "missing.json", 3, None, None, 0)


@pytest.mark.parametrize("text", ["[", "[" * 50_000, "[" + "1" * 5_000 + "]"])
def test_a_sharegpt_file_that_is_no_json_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "talks.json").write_text(text)
    with pytest.raises(ValueError, match=r"talks\.json is not JSON"):
        sharegpt(TEXTS, tmp_path / "talks.json", 3, None, None, 0)


def test_custom_takes_prompts_and_conversations(write: Any) -> None:
    path = write(
        {"prompt": "ab", "output_len": 1},
        {"prompt": "abc", "completion": "wxyz"},
        {"prompt": [7, 8, 9, 10], "output_len": 5},
        "",
        talk("abcde", "xyz", key="content"),
        json.dumps({"prompt": "line\u2028break", "output_len": 6}, ensure_ascii=False),
    )
    found = {str(one.prompt): (one.prompt_len, one.output_len) for one in custom(TEXTS, path, 9, None, None, 0)}
    assert found == {
        "ab": (2, 1),
        "abc": (3, 4),
        "[7, 8, 9, 10]": (4, 5),
        "abcde": (5, 3),
        "line\u2028break": (12, 6),
    }
    assert {one.output_len for one in custom(TEXTS, path, 9, 8, None, 0)} == {8}
    assert {str(one.prompt) for one in custom(TEXTS, path, 9, None, 8, 0)} == {"ab", "abc", "abcde"}


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2, column 1: Expecting property name"),
        ("[1]", "line 2: not an object"),
        ({"text": "a"}, "line 2: the line has neither a prompt"),
        ({"prompt": "", "output_len": 3}, "line 2: prompt must be"),
        ({"prompt": [1, -2], "output_len": 3}, "line 2: prompt must be"),
        ({"prompt": [1, True], "output_len": 3}, "line 2: prompt must be"),
        ({"prompt": "a", "output_len": 0}, "line 2: output_len must be"),
        ({"prompt": "a", "output_len": "many"}, "line 2: output_len must be"),
        ({"prompt": "a", "output_len": 3, "completion": 3}, "line 2: completion must be"),
        ({"prompt": "a"}, "line 2: the line has neither output_len nor completion"),
    ],
)
def test_what_custom_cannot_use_is_refused_with_its_line(write: Any, line: Any, message: str) -> None:
    path = write({"prompt": "ab", "output_len": 1}, line)
    with pytest.raises(ValueError, match=message):
        custom(TEXTS, path, 9, None, None, 0)


@pytest.mark.parametrize("maker", [IDS, PromptMaker(merging(), as_ids=False)])
def test_mooncake_shares_what_the_trace_shared(write: Any, maker: PromptMaker) -> None:
    size = MOONCAKE_BLOCK
    path = write(
        {"timestamp": 3000, "input_length": 2 * size, "output_length": 4, "hash_ids": [5, 6]},
        {"timestamp": 1000, "input_length": size + 100, "output_length": 3, "hash_ids": [5, 9]},
        {"timestamp": 2000, "input_length": size + 50, "output_length": 2, "hash_ids": [8, 9]},
        {"timestamp": 2500, "input_length": 70, "output_length": 1},
        {"timestamp": 2600, "input_length": 70, "output_length": 1},
        {"timestamp": 9999, "input_length": 70, "output_length": 1},
    )
    requests = mooncake(maker, path, 5, seed=0)
    assert [one.timestamp_s for one in requests] == [1.0, 2.0, 2.5, 2.6, 3.0]
    assert [one.output_len for one in requests] == [3, 2, 1, 1, 4]
    ids = [one.prompt if maker is IDS else maker.tokenizer.encode(one.prompt) for one in requests]
    assert [one.prompt_len for one in requests] == [len(one) for one in ids]
    for one, wanted in zip(requests, (size + 100, size + 50, 70, 70, 2 * size), strict=True):
        assert abs(one.prompt_len - wanted) <= (0 if maker is IDS else 4)  # blocks may merge where they meet
    assert ids[0][: size - 4] == ids[4][: size - 4]
    assert ids[0][:20] != ids[1][:20] and ids[2] != ids[3]
    assert requests == mooncake(maker, path, 5, seed=0) != mooncake(maker, path, 5, seed=1)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"timestamp": "now"}, "timestamp must be"),
        ({"timestamp": float("nan")}, "timestamp must be"),
        ({"timestamp": float("inf")}, "timestamp must be"),
        ({"timestamp": True}, "timestamp must be"),
        ({"input_length": 0}, "input_length must be"),
        ({"input_length": 10**12}, "input_length must be a number from 1"),
        ({"output_length": 1.5}, "output_length must be"),
        ({"hash_ids": [-1]}, "hash_ids must be"),
        ({"hash_ids": 3}, "hash_ids must be"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(write: Any, change: dict[str, Any], message: str) -> None:
    line = {"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1]}
    with pytest.raises(ValueError, match=f"line 2: {message}"):
        mooncake(IDS, write(line, {**line, **change}), 9, 0)


def test_a_trace_without_a_request_is_refused(write: Any) -> None:
    with pytest.raises(ValueError, match="has no request"):
        mooncake(IDS, write(""), 9, 0)

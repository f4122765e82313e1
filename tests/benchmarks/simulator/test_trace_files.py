"""Published traces, in the formats of their authors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from simulations import simulate

from tercet.benchmarks.simulator.trace_files import burstgpt, mooncake, tokens_of

MOONCAKE = [
    {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 30535, "input_length": 1030, "output_length": 26, "hash_ids": [46, 47, 57]},
    {"timestamp": 30535, "input_length": 700, "output_length": 3},
]
BURSTGPT_1 = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
50,GPT-4,12,0,12,API log
118,GPT-4,417,276,693,API log
"""
BURSTGPT_2 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5.5,a,2,ChatGPT,40,18,58,Conversation log
9.25,a,2,ChatGPT,90,30,120,Conversation log
10,b,2,ChatGPT,90,30,120,Conversation log
11,,2,ChatGPT,90,30,120,API log
12,,2,ChatGPT,90,30,120,API log
"""


def write(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_mooncake(tmp_path: Path) -> None:
    first, second, third = mooncake(write(tmp_path / "trace", MOONCAKE), 32_000, seed=0)
    assert [one.arrival_s for one in (first, second, third)] == pytest.approx([0, 3.053, 3.053])
    assert [len(one.prompt_ids) for one in (first, second, third)] == [1100, 1030, 700]
    assert [one.num_output_tokens for one in (first, second, third)] == [52, 26, 3]
    assert (first.prompt_ids[:1024] == second.prompt_ids[:1024]).all()
    assert (first.prompt_ids[1024:1030] != second.prompt_ids[1024:]).any()
    assert first.prompt_ids.dtype == np.int32 and first.prompt_ids.min() >= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timestamp": "1"}, "line 2: timestamp must be a number"),
        ({"timestamp": float("nan")}, "line 2: timestamp must be a number"),
        ({"timestamp": 10**400}, "line 2: timestamp must be a number"),
        ({"input_length": 0}, "line 2: input_length must be a number from 1"),
        ({"input_length": 10**12}, "line 2: input_length must be a number from 1"),
        ({"hash_ids": ["a"]}, "line 2: hash_ids"),
    ],
)
def test_a_wrong_line_of_mooncake_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write(tmp_path / "trace", [MOONCAKE[0], {**MOONCAKE[1], **change}])
    with pytest.raises(ValueError, match=message):
        list(mooncake(path, 32_000, seed=0))


def test_a_trace_that_goes_back_in_time_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", MOONCAKE[::-1])
    with pytest.raises(ValueError, match="must not decrease"):
        simulate(mooncake(path, 32_000, seed=0), context_length=2048)


def test_burstgpt(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(BURSTGPT_1, encoding="utf-8")
    found = list(burstgpt(path, 32_000, seed=0))
    assert [(one.arrival_s, len(one.prompt_ids), one.num_output_tokens) for one in found] == [
        (0, 472, 18), (40, 1087, 230), (113, 417, 276),
    ]  # fmt: skip
    assert len(list(burstgpt(path, 32_000, seed=0, num_requests=2))) == 2
    assert found[0].prompt_ids[0] != found[1].prompt_ids[0]


def test_burstgpt_with_sessions(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(BURSTGPT_2, encoding="utf-8")
    first, second, other, alone, last = (one.prompt_ids for one in burstgpt(path, 32_000, seed=0))
    assert (second[:40] == first).all()
    heads = [tuple(ids[:8].tolist()) for ids in (second, other, alone, last)]
    assert len(set(heads)) == 4, "only a session shares its tokens"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no column"),
        (BURSTGPT_1 + "x,m,1,1,1,l\n", "line 6"),
        (BURSTGPT_1 + "inf,m,1,1,1,l\n", "line 6: the time must be finite"),
        (BURSTGPT_1 + f"200,m,{10**15},1,1,l\n", "line 6: .* the numbers at most"),
        (BURSTGPT_1 + f"200,m,{'9' * 200_000},1,1,l\n", "cannot read .*trace.csv: field larger than"),
    ],
)
def test_another_csv_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        list(burstgpt(path, 32_000, seed=0))


def test_the_tokens_of_a_key_do_not_depend_on_their_number() -> None:
    assert (tokens_of(7, 600, 1000, seed=1)[:512] == tokens_of(7, 512, 1000, seed=1)).all()
    assert (tokens_of(7, 64, 1000, seed=1) != tokens_of(8, 64, 1000, seed=1)).any()
    assert (tokens_of(7, 64, 1000, seed=1) != tokens_of(7, 64, 1000, seed=2)).any()
    starts = {tokens_of(key, 8, 1000, seed=0).tobytes() for key in range(3000)}
    assert len(starts) == 3000


def test_equal_blocks_beyond_the_prompt_take_no_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", [{**MOONCAKE[0], "input_length": 5, "hash_ids": [1] * 100_000}])
    (found,) = mooncake(path, 32_000, seed=0)
    assert found.prompt_ids.tolist() == tokens_of(1, 5, 32_000, seed=0).tolist()


@pytest.mark.parametrize("read", [mooncake, burstgpt])
def test_a_file_that_is_no_text_is_named(tmp_path: Path, read: Callable[[Path, int, int], Iterator[object]]) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xb0\n")
    with pytest.raises(ValueError, match=r"cannot read .*/trace: 'utf-8' codec"):
        list(read(path, 32_000, 0))
    with pytest.raises(ValueError, match=r"cannot read .*/missing: .*No such file"):
        list(read(tmp_path / "missing", 32_000, 0))

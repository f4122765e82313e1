"""What is asked, from a file: ShareGPT's conversations, prompts of one's own, Mooncake's traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .workloads import Prompt, PromptMaker, Request, Stream, random_stream

MOONCAKE_BLOCK = 512
"""Tokens that one of a trace's hash ids stands for (Mooncake: a KVCache-centric disaggregated architecture, 2024)."""
_SHORTEST = 2


def sharegpt(
    maker: PromptMaker, path: Path, num_prompts: int, output_len: int | None, context_len: int | None, seed: int
) -> list[Request]:
    """Dataset `sharegpt`: the first question of conversations, in random order, asked for as many tokens as the answer
    has, or for `output_len`. Those of under 2 tokens, or over `context_len` in all, are left out.

    Raises ValueError for a file of another form, or one with no such conversation.
    """
    turns = [_two_turns(one, f"{path}, entry {i}") for i, one in enumerate(_read_json(path))]
    return _sample(maker, [one for one in turns if one], path, num_prompts, output_len, context_len, seed)


def custom(
    maker: PromptMaker, path: Path, num_prompts: int, output_len: int | None, context_len: int | None, seed: int
) -> list[Request]:
    """Dataset `custom`: one JSON object a line, in random order: `prompt` (text or token ids) with `output_len` or
    with a `completion` to be as long as, or `conversations` as ShareGPT has them. `output_len` overrides.

    Raises ValueError, with the line's number, for a line of another form.
    """
    lines: list[tuple[Prompt, str | int | None]] = []
    for where, line in _read_lines(path):
        if "prompt" not in line:
            turns = _two_turns(line, where)
            if turns is None:
                raise ValueError(f"{where}: the line has neither a prompt nor conversations with two turns")
            lines.append(turns)
            continue
        prompt = line["prompt"]
        is_ids = isinstance(prompt, list) and all(type(one) is int and one >= 0 for one in prompt)
        if not (isinstance(prompt, str) or is_ids) or not prompt:
            raise ValueError(f"{where}: prompt must be a text or a list of token ids")
        completion = line.get("completion")
        if not (completion is None or isinstance(completion, str)):
            raise ValueError(f"{where}: completion must be a text")
        answer = _natural(line, "output_len", where) if "output_len" in line else completion
        if answer is None and output_len is None:
            raise ValueError(f"{where}: the line has neither output_len nor completion; give --sharegpt-output-len")
        lines.append((prompt, answer))
    return _sample(maker, lines, path, num_prompts, output_len, context_len, seed)


def mooncake(maker: PromptMaker, path: Path, num_prompts: int, seed: int) -> list[Request]:
    """Dataset `mooncake`: one JSON object a line with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`,
    one for every 512 tokens of the prompt. The same hash id is the same text, so prefixes are shared as in the trace;
    without hash ids nothing is. In the order of the timestamps.

    Raises ValueError, with the line's number, for a line of another form.
    """
    block = _blocks(maker, seed)
    rows: list[tuple[float, Request]] = []
    for number, (where, line) in enumerate(_read_lines(path)):
        if number == num_prompts:
            break
        input_len, output_len = (_natural(line, name, where) for name in ("input_length", "output_length"))
        timestamp = line.get("timestamp")
        if not isinstance(timestamp, int | float):
            raise ValueError(f"{where}: timestamp must be a number of milliseconds")
        hash_ids = line.get("hash_ids", [])
        if not isinstance(hash_ids, list) or not all(type(one) is int and one >= 0 for one in hash_ids):
            raise ValueError(f"{where}: hash_ids must be a list of numbers")
        ids = [token for one in hash_ids for token in block(one)][:input_len]
        ids += maker.random_ids(input_len - len(ids), random_stream(seed, Stream.CONTENT, number))
        seconds = timestamp / 1000.0
        rows.append((seconds, _of_ids(maker, ids, output_len, seconds)))
    return [request for _, request in sorted(rows, key=lambda row: row[0])]


def first_questions(path: Path) -> str:
    """The first question of every conversation of a ShareGPT file, as one text."""
    turns = (_two_turns(one, f"{path}, entry {i}") for i, one in enumerate(_read_json(path)))
    return "\n\n".join(one[0] for one in turns if one)


def _blocks(maker: PromptMaker, seed: int) -> Callable[[int], Sequence[int]]:
    known: dict[int, Sequence[int]] = {}

    def block(hash_id: int) -> Sequence[int]:
        if hash_id not in known:
            size = MOONCAKE_BLOCK + (0 if maker.as_ids else maker.num_added)
            prompt, _ = maker.random_prompt(size, random_stream(seed, Stream.BLOCKS, hash_id))
            if isinstance(prompt, str):
                prompt = maker.tokenizer.encode(prompt, add_special_tokens=False)
            known[hash_id] = prompt
        return known[hash_id]

    return block


def _of_ids(maker: PromptMaker, ids: list[int], output_len: int, timestamp_s: float) -> Request:
    if maker.as_ids:
        return Request(ids, len(ids), output_len, timestamp_s)
    text = maker.tokenizer.decode(ids)
    return Request(text, len(maker.tokenizer.encode(text)), output_len, timestamp_s)


def _sample(
    maker: PromptMaker,
    rows: Sequence[tuple[Prompt, str | int | None]],
    path: Path,
    num_prompts: int,
    output_len: int | None,
    context_len: int | None,
    seed: int,
) -> list[Request]:
    requests: list[Request] = []
    for i in random_stream(seed, Stream.ORDER).permutation(len(rows)):
        if len(requests) == num_prompts:
            break
        given, answer = rows[i]
        prompt, length = maker.whole(given) if isinstance(given, str) else (given, len(given))
        if output_len is not None:
            wanted = output_len
        elif isinstance(answer, str):
            wanted = len(maker.tokenizer.encode(answer, add_special_tokens=False))
        else:
            assert answer is not None
            wanted = answer
        # What a file says in so many words is taken; a recorded answer may be empty.
        too_short = isinstance(answer, str) and min(length, wanted) < _SHORTEST
        if not too_short and (context_len is None or length + wanted <= context_len):
            requests.append(Request(prompt, length, wanted))
    if not requests:
        raise ValueError(f"{path} has no usable prompt")
    return requests


def _two_turns(entry: Any, where: str) -> tuple[str, str] | None:
    """Question and answer of a conversation; None where it has fewer turns."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: not an object")
    turns = entry.get("conversations", entry.get("conversation", []))
    if not isinstance(turns, list):
        raise ValueError(f"{where}: conversations must be a list")
    if len(turns) < 2:
        return None
    texts = []
    for turn in turns[:2]:
        text = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"{where}: a turn must have a text in content or value")
        texts.append(text)
    return texts[0], texts[1]


def _natural(line: dict[str, Any], name: str, where: str) -> int:
    value = line.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"{where}: {name} must be a number of at least 1, got {value!r}")
    return value


def _read_json(path: Path) -> list[Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(content, list):
        raise ValueError(f"{path}: not a list of conversations")
    return content


def _read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            content = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{where}: not an object")
        yield where, content

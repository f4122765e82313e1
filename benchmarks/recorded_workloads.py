"""Workloads from files: ShareGPT conversations, custom prompts, Mooncake traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .text_files import MOONCAKE_BLOCK, json_objects, mooncake_lines, read_text
from .workloads import Prompt, PromptMaker, Request, Stream, random_stream

_SHORTEST = 2


def sharegpt(
    maker: PromptMaker, path: Path, num_prompts: int, output_len: int | None, context_len: int | None, seed: int
) -> list[Request]:
    """Dataset `sharegpt`: the first questions of conversations, in random order.

    The output length is that of the recorded answer, or `output_len`. Conversations with fewer than 2 tokens in the
    prompt or in an answer whose length counts, or with more than `context_len` tokens in both, are left out.

    Raises ValueError for a file of another format, or if no conversation is left.
    """
    turns = [_two_turns(entry, f"{path}, entry {i}") for i, entry in enumerate(_read_json(path))]
    return _sample(maker, [turn for turn in turns if turn], path, num_prompts, output_len, context_len, seed)


def custom(
    maker: PromptMaker, path: Path, num_prompts: int, output_len: int | None, context_len: int | None, seed: int
) -> list[Request]:
    """Dataset `custom`: prompts from a file with one JSON object in each line, in random order.

    An object has `prompt` (text or token ids) and either `output_len` or `completion`, whose length is then the output
    length. Or it has `conversations`, as in ShareGPT. The argument `output_len` overrides the output lengths.

    Raises ValueError, with the line's number, for a line of another format.
    """
    lines: list[tuple[Prompt, str | int | None]] = []
    for where, line in json_objects(path):
        if "prompt" not in line:
            turns = _two_turns(line, where)
            if turns is None:
                raise ValueError(f"{where}: the line has neither a prompt nor conversations with two turns")
            lines.append(turns)
            continue
        prompt = line["prompt"]
        is_ids = isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)
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
    """Dataset `mooncake`: the requests of a trace, in the order of their timestamps.

    Equal hash ids become equal tokens, so requests share prefixes as in the trace. Without hash ids, they share none.

    Raises ValueError as `mooncake_lines`, and for a file without a line.
    """
    block = _blocks(maker, seed)
    requests = []
    for number, (at_s, input_len, output_len, hash_ids) in enumerate(mooncake_lines(path, num_prompts)):
        ids = [token for hash_id in hash_ids for token in block(hash_id)][:input_len]
        ids += maker.random_ids(input_len - len(ids), random_stream(seed, Stream.CONTENT, number))
        requests.append(_of_ids(maker, ids, output_len, at_s))
    if not requests:
        raise ValueError(f"{path} has no request")
    return sorted(requests, key=lambda request: request.timestamp_s or 0.0)


def first_questions(path: Path) -> str:
    """The first questions of all conversations of a ShareGPT file, joined into one text."""
    turns = (_two_turns(entry, f"{path}, entry {i}") for i, entry in enumerate(_read_json(path)))
    return "\n\n".join(turn[0] for turn in turns if turn)


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
        prompt, length = maker.exact(given) if isinstance(given, str) else (given, len(given))
        if output_len is not None:
            wanted = output_len
        elif isinstance(answer, str):
            wanted = len(maker.tokenizer.encode(answer, add_special_tokens=False))
        else:
            assert answer is not None
            wanted = answer
        # An explicit output length is always accepted. A recorded answer may be too short to measure.
        shortest = length if output_len is not None else min(length, wanted)
        too_short = isinstance(answer, str) and shortest < _SHORTEST
        if not too_short and (context_len is None or length + wanted <= context_len):
            requests.append(Request(prompt, length, wanted))
    if not requests:
        raise ValueError(f"{path} has no usable prompt")
    return requests


def _two_turns(entry: Any, where: str) -> tuple[str, str] | None:
    """The first question and answer of a conversation; None if it has fewer than two turns."""
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
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, list):
        raise ValueError(f"{path}: not a list of conversations")
    return content

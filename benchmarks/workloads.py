"""Synthetic workloads: prompts from a seed. The same seed and tokenizer give the same requests on every machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ..srt.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | list[int]
"""A text, or token ids."""

BUNDLED_TEXT = Path(__file__).with_name("data") / "pride_and_prejudice.txt"
_ROUNDS = 32


class Stream(IntEnum):
    """Independent streams of random numbers from one seed, so that the draws of one do not shift those of another."""

    LENGTHS = 0
    CONTENT = 1
    ORDER = 2
    ARRIVALS = 3
    WARMUP = 4
    BLOCKS = 5


def random_stream(seed: int, stream: Stream, *more: int) -> np.random.Generator:
    return np.random.default_rng([seed, stream, *more])


@dataclass(frozen=True)
class Request:
    prompt: Prompt
    prompt_len: int
    """Tokens of the prompt, with the special tokens that the tokenizer adds to a text. A chat template adds more."""
    output_len: int
    timestamp_s: float | None = None
    """Arrival time in the trace; None without a trace."""


class PromptMaker:
    """Makes prompts of given lengths, as text or as token ids."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self.tokenizer = tokenizer
        self.as_ids = as_ids

    @cached_property
    def plain_ids(self) -> np.ndarray:
        """The ids of all tokens that decode to a text which encodes to the same token, int32 [n]. No special tokens.

        Other ids change when they are decoded and encoded again: parts of characters become replacement characters, and
        some texts have two encodings. Raises ValueError if there is no such token.
        """
        ids = [i for i in range(self.tokenizer.vocab_size) if i not in self.tokenizer.special_ids]
        texts = self.tokenizer.backend.decode_batch([[i] for i in ids])
        again = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        plain = [i for i, encoded in zip(ids, again, strict=True) if encoded == [i]]
        if not plain:
            raise ValueError(
                "random prompts need tokens whose text encodes to the same token, and this tokenizer has none"
            )
        return np.array(plain, dtype=np.int32)

    @cached_property
    def num_added(self) -> int:
        """Number of special tokens that the tokenizer adds to every text."""
        return len(self.tokenizer.encode(""))

    def random_ids(self, count: int, rng: np.random.Generator) -> list[int]:
        return rng.choice(self.plain_ids, size=count).tolist()

    def random_prompt(self, count: int, rng: np.random.Generator) -> tuple[Prompt, int]:
        """A random prompt of `count` tokens, and its actual length; see `fit`."""
        return self.fit(count, lambda more: self.random_ids(more, rng))

    def fit(self, count: int, draw: Callable[[int], list[int]]) -> tuple[Prompt, int]:
        """A prompt of `count` tokens (at least 1) from the ids that `draw(n)` gives, and its actual length.

        Neighbouring tokens of a text may merge or split when the text is encoded again. So the text is cut and extended
        until its length is right. If that never succeeds, the closest text is returned.
        """
        if self.as_ids:
            return draw(count), count
        wanted = max(1, count - self.num_added)
        text, length = "", None
        ids = draw(wanted)
        for _ in range(_ROUNDS):
            candidate = self.tokenizer.decode(ids)
            ids = self.tokenizer.encode(candidate, add_special_tokens=False)
            if length is None or abs(len(ids) - wanted) < abs(length - wanted):
                text, length = candidate, len(ids)
            if length == wanted:
                break
            ids = ids[:wanted] + (draw(wanted - len(ids)) if len(ids) < wanted else [])
        assert length is not None
        return text, length + self.num_added

    def exact(self, text: str) -> tuple[Prompt, int]:
        """The given text as a prompt, and its length."""
        ids = self.tokenizer.encode(text)
        return (ids if self.as_ids else text), len(ids)


def lengths(full: int, range_ratio: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random lengths, int64 [count], uniform in [max(1, full * range_ratio), full]. Raises ValueError."""
    if full < 1:
        raise ValueError(f"a length must be at least 1, got {full}")
    if not 0 <= range_ratio <= 1:
        raise ValueError(f"the range ratio must be in [0, 1], got {range_ratio}")
    return rng.integers(max(1, int(full * range_ratio)), full, size=count, endpoint=True)


def random_ids(
    maker: PromptMaker, num_prompts: int, input_len: int, output_len: int, range_ratio: float, seed: int
) -> list[Request]:
    """Dataset `random-ids`: random tokens."""
    sizes = _both_lengths(num_prompts, input_len, output_len, range_ratio, seed)
    rng = random_stream(seed, Stream.CONTENT)
    return [Request(*maker.random_prompt(n_in, rng), n_out) for n_in, n_out in sizes]


def random_text(
    maker: PromptMaker, num_prompts: int, input_len: int, output_len: int, range_ratio: float, seed: int, text: str
) -> list[Request]:
    """Dataset `random`: pieces of a text, each from a different position. At the end, the text starts again.

    Positions repeat only when all have been used, so that no prompt is a prefix of another.
    """
    ids = maker.tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise ValueError("the text for prompts is empty")
    sizes = _both_lengths(num_prompts, input_len, output_len, range_ratio, seed)
    rng = random_stream(seed, Stream.CONTENT)
    places = np.concatenate([rng.permutation(len(ids)) for _ in range(-(-num_prompts // len(ids)))])
    return [
        Request(*maker.fit(n_in, _Reader(ids, int(place)).read), n_out)
        for (n_in, n_out), place in zip(sizes, places, strict=False)
    ]


def shared_prefix(
    maker: PromptMaker,
    *,
    num_groups: int,
    prompts_per_group: int,
    system_prompt_len: int,
    question_len: int,
    output_len: int,
    ordered: bool,
    seed: int,
) -> list[Request]:
    """Dataset `generated-shared-prefix`: groups of prompts with a shared prefix. Shuffled unless `ordered`."""
    for name, value in (("groups", num_groups), ("prompts per group", prompts_per_group)):
        if value < 1:
            raise ValueError(f"the number of {name} must be at least 1, got {value}")
    rng = random_stream(seed, Stream.CONTENT)
    requests = []
    for _ in range(num_groups):
        system, _ = maker.random_prompt(system_prompt_len, rng)
        for _ in range(prompts_per_group):
            question, _ = maker.random_prompt(question_len, rng)
            if isinstance(system, str):
                assert isinstance(question, str)
                text = f"{system}\n\n{question}"
                requests.append(Request(text, len(maker.tokenizer.encode(text)), output_len))
            else:
                assert not isinstance(question, str)
                ids = system + question
                requests.append(Request(ids, len(ids), output_len))
    if not ordered:
        order = random_stream(seed, Stream.ORDER).permutation(len(requests))
        requests = [requests[i] for i in order]
    return requests


def warmups(maker: PromptMaker, like: Sequence[Request], count: int, seed: int) -> list[Request]:
    """Warm-up requests with the lengths of the first requests, but other prompts, so that no measured prompt is
    cached."""
    rng = random_stream(seed, Stream.WARMUP)
    return [
        Request(*maker.random_prompt(request.prompt_len, rng), min(request.output_len, 32))
        for request in (like[i % len(like)] for i in range(count))
    ]


def _both_lengths(count: int, input_len: int, output_len: int, range_ratio: float, seed: int) -> list[tuple[int, int]]:
    rng = random_stream(seed, Stream.LENGTHS)
    inputs = lengths(input_len, range_ratio, count, rng)
    outputs = lengths(output_len, range_ratio, count, rng)
    return list(zip(inputs.tolist(), outputs.tolist(), strict=True))


class _Reader:
    """Reads the token ids of a text in order. After the end it continues at the start."""

    def __init__(self, ids: list[int], place: int) -> None:
        self._ids = ids
        self._place = place

    def read(self, count: int) -> list[int]:
        size = len(self._ids)
        taken = [self._ids[(self._place + i) % size] for i in range(count)]
        self._place += count
        return taken

"""What a request must get beside its tokens, whatever schedule it had: log probabilities and hidden states.

A step computes each of them once, with the weights of that time. So those of a prompt may be of any weights that were
in use during the life of the request, and those of an output token are of the weights that have computed it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from random_steps.answers import Answer

from fakes import WEIGHTS_STEP, score
from tercet.srt.logprobs import LogprobOptions, Logprobs, NewLogprobs


def wish_of(wish: tuple[int, int], num_prompt_tokens: int) -> LogprobOptions:
    """`wish`: as `cases` draws it."""
    start, num_top = wish
    return LogprobOptions(logprob_start_len=min(start, num_prompt_tokens), top_logprobs_num=num_top)


def check_logprobs(
    heard: Sequence[NewLogprobs], ids: Sequence[int], wish: LogprobOptions, answer: Answer, vocab_size: int, whole: bool
) -> int:
    """Raises AssertionError if they are wrong. `ids`: prompt and output. `whole`: the request was not aborted.

    Returns how many of the prompt there are.
    """
    num_prompt = len(ids) - sum(len(one.output) for one in heard)
    inputs = [one.input for one in heard if one.input is not None]
    assert len(inputs) <= 1, "those of the prompt came twice"
    found = _each(inputs[0]) if inputs else []
    places = range(wish.input_start(num_prompt) + 1, num_prompt)
    assert len(found) == len(places) if whole else len(found) <= len(places)
    for at, one in zip(places, found, strict=False):
        assert any(one == _score(ids, at, wish, weights, vocab_size) for weights in answer.all_weights), "of the prompt"
    outputs = [one for new in heard for one in _each(new.output)]
    for position, one in enumerate(outputs):
        expected = _score(ids, num_prompt + position, wish, answer.weights_of(position), vocab_size)
        assert one == expected, f"of output token {position}"
    return len(found)


def check_hidden(states: bytes, ids: Sequence[int], num_prompt: int, answer: Answer, *, whole: bool) -> int:
    """Raises AssertionError if they are wrong. `ids`: prompt and output. Returns how many there are."""
    found = np.frombuffer(states, np.float32).reshape(-1, 3)
    num_expected = max(len(ids) - 1, num_prompt)  # the last output token is the input of no step
    assert len(found) == num_expected if whole else len(found) <= num_expected
    for position, (token, at, one) in enumerate(found.tolist()):
        versions = {ids[position] + weights * WEIGHTS_STEP for weights in answer.all_weights}
        assert token in versions and (at, one) == (position, 1), f"the hidden state of position {position}"
    return len(found)


def _score(ids: Sequence[int], at: int, wish: LogprobOptions, weights: int, vocab_size: int) -> Logprobs:
    return score([token + weights * WEIGHTS_STEP for token in ids[:at]], ids[at], wish, vocab_size)


def _each(logprobs: Logprobs) -> list[Logprobs]:
    """One for each token."""
    num = len(logprobs)
    parts = [getattr(logprobs, name) for name in logprobs.__struct_fields__]
    cut = [[part[len(part) * index // num : len(part) * (index + 1) // num] for part in parts] for index in range(num)]
    return [Logprobs(*part) for part in cut]

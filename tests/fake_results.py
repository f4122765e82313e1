"""What the fake scheduler returns besides tokens."""

from __future__ import annotations

import numpy as np

from tercet.srt.io_struct import GenerateReq, pack_ids, unpack_ids
from tercet.srt.logprobs import Logprobs, NewLogprobs


def fake_embedding(request: GenerateReq) -> bytes:
    """The last token, 2, 3 ... for `last`, else the mean of all tokens, 2, 3 ..., of the hidden size 8."""
    ids = unpack_ids(request.input_ids)
    first = ids[-1] if request.options.pooling == "last" else ids.mean()
    return np.array([first, *range(2, 9)], np.float32).tobytes()


def fake_logprobs(request: GenerateReq, done: int, ids: list[int]) -> NewLogprobs:
    """A token has the log probability -id / 4, and the most probable tokens are 0, 1, 2 ... at every position."""
    options = request.options.logprobs
    assert options is not None

    def of(tokens: list[int]) -> Logprobs:
        def scores(ids: list[int]) -> bytes:
            return np.array([-token / 4 for token in ids], np.float32).tobytes()

        top = list(range(options.top_logprobs_num)) * len(tokens)
        return Logprobs(scores(tokens), scores(top), pack_ids(top), scores(options.token_ids_logprob * len(tokens)))

    prompt = unpack_ids(request.input_ids).tolist()
    listed = prompt[options.input_start(len(prompt)) :]
    return NewLogprobs(of(listed[1:]) if done == 0 else None, of(ids))


def fake_hidden(request: GenerateReq, done: int, upto: int) -> bytes | None:
    """The hidden states since the last output, if they are wanted. Each number in that of position i is i."""
    if not request.options.return_hidden_states:
        return None
    num_prompt = len(request.input_ids) // 4
    first = num_prompt + done - 1 if done else 0
    places = np.arange(first, num_prompt + max(upto - 1, 0), dtype=np.float32)
    return np.repeat(places, 8).tobytes()

"""Proposers of drafts for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fakes import choose, expected_output, next_token
from tercet.managers.req import Req
from tercet.model_executor.step import num_mask_words


class EachProposer:
    """Calls a function with each request and its limit, if it may have drafts."""

    def __init__(self, propose: Callable[[Req, int], Sequence[int]]) -> None:
        self._propose = propose

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[Sequence[int]]:
        return [self._propose(req, limit) if limit > 0 else [] for req, limit in zip(reqs, limits, strict=True)]

    def observe(self, num_reqs: int, num_tokens: int, seconds: float) -> None:
        assert num_tokens >= num_reqs > 0 and seconds >= 0


class FakeProposer(EachProposer):
    """Proposes up to `max_drafts` tokens, some of them wrong. It knows the fake model, and so every token in flight."""

    def __init__(self, max_drafts: int, vocab_size: int) -> None:
        super().__init__(self._guess)
        self.max_drafts = max_drafts
        self.vocab_size = vocab_size
        self.weights = 0
        """Those of the runner."""

    @staticmethod
    def _adapter_of(req: Req) -> int:
        """The number of its adapter; 0: none."""
        return 0 if req.options.adapter is None else int(req.options.adapter.fingerprint, 16)

    def _guess(self, req: Req, limit: int) -> list[int]:
        known = req.token_ids().tolist()
        num_in_flight = max(req.kv_len + 1 - len(known), 0)
        seed = req.sampling.sampling_seed
        num_right = num_in_flight + min(self.max_drafts, limit)
        if req.grammar is None:
            adapter = self._adapter_of(req)
            right = expected_output(known, seed, num_right, self.vocab_size, weights=self.weights, adapter=adapter)
        else:
            right = self._constrained(req, known, num_right)
        drafts = right[num_in_flight:]
        choice = next_token([*known, len(known)], seed, 2 * self.max_drafts * (self.max_drafts + 1))
        wrong_at, num_fewer = divmod(choice, self.max_drafts + 1)
        if wrong_at < len(drafts):
            drafts[wrong_at] = (drafts[wrong_at] + 1) % self.vocab_size
        return drafts[: self.max_drafts - num_fewer]

    def _constrained(self, req: Req, known: list[int], length: int) -> list[int]:
        """The next tokens under the request's grammar, up to its end."""
        assert req.grammar is not None
        matcher, ids, seed = req.grammar._matcher.fork(), list(known), req.sampling.sampling_seed
        bits = np.empty((1, num_mask_words(self.vocab_size)), np.int32)
        while len(ids) < len(known) + length:
            matcher.fill(bits, 0)
            allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: self.vocab_size]
            token = next_token(ids, seed, self.vocab_size, self.weights, self._adapter_of(req))
            ids.append(choose(token, allowed))
            if ids[-1] in req.grammar._eos_ids:
                break
            matcher.accept(ids[-1])
        return ids[len(known) :]

"""The log probabilities of tokens, computed from logits: of given tokens, and of the most probable ones.

A row's results depend only on its own logits. Of equally probable tokens, the one with the smaller id comes first.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from .. import cpu_extension


class TokenLogprobs(NamedTuple):
    """The results of n rows. NaN if a logit of the row is NaN or +inf, or if all are -inf."""

    given: torch.Tensor
    """float32 [n, m], of the given tokens"""
    top: torch.Tensor
    """float32 [n, k], of the most probable tokens, the most probable first"""
    top_ids: torch.Tensor
    """int32 [n, k], their ids"""


class LogprobMethod(Protocol):
    """Computes log probabilities."""

    def __call__(self, logits: torch.Tensor, lines: torch.Tensor, ids: torch.Tensor, k: int, /) -> TokenLogprobs:
        """
        Args:
            logits: float32 [rows, vocab], contiguous
            lines: int64 [n], lines of `logits`
            ids: int64 [n, m], the given tokens, m >= 1
            k: the number of most probable tokens, at most vocab
        """


def make_method(device: torch.device, *, use_kernels: bool) -> LogprobMethod:
    """The fastest method of the device. `use_kernels`: Triton's."""
    if use_kernels:
        return with_triton
    return with_cpu if device.type == "cpu" and cpu_extension.load() is not None else with_torch


def with_cpu(logits: torch.Tensor, lines: torch.Tensor, ids: torch.Tensor, k: int) -> TokenLogprobs:
    """The LogprobMethod of the compiled operations."""
    return TokenLogprobs(*torch.ops.tercet_cpu.token_logprobs(logits, lines, ids, k))


def with_torch(logits: torch.Tensor, lines: torch.Tensor, ids: torch.Tensor, k: int) -> TokenLogprobs:
    """The LogprobMethod of plain torch."""
    x = logits.index_select(0, lines)
    peak = x.amax(dim=-1, keepdim=True)
    log_sum = (x - peak).exp_().sum(dim=-1, keepdim=True).log_()
    top_ids = _top_ids(x, k)

    def at(tokens: torch.Tensor) -> torch.Tensor:
        return x.gather(1, tokens).sub_(peak).sub_(log_sum)

    return TokenLogprobs(at(ids), at(top_ids), top_ids.int())


def with_triton(logits: torch.Tensor, lines: torch.Tensor, ids: torch.Tensor, k: int) -> TokenLogprobs:
    """The LogprobMethod of a Triton kernel. torch ranks the tokens."""
    from ..kernels.token_logprobs import token_logprobs  # importing Triton takes half a second

    top_ids = _top_ids(logits.index_select(0, lines), k) if k else ids[:, :0]
    found = token_logprobs(logits, lines, torch.cat((ids, top_ids), dim=1))
    m = ids.shape[1]
    return TokenLogprobs(found[:, :m], found[:, m:], top_ids.int())


def _top_ids(x: torch.Tensor, k: int) -> torch.Tensor:
    """The ids of the k largest numbers of each row in descending order, equal ones in order of id: int64 [n, k].

    Keys of (number, id) in one integer are unique, so every algorithm gives the same order.
    """
    if not k:
        return torch.empty((len(x), 0), dtype=torch.int64, device=x.device)
    bits = (x + 0.0).view(torch.int32)  # adding 0 turns -0.0 into 0.0
    # Floats have the order of their bits as integers, if those of negative numbers are reversed.
    rank = bits.bitwise_xor((bits >> 31).bitwise_and_(0x7FFFFFFF)).bitwise_not_()
    keys = rank.to(torch.int64).bitwise_left_shift_(32)
    keys += torch.arange(x.shape[1], device=x.device)
    return keys.topk(k, dim=-1, largest=False, sorted=True).values & 0xFFFFFFFF

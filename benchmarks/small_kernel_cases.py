"""Benchmark cases of the small kernels and of torch's matrix products, with a model's sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from ..model_executor.kernels.activation import act_and_mul, act_and_mul_ref
from ..model_executor.kernels.argmax import argmax, argmax_ref
from ..model_executor.kernels.logit_edits import EditTables
from ..model_executor.kernels.rmsnorm import rmsnorm
from ..model_executor.kernels.rotary import rotary, rotary_ref
from ..model_executor.kernels.sampling import choose_tokens
from ..model_executor.kernels.sampling_layout import Column, Field
from ..model_executor.kernels.sampling_ref import choose_tokens_ref
from ..model_executor.kernels.store_kv import store_kv, store_kv_ref
from ..srt.model_files.model_config import ModelConfig
from .kernel_case import Case, CaseMaker, num_sets, relative_error
from .timing import Call

_EPS = 1e-6
_CHECK_TOKENS = 7
_LOGIT_BYTES = 4


@dataclass(frozen=True)
class Sizes:
    """The sizes of one model's layers, and a source of random tensors on one device."""

    name: str
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_value(self) -> int:
        return self.dtype.itemsize

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype or self.dtype, device=self.device)

    def repeat(self, num_bytes: int, make: Callable[[], Call]) -> list[Call]:
        """Enough calls for their inputs to exceed the cache. `num_bytes`: bytes of one call's inputs."""
        return [make() for _ in range(num_sets(num_bytes, self.device))]


def small_cases(sizes: Sizes, token_counts: Sequence[int]) -> list[CaseMaker]:
    """Cases for steps of each number of tokens. Kernels over the vocabulary take it as the number of sampled rows."""
    makers = []
    for num_tokens in token_counts:
        label = f"{sizes.name}, {num_tokens} tokens"
        for kernel, make, check, tolerance in (
            ("rmsnorm + residual", _norm_case, _check_norm, 1e-2),
            ("silu and mul", _activation_case, _check_activation, 1e-2),
            ("rotary + store KV", _rotary_case, _check_rotary, 1e-2),
            ("store KV", _store_case, _check_store, 0.0),
            ("greedy argmax", _argmax_case, _check_argmax, 0.0),
            ("sample top-k top-p min-p", _sample_case, _check_sample, 0.0),
            ("sample from all", _open_case, _check_open, 0.0),
        ):
            over_vocab = make in (_argmax_case, _sample_case, _open_case)
            if over_vocab and num_tokens > 512:
                continue  # no step samples this number of rows
            makers.append(CaseMaker(kernel, label, partial(make, sizes, num_tokens), partial(check, sizes), tolerance))
    return makers


def linear_cases(sizes: Sizes, token_counts: Sequence[int]) -> list[CaseMaker]:
    """Cases of torch's matrix products. They show the distance to the device's ceiling."""
    config = sizes.config
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    shapes = {
        "qkv": (heads, config.hidden_size),
        "o": (config.hidden_size, config.num_heads * config.head_dim),
        "gate-up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
        "head": (config.vocab_size, config.hidden_size),
    }
    return [
        CaseMaker(
            "linear",
            f"{sizes.name} {name} [{rows} x {columns}], {num_tokens} tokens",
            partial(_linear_case, sizes, rows, columns, num_tokens),
            None,
        )
        for name, (rows, columns) in shapes.items()
        for num_tokens in token_counts
        if name != "head" or num_tokens <= 512
    ]


def _linear_case(sizes: Sizes, rows: int, columns: int, num_tokens: int) -> Case:
    num_bytes = (rows * columns + num_tokens * (rows + columns)) * sizes.bytes_per_value

    def make() -> Call:
        return partial(F.linear, sizes.random(num_tokens, columns), sizes.random(rows, columns))

    return Case(num_bytes, 2 * num_tokens * rows * columns, [], {"torch": sizes.repeat(num_bytes, make)})


# Norm


def _norm_case(sizes: Sizes, num_tokens: int) -> Case:
    width = sizes.config.hidden_size
    num_bytes = 4 * num_tokens * width * sizes.bytes_per_value
    weight = sizes.random(width)

    def ours() -> Call:
        return partial(rmsnorm, sizes.random(num_tokens, width), weight, _EPS, sizes.random(num_tokens, width))

    def plain() -> Call:
        x, residual = sizes.random(num_tokens, width), sizes.random(num_tokens, width)
        return lambda: F.rms_norm(residual.add_(x), (width,), weight, _EPS)

    return Case(num_bytes, 0, sizes.repeat(num_bytes, ours), {"torch": sizes.repeat(num_bytes, plain)})


def _check_norm(sizes: Sizes) -> float:
    x, residual = (sizes.random(_CHECK_TOKENS, sizes.config.hidden_size) for _ in range(2))
    weight = sizes.random(sizes.config.hidden_size)
    total = (x.float() + residual.float()).to(sizes.dtype).double()
    out = rmsnorm(x, weight, _EPS, residual)
    reference = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + _EPS) * weight.double()
    return max(relative_error(out, reference), relative_error(residual, total))


# Activation


def _activation_case(sizes: Sizes, num_tokens: int) -> Case:
    width = sizes.config.intermediate_size
    num_bytes = 3 * num_tokens * width * sizes.bytes_per_value

    def plain() -> Call:
        x = sizes.random(num_tokens, 2 * width)
        return lambda: F.silu(x[:, :width]) * x[:, width:]

    ours = sizes.repeat(num_bytes, lambda: partial(act_and_mul, sizes.random(num_tokens, 2 * width)))
    return Case(num_bytes, 0, ours, {"torch": sizes.repeat(num_bytes, plain)})


def _check_activation(sizes: Sizes) -> float:
    x = sizes.random(_CHECK_TOKENS, 2 * sizes.config.intermediate_size)
    return relative_error(act_and_mul(x), act_and_mul_ref(x.double()))


# Rotary and KV store


class _Qkv:
    """The fused projections of new tokens, and a KV pool with scattered slots for their keys and values."""

    def __init__(self, sizes: Sizes, num_tokens: int) -> None:
        config = sizes.config
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = sizes.random(num_tokens, self.heads + 2 * self.kv_heads, self.dim)
        angles = sizes.random(num_tokens, self.dim // 2, dtype=torch.float32)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.k_buffer, self.v_buffer = (sizes.random(1 + 2 * num_tokens, self.kv_heads, self.dim) for _ in range(2))
        self.slots = torch.randperm(2 * num_tokens, device=sizes.device)[:num_tokens] + 1
        self.weights = (sizes.random(self.dim), sizes.random(self.dim)) if config.qk_norm == "heads" else (None, None)

    @property
    def k(self) -> torch.Tensor:
        return self.qkv[:, self.heads : self.heads + self.kv_heads]

    @property
    def v(self) -> torch.Tensor:
        return self.qkv[:, self.heads + self.kv_heads :]

    def call(self) -> None:
        q_weight, k_weight = self.weights
        rotary(
            self.qkv, self.heads, self.kv_heads, self.cos, self.sin, q_weight=q_weight, k_weight=k_weight, eps=_EPS,
            k_buffer=self.k_buffer, v_buffer=self.v_buffer, slots=self.slots,
        )  # fmt: skip


def _rotary_case(sizes: Sizes, num_tokens: int) -> Case:
    config = sizes.config
    values = num_tokens * config.head_dim * 2 * (config.num_heads + 2 * config.num_kv_heads)
    num_bytes = values * sizes.bytes_per_value + num_tokens * config.head_dim * 4
    return Case(num_bytes, 0, sizes.repeat(num_bytes, lambda: _Qkv(sizes, num_tokens).call))


def _check_rotary(sizes: Sizes) -> float:
    case = _Qkv(sizes, _CHECK_TOKENS)
    qkv, k_buffer, v_buffer = (x.double().cpu() for x in (case.qkv, case.k_buffer, case.v_buffer))
    q_weight, k_weight = (None if w is None else w.double().cpu() for w in case.weights)
    rotary_ref(
        qkv, case.heads, case.kv_heads, case.cos.double().cpu(), case.sin.double().cpu(), q_weight=q_weight,
        k_weight=k_weight, eps=_EPS, k_buffer=k_buffer, v_buffer=v_buffer, slots=case.slots.cpu(),
    )  # fmt: skip
    case.call()
    pairs = ((case.qkv[:, : case.heads], qkv[:, : case.heads]), (case.k_buffer, k_buffer), (case.v_buffer, v_buffer))
    return max(relative_error(out, reference) for out, reference in pairs)


def _store_case(sizes: Sizes, num_tokens: int) -> Case:
    config = sizes.config
    num_bytes = 4 * num_tokens * config.num_kv_heads * config.head_dim * sizes.bytes_per_value

    def by(store: Callable[..., None]) -> Call:
        case = _Qkv(sizes, num_tokens)
        return partial(store, case.k, case.v, case.k_buffer, case.v_buffer, case.slots)

    plain = sizes.repeat(num_bytes, partial(by, store_kv_ref))
    return Case(num_bytes, 0, sizes.repeat(num_bytes, partial(by, store_kv)), {"torch": plain})


def _check_store(sizes: Sizes) -> float:
    case = _Qkv(sizes, _CHECK_TOKENS)
    k_buffer, v_buffer = case.k_buffer.clone(), case.v_buffer.clone()
    store_kv_ref(case.k, case.v, k_buffer, v_buffer, case.slots)
    store_kv(case.k, case.v, case.k_buffer, case.v_buffer, case.slots)
    return max(relative_error(case.k_buffer, k_buffer), relative_error(case.v_buffer, v_buffer))


# Kernels over the vocabulary


def _logits(sizes: Sizes, num_rows: int) -> torch.Tensor:
    return 4 * sizes.random(num_rows, sizes.config.vocab_size, dtype=torch.float32)


def _argmax_case(sizes: Sizes, num_rows: int) -> Case:
    num_bytes = num_rows * sizes.config.vocab_size * _LOGIT_BYTES
    ours = sizes.repeat(num_bytes, lambda: partial(argmax, _logits(sizes, num_rows)))
    plain = sizes.repeat(num_bytes, lambda: partial(torch.argmax, _logits(sizes, num_rows), -1))
    return Case(num_bytes, 0, ours, {"torch": plain})


def _check_argmax(sizes: Sizes) -> float:
    x = _logits(sizes, _CHECK_TOKENS)
    return float((argmax(x) != argmax_ref(x)).sum())


class _Sampling:
    """Logits of sampled rows without edits. `ranked`: with top-k, top-p and min-p."""

    def __init__(self, sizes: Sizes, num_rows: int, *, ranked: bool) -> None:
        self.logits = _logits(sizes, num_rows)
        self.table = torch.zeros((num_rows, len(Column)), dtype=torch.float64, device=sizes.device)
        self.table[:, Column.TEMPERATURE] = 0.8
        self.table[:, Column.TOP_K] = 50 if ranked else sizes.config.vocab_size
        self.table[:, Column.TOP_P] = 0.95 if ranked else 1.0
        self.table[:, Column.MAX_GAP] = 3.0 if ranked else torch.inf
        self.plan = torch.full((num_rows, len(Field)), -1, dtype=torch.int64, device=sizes.device)
        self.plan[:, Field.ROW] = torch.arange(num_rows, device=sizes.device)
        draw = torch.rand(num_rows, dtype=torch.float64, device=sizes.device)
        self.plan[:, Field.DRAW] = draw.view(torch.int64)
        none = torch.empty((0, 0), dtype=torch.int32, device=sizes.device)
        self.edits = EditTables(none, none.float(), none.long(), none)
        self._ranked = ranked

    def choose(self) -> torch.Tensor:
        return choose_tokens(
            self.logits, self.table, self.plan, self.edits, num_edited=0, any_sampled=True, any_ranked=self._ranked
        )

    def share_of_differences(self) -> float:
        """The share of draws on which kernels and twin differ."""
        expected = choose_tokens_ref(self.logits.cpu(), self.table.cpu(), self.plan.cpu(), self.edits)
        return float((self.choose().cpu() != expected).sum()) / len(expected)


def _sample_case(sizes: Sizes, num_rows: int) -> Case:
    num_bytes = num_rows * sizes.config.vocab_size * _LOGIT_BYTES
    ours = sizes.repeat(num_bytes, lambda: _Sampling(sizes, num_rows, ranked=True).choose)
    plain = sizes.repeat(num_bytes, lambda: partial(torch.sort, _logits(sizes, num_rows), -1, True))
    return Case(num_bytes, 0, ours, {"torch sort alone": plain})


def _check_sample(sizes: Sizes) -> float:
    return _Sampling(sizes, _CHECK_TOKENS, ranked=True).share_of_differences()


def _open_case(sizes: Sizes, num_rows: int) -> Case:
    num_bytes = num_rows * sizes.config.vocab_size * _LOGIT_BYTES

    def plain() -> Call:
        x = _logits(sizes, num_rows)
        return lambda: torch.multinomial((x / 0.8).softmax(-1), 1)

    ours = sizes.repeat(num_bytes, lambda: _Sampling(sizes, num_rows, ranked=False).choose)
    return Case(num_bytes, 0, ours, {"torch": sizes.repeat(num_bytes, plain)})


def _check_open(sizes: Sizes) -> float:
    return _Sampling(sizes, _CHECK_TOKENS, ranked=False).share_of_differences()

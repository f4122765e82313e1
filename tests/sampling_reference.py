"""What tests of the sampler share: rows of every kind, and a reference in numpy with float64, one row at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tercet.model_executor.sampling.sampler import Sampler
from tercet.model_executor.step import NewRow
from tercet.srt.sampling_params import SamplingParams

Float64Array = npt.NDArray[np.float64]
EVERY_KIND: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.5, "min_p": 0.1},
    {"top_k": 5},
    {"top_k": 3000, "temperature": 2.0},
    {"top_p": 0.9, "frequency_penalty": 0.5},
    {"top_k": 50, "top_p": 0.8, "repetition_penalty": 1.2},
    {"temperature": 0.0, "min_new_tokens": 10, "logit_bias": {"1": 3.0}, "presence_penalty": 1.0},
]


def new_row(
    row: int,
    seed: int = 0,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    stops: tuple[int, ...] = (),
    **params: object,
) -> NewRow:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return NewRow(row, sampling, seed, np.array(prompt, np.int32), np.array(output, np.int32), stops)


def sampler_of_every_kind(vocab_size: int, device: str = "cpu") -> Sampler:
    sampler = Sampler(len(EVERY_KIND), vocab_size, device)
    for i, params in enumerate(EVERY_KIND):
        sampler.set_row(new_row(i + 1, seed=i, stops=(0, 2), **params))
    return sampler


def counts_of(sampler: Sampler, row: int) -> list[int] | None:
    """What a sampler has counted for a row's penalties (LogitEdits.counts); None: it counts nothing."""
    line = int(sampler._edits._counts.lines(np.array([row]))[0])
    return None if line < 0 else sampler._edits.counts[line].tolist()


def all_rows(first: int = 1) -> np.ndarray:
    return np.arange(first, len(EVERY_KIND) + 1, dtype=np.int32)


def edited_logits(logits: Float64Array, row: NewRow, generated: list[int]) -> Float64Array:
    """The logits after penalties, bias and the ban on early stops. `generated`: the output tokens so far."""
    x, params = logits.copy(), row.sampling
    for token in set(row.prompt_ids.tolist()) | set(generated):
        x[token] *= params.repetition_penalty if x[token] < 0 else 1 / params.repetition_penalty
    for token in generated:
        x[token] -= params.frequency_penalty
    for token in set(generated):
        x[token] -= params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        x[int(token)] += bias
    if len(generated) < params.min_new_tokens:
        x[list(row.stop_ids)] = -np.inf
    return x


def probabilities(logits: Float64Array, temperature: float) -> Float64Array:
    weights = np.exp((logits - logits.max()) / temperature)
    return weights / weights.sum()


def mass_above(logits: Float64Array, temperature: float) -> Float64Array:
    """For each token: the total probability of all strictly more probable tokens."""
    values, index = np.unique(logits, return_inverse=True)
    masses = np.bincount(index, weights=probabilities(logits, temperature), minlength=len(values))
    above = np.append(np.cumsum(masses[::-1])[::-1][1:], 0.0)
    return above[index]


def kept_tokens(logits: Float64Array, params: SamplingParams) -> npt.NDArray[np.int64]:
    """The tokens that top-k, top-p and min-p all keep, the most probable first, then by id."""
    p = probabilities(logits, params.temperature)
    order = np.lexsort((np.arange(len(p)), -logits))
    in_top_k = np.arange(len(p)) < (len(p) if params.top_k == -1 else params.top_k)
    in_top_p = mass_above(logits, params.temperature) < params.top_p
    in_min_p = p >= params.min_p * p.max()
    return order[in_top_k & in_top_p[order] & in_min_p[order]]


def near_a_threshold(logits: Float64Array, params: SamplingParams, margin: float = 1e-6) -> bool:
    """Whether a token is so near the threshold of top-p or min-p that float32 may decide differently."""
    p = probabilities(logits, params.temperature)
    distance = np.abs(mass_above(logits, params.temperature) - params.top_p)
    near_top_p = params.top_p < 1 and bool((distance < margin).any())
    return near_top_p or bool((np.abs(p / p.max() - params.min_p) < margin * params.min_p).any())


def possible_tokens(
    logits: Float64Array, params: SamplingParams, draws: Float64Array, margin: float = 1e-6
) -> list[set[int]]:
    """For each draw: the token at its place in the cumulative distribution, and tokens within float32's precision."""
    kept = kept_tokens(logits, params)
    if (params.top_k == -1 or params.top_k >= len(logits)) and params.top_p == 1:
        kept = np.sort(kept)  # with nothing to rank, the order is that of the ids
    cumulative = np.cumsum(probabilities(logits, params.temperature)[kept])
    cumulative /= cumulative[-1]
    first = np.searchsorted(cumulative, draws - margin, side="right")
    last = np.searchsorted(cumulative, draws + margin, side="right")
    return [set(kept[a : b + 1].tolist()) for a, b in zip(first, last, strict=True)]

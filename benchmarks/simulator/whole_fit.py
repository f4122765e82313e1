"""Fits the cost of a step to all steps of a recording at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...managers.step_cost import StepCost, StepShape

_MAX_WEIGHT_ROUNDS = 10
_MAX_SWEEPS = 5_000
_ENOUGH = 1e-7
"""A relative change of the solution that ends an iteration."""


def fit_cost(shapes: Sequence[StepShape], seconds: Sequence[float]) -> StepCost:
    """The coefficients, each at least 0, whose predictions have the same sum as the measured times.

    A squared error counts in proportion to 1 / (predicted seconds), as for Poisson-distributed times with an identity
    link. So the many short steps and the few long ones both count, and neither kind is wrong in total. Features that no
    step has get 0.
    """
    features = np.array([(1, *shape) for shape in shapes], dtype=np.float64).reshape(len(shapes), len(StepCost._fields))
    measured = np.asarray(seconds, dtype=np.float64)
    is_used = measured > 0
    features, measured = features[is_used], measured[is_used]
    if not len(measured):
        raise ValueError("no step has a measured time")
    scales = np.maximum(features.max(axis=0), 1.0)
    features = features / scales
    theta = np.zeros(len(scales))
    predicted = measured
    for _ in range(_MAX_WEIGHT_ROUNDS):
        weighted = features / predicted[:, None]
        before, theta = theta, _solve(weighted.T @ features, weighted.T @ measured, theta)
        if np.abs(theta - before).max() <= _ENOUGH * theta.max():
            break
        # A step of almost no predicted time would get almost all the weight.
        predicted = np.maximum(features @ theta, measured / 10)
    return StepCost(*(theta / scales).tolist())


def _solve(squares: np.ndarray, targets: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """Least squares with unknowns of at least 0, by coordinate descent from `theta`."""
    theta = theta.copy()
    for _ in range(_MAX_SWEEPS):
        largest = 0.0
        for i in np.flatnonzero(squares.diagonal() > 0):
            value = max(theta[i] + (targets[i] - squares[i] @ theta) / squares[i, i], 0.0)
            largest = max(largest, abs(value - theta[i]))
            theta[i] = value
        if largest <= _ENOUGH * theta.max():
            break
    return theta

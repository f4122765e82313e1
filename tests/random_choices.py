"""Strategies of hypothesis for settings of a config."""

from __future__ import annotations

from hypothesis import strategies as st


def some(**choices):
    """A dict of some of these settings. Each value is one of its choices."""
    return st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in choices.items()})


def fixed(**choices):
    return st.fixed_dictionaries({key: st.sampled_from(values) for key, values in choices.items()})

"""Numbers that the kernel of fp8 linear layers shares with those that make its weights. Imports no Triton."""

from __future__ import annotations

FP8_BLOCK = 128
"""Numbers along a row that share a scale, of activations and of weights with several scales in a row."""
FP8_MAX = 448.0
"""The largest number of e4m3fn."""
FP8_LOW_TILE = 64
"""Rows of the smaller tile: the least of sm_90's asynchronous products. Steps of more tokens have the larger tile."""

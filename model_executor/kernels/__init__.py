"""Triton kernels. The file of an operation has its reference in plain torch (`*_ref`); the one of the sampling is in
sampling_ref.py. Other files have what several operations share."""

from __future__ import annotations

from ...srt import env

env.set_triton_defaults()

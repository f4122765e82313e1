"""Triton kernels. Each file has one operation and its reference in plain torch (`*_ref`)."""

from __future__ import annotations

from ...srt import env

env.set_triton_defaults()

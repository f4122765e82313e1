"""Triton kernels. Each file has one operation and its reference in plain torch (`*_ref`)."""

from __future__ import annotations

import os

# The kernels are written and tuned with fused multiply-adds. Triton 3.10 changes its default to separate ones.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

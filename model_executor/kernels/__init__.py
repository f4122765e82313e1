"""Triton kernels. Each file has one operation and its reference in plain torch (`*_ref`)."""

"""Triton kernels, one operation a file, each with its plain-torch twin."""

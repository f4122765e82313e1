"""Benchmarks: how fast is it, and what did it cost."""

"""Benchmarks of the engine, of single kernels, and of running servers."""

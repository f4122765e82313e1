"""Weights: checkpoint formats, quantization, and the cache of packed and dequantised weights."""

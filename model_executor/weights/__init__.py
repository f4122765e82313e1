"""Weights: checkpoint formats, quantization, the cache of dequantised weights."""

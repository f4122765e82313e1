"""Weights: checkpoint formats, quantization, and the cache of dequantised weights."""

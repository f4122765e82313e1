"""Root-mean-square layer normalisation (arXiv 1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RMSNorm:
    """x [T, n] -> x / rms(x) * weight, computed in float32 and returned in x's dtype; weight: [n]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        assert weight.dim() == 1
        self.weight = weight
        self.eps = eps
        self._shape = (weight.shape[0],)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """With a residual ([T, n], contiguous): residual += x, in place, and the result is the norm of that."""
        if residual is not None:
            x = residual.add_(x)
        return F.rms_norm(x, self._shape, self.weight, self.eps)


class HeadNorm:
    """RMSNorm over head_dim of query and key heads in one go (Qwen 3): x [T, heads + kv_heads, head_dim]."""

    def __init__(self, q_weight: torch.Tensor, k_weight: torch.Tensor, num_heads: int, num_kv_heads: int, eps: float):
        self.weight = torch.cat([q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1)])
        self.eps = eps
        self._shape = (q_weight.shape[0],)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._shape, None, self.eps) * self.weight

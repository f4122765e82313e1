"""RMSNorm (arXiv 1910.07467) in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RMSNorm:
    """RMSNorm: x [T, n] -> x / rms(x) * weight, computed in float32, in x's dtype. weight: [n]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        assert weight.dim() == 1
        self.weight = weight
        self.eps = eps
        self._shape = (weight.shape[0],)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise x. With a residual ([T, n], contiguous), add x to it in place and normalise the sum."""
        if residual is not None:
            x = residual.add_(x)
        if self.weight.dtype == x.dtype:
            return F.rms_norm(x, self._shape, self.weight, self.eps)
        return F.rms_norm(x.to(self.weight.dtype), self._shape, self.weight, self.eps).to(x.dtype)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Normalise x and add the result to the residual ([T, n], contiguous) in place."""
        residual.add_(self(x))


class HeadNorm:
    """RMSNorm over head_dim of all query and key heads at once (Qwen 3): x [T, heads + kv_heads, head_dim].

    It copies no weights, because an update of the weights of a GPU writes to them.
    """

    def __init__(self, q_weight: torch.Tensor, k_weight: torch.Tensor, num_heads: int, num_kv_heads: int, eps: float):
        self._weights = (q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1))
        self.eps = eps
        self._shape = (q_weight.shape[0],)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.cat(self._weights)
        return (F.rms_norm(x.to(weights.dtype), self._shape, None, self.eps) * weights).to(x.dtype)


class RowNorm:
    """RMSNorm of the query heads of a token together, and of its key heads (OLMo 2): x [T, heads + kv_heads, head_dim].

    The weights have the shapes [heads * head_dim] and [kv_heads * head_dim].
    """

    def __init__(self, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float) -> None:
        self._norms = RMSNorm(q_weight, eps), RMSNorm(k_weight, eps)
        self._sizes = len(q_weight), len(k_weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.flatten(1).split(self._sizes, 1)
        return torch.cat([norm(part) for norm, part in zip(self._norms, parts, strict=True)], 1).view(x.shape)

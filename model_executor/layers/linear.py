"""Linear layers in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ...srt.model_files.experts_config import ClampedGate
from ...srt.model_files.model_config import Activation
from ..forward_batch import ForwardBatch
from .activation import gated_activation


class Linear:
    """A linear layer: x [T, in] -> x @ weight.T + bias [T, out]; weight: [out, in], bias: [out] or None.

    On a CPU the weight is packed once into oneDNN's layout, instead of at each call. The bits of a row of the result
    then do not depend on the number of rows; with `F.linear` in float32 they do (docs/log.md).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        assert weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1])
        self.bias = bias
        self.is_packed = can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach()) if self.is_packed else weight

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def float32(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """The output head, or a router: x [n, in] -> float32 [n, out], written to `out` if given.

        A GPU multiplies 16-bit numbers with a float32 result, so the logits are rounded once and not twice, and written
        once. A CPU has no such operation. A weight of float32 multiplies x in float32.
        """
        if self.weight.dtype.itemsize == 2 and x.device.type != "cpu":
            weight = self.weight.t()
            if out is None:
                logits = torch.mm(x, weight, out_dtype=torch.float32)
            else:
                logits = torch.mm(x, weight, out_dtype=torch.float32, out=out)
            return logits if self.bias is None else logits.add_(self.bias)
        logits = self(x.to(self.weight.dtype))
        return logits.float() if out is None else out.copy_(logits)


class GatedLinear:
    """A linear layer with a gated activation: x [T, in] -> activation(x @ weight.T + bias) [T, out].

    weight: [2 * out, in], the gate's rows first.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: Activation | ClampedGate = "silu",
        *,
        activate: Callable[[torch.Tensor, Any], torch.Tensor] = gated_activation,
    ) -> None:
        """`activate`: computes the activation of both halves, as `gated_activation` does."""
        self.linear = Linear(weight, bias)
        self.activation = activation
        self._activate = activate

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return self._activate(self.linear(x, batch), self.activation)


def float32_logits(
    head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """The head's output in float32, written to `out` if that is given: hidden [n, in] -> [n, vocab]."""
    if isinstance(head, Linear):
        return head.float32(hidden, out)
    logits = head(hidden)
    return logits.float() if out is None else out.copy_(logits)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether the weight can be packed: oneDNN must multiply its type natively on this processor."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if weight.dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return weight.dtype == torch.float32

"""Counts what a step queues on a GPU: launches of Triton kernels, torch's kernels, and copies to the device.

Tensors are on the meta device, so nothing runs. An operation of torch's counts as one launch, unless it only makes or
views a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton_aot import Launch, recorded

_NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty"}


@dataclass
class Counted:
    kernels: list[Launch] = field(default_factory=list)
    torch: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [launch.kernel.fn.__name__ for launch in self.kernels] + self.torch

    @property
    def total(self) -> int:
        return len(self.kernels) + len(self.torch)


class _Watch(TorchDispatchMode):
    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = {tensor.untyped_storage()._cdata for tensor in _on_device((args, kwargs))}
        # A conversion may be a view or a new tensor (`to` returns its argument if that has the type).
        writes = any(
            func._schema.is_mutable or tensor.untyped_storage()._cdata not in given for tensor in _on_device(out)
        )
        if writes and name not in _NO_LAUNCH:
            self._counted.torch.append(name)
        return out


def _on_device(tree: Any) -> list[torch.Tensor]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.device.type == "meta" and tensor.numel()]


@contextmanager
def counted_launches() -> Iterator[Counted]:
    """A context in which launches are counted. `Counted` is complete at its end."""
    counted = Counted()
    with recorded() as kernels, _Watch(counted):
        yield counted
    counted.kernels = kernels

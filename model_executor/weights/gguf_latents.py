"""The Checkpoint of GGUF files with latent attention (MLA), whose newer files divide a matrix of Hugging Face's."""

from __future__ import annotations

import re

import torch

from ...srt.model_files.latent_config import LatentConfig
from ..layers.quantized_weight import QuantizedWeight
from ..models.parameter import Region
from .gguf_checkpoint import GGUFCheckpoint

_KEYS = re.compile(r"(model\.layers\.\d+\.self_attn\.)k_b_proj\.weight")


class GGUFLatents:
    """A GGUFCheckpoint whose tensors `k_b_proj` and `v_b_proj` are rows of `kv_b_proj`.

    `k_b_proj` has the transposed matrix of each head's keys: [heads * latent_dim, nope_dim]. `v_b_proj` has those of
    its values: [heads * value_dim, latent_dim]. The rows of `kv_b_proj` are those of a head's keys, then its values.
    """

    def __init__(self, checkpoint: GGUFCheckpoint, latent: LatentConfig) -> None:
        self._checkpoint = checkpoint
        self._latent = latent
        self._divided = {f"{m[1]}kv_b_proj.weight": m[1] for m in map(_KEYS.fullmatch, checkpoint.names) if m}
        parts = {f"{prefix}{part}_b_proj.weight" for prefix in self._divided.values() for part in "kv"}
        self.names = (checkpoint.names - parts) | self._divided.keys()
        if missing := sorted(parts - checkpoint.names):
            raise ValueError(f"tensors missing: {missing[0]}")

    def dtype(self, name: str) -> torch.dtype | None:
        return self._checkpoint.dtype(f"{self._divided[name]}v_b_proj.weight" if name in self._divided else name)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._divided:
            return self._checkpoint.shape(name)
        sizes = self._latent
        return (self._num_heads(name) * (sizes.nope_dim + sizes.value_dim), sizes.latent_dim)

    def tensor(self, name: str, region: Region | None = None) -> torch.Tensor:
        if name not in self._divided:
            return self._checkpoint.tensor(name, region)
        joined = self._joined(name)
        return joined if region is None else joined[region]

    def _num_heads(self, name: str) -> int:
        """Raises ValueError if the tensors have other shapes than the config implies."""
        sizes, prefix = self._latent, self._divided[name]
        heads = []
        for part, rows, columns in (("k", sizes.latent_dim, sizes.nope_dim), ("v", sizes.value_dim, sizes.latent_dim)):
            shape = self._checkpoint.shape(f"{prefix}{part}_b_proj.weight")
            if shape[1:] != (columns,) or shape[0] % rows:
                raise ValueError(
                    f"tensor '{prefix}{part}_b_proj.weight' has shape {shape}, the config implies {columns} columns "
                    f"and {rows} rows for each head"
                )
            heads.append(shape[0] // rows)
        if heads[0] != heads[1]:
            raise ValueError(f"{prefix}k_b_proj has {heads[0]} heads, but v_b_proj has {heads[1]}")
        return heads[0]

    def _joined(self, name: str) -> torch.Tensor:
        num_heads, prefix = self._num_heads(name), self._divided[name]
        tensors = (self._checkpoint.tensor(f"{prefix}{part}_b_proj.weight") for part in "kv")
        keys, values = (tensor.unflatten(0, (num_heads, -1)) for tensor in tensors)
        return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)

    def has_form(self, name: str, form: str) -> bool:
        return name not in self._divided and self._checkpoint.has_form(name, form)

    def quantized(self, name: str, form: str, region: Region | None = None) -> QuantizedWeight | None:
        return None if name in self._divided else self._checkpoint.quantized(name, form, region)

"""Small checkpoints with 4-bit and 8-bit integer weights, in the layouts that files have, and their widened twins.

Rounding and packing are written from the formats' descriptions, with numpy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fp8_models import change_config, wide_model
from safetensors.torch import save_file
from tiny_models import stored_tensors
from transformers import PreTrainedModel

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Kind(NamedTuple):
    """A format of a checkpoint."""

    layout: str
    bits: int = 4
    group_size: int = 32
    """-1: a row has one scale"""
    symmetric: bool = False
    scales: torch.dtype = torch.float16
    scattered: bool = False
    """whether the columns of a group are scattered over the row"""

    def config(self) -> dict[str, Any]:
        """quantization_config as programs write it."""
        if self.layout.startswith("gptq"):
            return {
                "quant_method": "gptq",
                "bits": self.bits,
                "group_size": self.group_size,
                "damp_percent": 0.1,
                "desc_act": self.scattered,
                "sym": self.symmetric,
                "true_sequential": True,
                "checkpoint_format": self.layout,
                "model_file_base_name": "model",
                "meta": {"quantizer": ["gptqmodel:1.4.0"]},
            }
        if self.layout == "awq":
            return {
                "quant_method": "awq",
                "bits": self.bits,
                "group_size": self.group_size,
                "version": "gemm",
                "zero_point": True,
                "modules_to_not_convert": None,
            }
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "channel" if self.group_size == -1 else "group",
            "group_size": None if self.group_size == -1 else self.group_size,
            "actorder": "group" if self.scattered else None,
            "dynamic": False,
            "observer": "minmax",
        }
        activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        return {
            "quant_method": "compressed-tensors",
            "format": self.layout,
            "quantization_status": "compressed",
            "global_compression_ratio": 1.5,
            "kv_cache_scheme": None,
            "sparsity_config": {},
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": activations if self.layout == "int-quantized" else None,
                    "output_activations": None,
                }
            },
        }


KINDS = {
    "gptq": Kind("gptq", symmetric=True),
    "gptq-zeros": Kind("gptq", group_size=64),
    "gptq-8": Kind("gptq", bits=8, group_size=128, symmetric=True),
    "gptq-8-zeros": Kind("gptq", bits=8),
    "gptq-v2": Kind("gptq_v2", group_size=128),
    "gptq-scattered": Kind("gptq", symmetric=True, scattered=True),
    "awq": Kind("awq", group_size=128),
    "awq-rows": Kind("awq", group_size=-1),
    "packed": Kind("pack-quantized", symmetric=True, scales=torch.bfloat16),
    "packed-zeros": Kind("pack-quantized", group_size=128, scales=torch.bfloat16),
    "packed-rows": Kind("pack-quantized", bits=8, group_size=-1, symmetric=True),
    "packed-scattered": Kind("pack-quantized", symmetric=True, scattered=True),
    "packed-wide-scales": Kind("pack-quantized", symmetric=True, scales=torch.float32),
    "int8": Kind("int-quantized", bits=8, group_size=-1, symmetric=True, scales=torch.bfloat16),
    "int8-zeros": Kind("int-quantized", bits=8, group_size=-1, scales=torch.bfloat16),
}


class Rounded(NamedTuple):
    """A matrix of integers, not packed: (values - zeros) * scales, by the group of each column."""

    values: np.ndarray
    """int64 [n, k], from 0"""
    scales: torch.Tensor
    """[n, groups]"""
    zeros: np.ndarray
    """int64 [n, groups], at least 1"""
    groups: np.ndarray
    """[k]"""

    def wide(self) -> torch.Tensor:
        """The matrix as float32."""
        scales = self.scales.float().numpy()
        return torch.from_numpy((self.values - self.zeros[:, self.groups]).astype(np.float32) * scales[:, self.groups])


def rounded(weight: torch.Tensor, kind: Kind) -> Rounded:
    """Round a matrix to the nearest."""
    exact = weight.float().numpy()
    k = exact.shape[1]
    groups = np.arange(k) // (k if kind.group_size == -1 else kind.group_size)
    if kind.scattered:
        groups = np.random.default_rng(k).permutation(groups)
    num_groups, top = int(groups.max()) + 1, 2**kind.bits - 1
    lows, highs = (
        np.stack([part(exact[:, groups == group], 1) for group in range(num_groups)], 1) for part in (np.min, np.max)
    )
    lows, highs = np.minimum(lows, 0), np.maximum(highs, 0)
    if kind.symmetric:
        scales = torch.from_numpy(np.maximum(-lows, highs) / (top // 2)).to(kind.scales)
        zeros = np.full(lows.shape, top // 2 + 1)
    else:
        scales = torch.from_numpy((highs - lows) / top).to(kind.scales)
        zeros = np.clip(np.round(-lows / scales.float().numpy()), 1, top).astype(np.int64)
    wide_scales = scales.float().numpy()[:, groups]
    values = np.clip(np.round(exact / wide_scales) + zeros[:, groups], 0, top).astype(np.int64)
    return Rounded(values, scales, zeros, groups)


def packed(integers: np.ndarray, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack integers into words of int32 along a dimension. Place i of a word has integer order[i]; by default, i."""
    per_word = 32 // bits
    rows = np.moveaxis(integers, dim, -1)
    rows = np.pad(rows, [(0, 0), (0, -rows.shape[1] % per_word)])
    words = sum(
        rows[:, (order or range(per_word))[place] :: per_word].astype(np.uint64) << np.uint64(bits * place)
        for place in range(per_word)
    )
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, dim)))


def stored(matrix: Rounded, kind: Kind) -> dict[str, torch.Tensor]:
    """The tensors of a module, by the ends of their names."""
    values, scales, zeros, groups = matrix
    bits = kind.bits
    if kind.layout.startswith("gptq"):
        return {
            "qweight": packed(values.T, bits, 0),
            "qzeros": packed(zeros.T - (kind.layout == "gptq"), bits, 1),
            "scales": scales.t().contiguous(),
            "g_idx": torch.from_numpy(groups).int(),
        }
    if kind.layout == "awq":
        return {
            "qweight": packed(values.T, bits, 1, _AWQ_ORDER),
            "qzeros": packed(zeros.T, bits, 1, _AWQ_ORDER),
            "scales": scales.t().contiguous(),
        }
    found = {"weight_scale": scales.contiguous()}
    if kind.layout == "pack-quantized":
        found["weight_packed"] = packed(values, bits, 1)
        found["weight_shape"] = torch.tensor(values.shape)
        zero_points = packed(zeros, bits, 0)
    else:
        found["weight"] = torch.from_numpy(values - 128).to(torch.int8)
        zero_points = torch.from_numpy(zeros - 128).to(torch.int8)
    if not kind.symmetric:
        found["weight_zero_point"] = zero_points
    if kind.scattered:
        found["weight_g_idx"] = torch.from_numpy(groups).int()
    return found


def save_pair(
    folder: Path, kind: Kind, model: PreTrainedModel | None = None, *, wide: bool = True
) -> tuple[Path, Path]:
    """Saves a model, `wide_model` by default, with integer weights, and with the float32 numbers they stand for.

    `wide`: whether the second one is saved.
    """
    model, paths = model or wide_model(), (folder / "integers", folder / "wide")
    tensors: dict[str, torch.Tensor] = {}
    widened: dict[str, torch.Tensor] = {}
    for name, tensor in stored_tensors(model).items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight")):
            matrix, module = rounded(tensor, kind), name.removesuffix("weight")
            tensors |= {module + end: x for end, x in stored(matrix, kind).items()}
            widened[name] = matrix.wide()
        else:
            tensors[name], widened[name] = tensor.clone(), tensor.float()
    for path, content in zip(paths, (tensors, widened) if wide else (tensors,), strict=False):
        path.mkdir(parents=True)
        model.config.save_pretrained(path)
        save_file(content, path / "model.safetensors")
    change_config(paths[0], quantization_config=kind.config())
    if wide:
        change_config(paths[1], dtype="float32", torch_dtype="float32")
    return paths

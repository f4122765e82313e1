"""The identity of KV: a description of all that its bits and their layout depend on, besides the tokens.

KV files of another identity are never found, because the identity is in their keys. The weights are recognised by the
fingerprints of their files.
"""

from __future__ import annotations

import dataclasses
import json

import torch

from ... import __version__
from ...srt.model_files.fingerprint import weight_fields, weight_fingerprints
from ...srt.model_files.model_config import ModelConfig
from .. import cpu_extension
from ..cpu_calibration import processor
from .settings import RunnerSettings


def kv_identity(settings: RunnerSettings, config: ModelConfig, weight_version: str = "default") -> bytes:
    """The identity of the KV that a runner with these settings computes. Raises as `weight_files`.

    `weight_version`: the name of the weights. Weights of different names never share KV, even if their samples are
    equal.
    """
    on_cpu = settings.device.type == "cpu"
    variant = cpu_extension.load() if settings.attention_backend == "cpu" else None
    described: dict[str, object] = {
        "config": weight_fields(config),
        "weights": settings.seed if config.load_format == "dummy" else list(weight_fingerprints(config)),
        "weight_version": weight_version,
        "rope": [dataclasses.asdict(rope.for_context(settings.context_len)) for rope in config.ropes],
        "dtype": str(settings.dtype),
        "kv_dtype": str(settings.kv_dtype),
        "quantization": settings.quantization,
        "backend": settings.attention_backend,
        "page_size": settings.page_size,
        "device": "cpu" if on_cpu else torch.cuda.get_device_name(settings.device),
        "build": None if variant is None else variant.name,
        # oneDNN chooses its instructions by the processor.
        "onednn": processor() if settings.onednn else None,
        "bfloat16_products": None if settings.cpu_kernels is None else settings.cpu_kernels.tuning.bfloat16,
        "versions": [__version__, torch.__version__],
    }
    if settings.attention_backend == "triton":
        import triton  # takes half a second; this backend has imported it already

        described["kernels"] = [settings.fuse_small_steps, settings.hopper_prefill, triton.__version__]
    return json.dumps(described, sort_keys=True).encode()

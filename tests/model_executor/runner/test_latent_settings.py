"""The settings of a model with latent attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from runners import make_settings
from toy_runner import TOY

from tercet.model_executor.attention import registry
from tercet.model_executor.runner import settings as settings_module
from tercet.srt.model_files.latent_config import LatentConfig

_SIZES = LatentConfig(latent_dim=512, nope_dim=128, rope_dim=64, value_dim=128)
LATENT = dataclasses.replace(
    TOY, architecture="YoutuForCausalLM", latent=_SIZES, num_kv_heads=1, head_dim=_SIZES.key_dim, sliding_windows=()
)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype must be auto for a model with latent .*, got 'fp8_e4m3'"),
        ({"hopper_prefill": True}, "--hopper-prefill has no kernels for latent attention: leave it out"),
        ({"fuse_small_steps": True}, "--fuse-small-steps has no kernels for latent attention: leave it out"),
    ],
)
def test_what_has_no_kernel_is_refused(backend: str, change: dict[str, Any], message: str) -> None:
    if "fuse_small_steps" in change and backend != "triton":
        message = "--fuse-small-steps needs triton attention"
    with pytest.raises(ValueError, match=message):
        make_settings(LATENT, attention_backend=backend, dtype="bfloat16", **change)
    assert make_settings(LATENT, attention_backend=backend, dtype="bfloat16").kv_dtype == torch.bfloat16


def test_float32_is_refused_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"attention_backend": "triton", "dtype": "float32"}
    assert make_settings(LATENT, **options).dtype == torch.float32, "in the interpreter"
    monkeypatch.setattr(settings_module, "resolve_device", lambda name: torch.device("cuda"))
    assert make_settings(LATENT, **options | {"dtype": "float16"}).dtype == torch.float16
    with pytest.raises(ValueError, match="latent attention needs --dtype bfloat16 or float16 on a GPU, got float32"):
        make_settings(LATENT, **options)


@pytest.mark.parametrize(
    ("arch", "expected"), [("sm_90", 64), ("sm_80", 1), ("sm_100", 1), ("gfx942", 1), ("interpreter", 1)]
)
def test_pages_have_whole_kv_tiles_where_extend_attention_gains(
    arch: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "arch_of", lambda device: arch)
    assert make_settings(LATENT, attention_backend="triton", dtype="bfloat16", page_size=None).page_size == expected

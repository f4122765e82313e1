"""The page size that a server takes if it was told none, and the type of its KV pool."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from runners import make_settings
from toy_runner import TOY

from tercet.model_executor import cpu_extension
from tercet.model_executor.attention import registry
from tercet.model_executor.runner import settings as settings_module
from tercet.srt import env
from tercet.srt.server_args import ServerArgs

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"max_total_tokens": 2048, "chunked_prefill_size": 128, "max_prefill_tokens": 128}, None),
        ({"max_total_tokens": 2047}, 1),
        ({"chunked_prefill_size": 127}, 1),
        ({"max_prefill_tokens": 127}, 1),
        ({"max_total_tokens": 64, "page_size": 16}, 16),
    ],
)
def test_few_tokens_get_pages_of_one(settings: dict[str, Any], expected: int | None) -> None:
    assert settings_module._page_size(ServerArgs(model_path="m", **settings)) == expected


@pytest.mark.parametrize(
    ("backend", "head_dim", "latent_dim", "dtype", "expected"),
    [
        ("cpu", 64, None, BF16, 32),
        ("cpu", 80, None, BF16, 1),
        ("cpu", 96, 64, BF16, 32),
        ("cpu", 96, 80, BF16, 1),
        ("cpu", 80, 64, BF16, 1),
        ("cpu", 64, None, FP16, 1),
        ("torch", 64, None, BF16, 1),
        ("triton", 64, None, BF16, 1),
    ],
)
def test_pages_are_whole_panels_where_there_are_any(
    backend: str,
    head_dim: int,
    latent_dim: int | None,
    dtype: torch.dtype,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_extension, "lanes", lambda: 16)
    monkeypatch.setattr(cpu_extension, "multiplies", lambda dtype: dtype is not FP16)
    assert registry.default_page_size(backend, head_dim, dtype, torch.device("cpu"), latent_dim) == expected
    panel = registry.kv_panel(backend, 64, head_dim, dtype, latent_dim)
    assert panel == (32 if expected > 1 else None)
    assert registry.kv_panel(backend, 16, head_dim, dtype, latent_dim) is None


@pytest.mark.parametrize(
    ("arch", "head_dim", "kv_dtype", "expected"),
    [
        ("sm_90", 128, BF16, 64),
        ("sm_90", 64, FP16, 64),
        ("sm_90", 256, BF16, 1),
        ("sm_90", 128, torch.float8_e4m3fn, 1),
        ("sm_90", 128, torch.float32, 1),
        ("sm_80", 128, BF16, 1),
        ("sm_100", 128, BF16, 1),
        ("gfx942", 128, BF16, 1),
        ("interpreter", 128, BF16, 1),
    ],
)
def test_pages_have_whole_kv_tiles_where_extend_attention_gains(
    arch: str, head_dim: int, kv_dtype: torch.dtype, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "arch_of", lambda device: arch)
    assert registry.default_page_size("triton", head_dim, kv_dtype, torch.device("cuda")) == expected
    assert registry.default_page_size("torch", head_dim, kv_dtype, torch.device("cuda")) == 1


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_backend_without_fp8_kv_refuses_it_by_name(backend: str) -> None:
    assert registry.resolve_kv_dtype("auto", BF16, backend) == BF16
    with pytest.raises(ValueError, match=f"--kv-cache-dtype fp8_e4m3 needs .* triton, but it is {backend}"):
        registry.resolve_kv_dtype("fp8_e4m3", BF16, backend)


def test_the_kv_pool_has_the_type_of_its_setting() -> None:
    assert registry.resolve_kv_dtype("auto", FP16, "triton") == FP16
    assert registry.resolve_kv_dtype("fp8_e4m3", FP16, "triton") == torch.float8_e4m3fn
    with pytest.raises(ValueError, match="must be auto, fp8_e4m3, got 'fp8'"):
        registry.resolve_kv_dtype("fp8", BF16, "triton")


def test_fp8_kv_needs_activations_of_16_bits_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With float32, extend attention spills 12 KB of registers, and decode attention 340 bytes."""
    options = {"attention_backend": "triton", "kv_cache_dtype": "fp8_e4m3", "dtype": "float32"}
    assert make_settings(TOY, **options).kv_dtype == torch.float8_e4m3fn, "in the interpreter"
    monkeypatch.setattr(settings_module, "resolve_device", lambda name: torch.device("cuda"))
    assert make_settings(TOY, **options | {"dtype": "float16"}).kv_dtype == torch.float8_e4m3fn
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8_e4m3 needs --dtype bfloat16 or float16 on a GPU"):
        make_settings(TOY, **options)


@pytest.mark.parametrize(
    "settings", [{"attention_backend": "torch"}, {"attention_backend": "triton", "dtype": "float16"}]
)
def test_fused_small_steps_need_triton_and_a_type_with_a_wide_range(settings: dict[str, Any]) -> None:
    config = dataclasses.replace(TOY, load_format="dummy")
    with pytest.raises(ValueError, match="--fuse-small-steps needs triton attention and bfloat16 or float32, got t"):
        make_settings(config, fuse_small_steps=True, **settings)
    assert make_settings(config, fuse_small_steps=True, attention_backend="triton", dtype="bfloat16").fuse_small_steps


def test_drafts_need_a_cpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"speculative_algorithm": "NGRAM", "max_running_requests": 3, "attention_backend": "torch"}
    assert make_settings(TOY, **options).max_choices == 16
    assert make_settings(TOY, **options | {"speculative_algorithm": None}).max_choices == 3
    with pytest.raises(
        ValueError, match="needs --device cpu, and --attention-backend cpu or torch, got cpu and triton"
    ):
        make_settings(TOY, **options | {"attention_backend": "triton"})
    monkeypatch.setattr(settings_module, "resolve_device", lambda name: torch.device("cuda"))
    with pytest.raises(ValueError, match="--attention-backend cpu or torch, got cuda and torch"):
        make_settings(TOY, **options)


def use_nvidia(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Settings are resolved for a GPU of this compute capability."""
    monkeypatch.setattr(settings_module, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize(
    ("capability", "fused", "allowed"),
    [(None, True, False), ((8, 9), True, False), ((9, 0), True, True), ((10, 0), True, True), ((9, 0), False, False)],
)
def test_dependent_launches_need_a_gpu_and_fused_steps(
    capability: tuple[int, int] | None, fused: bool, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(TOY, load_format="dummy")
    triton = {"attention_backend": "triton", "dtype": "bfloat16", "page_size": 64, "fuse_small_steps": fused}
    if capability is not None:
        use_nvidia(monkeypatch, capability)
    if allowed:
        assert make_settings(config, dependent_launch=True, **triton).dependent_launch
    else:
        with pytest.raises(ValueError, match="--dependent-launch needs --fuse-small-steps and an NVIDIA GPU of"):
            make_settings(config, dependent_launch=True, **triton)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"page_size": 128}, None),
        ({"page_size": 32}, "needs a page size of a multiple of 64 tokens, got 32"),
        ({"dtype": "float16"}, "needs bfloat16 for activations and KV, got float16 and float16"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "needs bfloat16 for activations and KV, got bfloat16 and float8_e4m3fn"),
        ({"attention_backend": "torch"}, "needs triton attention and an NVIDIA GPU of compute capability 9.0"),
    ],
)
def test_hopper_prefill_needs_what_its_kernel_needs(
    change: dict[str, Any], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(TOY, load_format="dummy", head_dim=64)
    wanted = {"attention_backend": "triton", "dtype": "bfloat16", "page_size": 64, "hopper_prefill": True} | change
    for capability in (None, (8, 9), (10, 0)):
        if capability is not None:
            use_nvidia(monkeypatch, capability)
        with pytest.raises(ValueError, match=r"--hopper-prefill needs triton attention and an NVIDIA GPU"):
            make_settings(config, **wanted)
    use_nvidia(monkeypatch, (9, 0))
    if message is None:
        assert make_settings(config, **wanted).hopper_prefill
        with pytest.raises(ValueError, match="needs heads of 64 or 128 components, but the model's have 80"):
            make_settings(dataclasses.replace(config, head_dim=80), **wanted)
    else:
        with pytest.raises(ValueError, match=f"--hopper-prefill {message}"):
            make_settings(config, **wanted)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"enable_hierarchical_cache": True, "hicache_size": 0.5}, (1 << 29, False)),
        ({"enable_hierarchical_cache": True, "hicache_storage_dir": "kv"}, (1 << 30, True)),
        ({"enable_hierarchical_cache": True, "hicache_size": 3.0, "hicache_storage_dir": "kv"}, (3 << 30, True)),
    ],
)
def test_host_memory_for_kv_has_a_size_without_one_above_files(
    given: dict[str, Any], expected: tuple[int, bool] | None
) -> None:
    assert make_settings(TOY, **given).host_kv == expected


@pytest.mark.parametrize(
    ("name", "has_gpu", "device"),
    [
        ("auto", False, "cpu"),
        ("auto", True, "cuda"),
        ("cpu", True, "cpu"),
        ("cuda:1", True, "cuda:1"),
        ("cuda:1", False, None),
        ("meta", True, None),
    ],
)
def test_the_device_is_the_one_that_was_named(
    name: str, has_gpu: bool, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(env.os, "environ", {})
    if device is None:
        with pytest.raises(ValueError, match=r"device must be auto, cpu or cuda|--device cuda needs a GPU"):
            settings_module.resolve_device(name)
    else:
        assert settings_module.resolve_device(name) == torch.device(device)


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "auto"])
def test_segments_can_grow_unless_the_user_says_otherwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set with the choice of the device: torch reads it once, and benchmarks use the GPU before there is a runner."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for before, after in (
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    ):
        monkeypatch.setattr(env.os, "environ", dict(before))
        assert settings_module.resolve_device(name).type == "cuda"
        assert env.os.environ == after


def test_a_cpu_needs_no_settings_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env.os, "environ", {})
    settings_module.resolve_device("cpu")
    assert env.os.environ == {}

"""The identity of KV: equal for equal models and settings, and different wherever the bits or the layout may be."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import triton
from runners import make_settings
from toy_runner import TOY, TOY_QWEN

from tercet.model_executor.runner.kv_identity import kv_identity
from tercet.srt.model_files.experts_config import ClampedGate, ExpertsConfig
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.rope_config import NO_ROTATION, LongRopeScaling, RopeConfig


def identity(config: ModelConfig = TOY, **settings: object) -> bytes:
    return kv_identity(make_settings(config, **{"attention_backend": "torch", "dtype": "float32", **settings}), config)


def test_settings_that_kv_does_not_depend_on_share_their_files() -> None:
    assert identity() == identity(max_running_requests=3, max_total_tokens=640, chunked_prefill_size=256)
    assert identity() == identity(dataclasses.replace(TOY, context_len=32))


@pytest.mark.parametrize("settings", [{"page_size": 16}, {"dtype": "bfloat16"}, {"random_seed": 1}])
def test_other_settings_do_not(settings: dict[str, object]) -> None:
    assert identity() != identity(**settings)
    assert identity() != identity(TOY_QWEN)


def test_other_experts_do_not() -> None:
    experts = ExpertsConfig(num_experts=4, num_experts_per_token=2, intermediate_size=32, normalized=True)
    config = dataclasses.replace(TOY, experts=experts)
    unnormalized = dataclasses.replace(config, experts=dataclasses.replace(experts, normalized=False))
    clamped = dataclasses.replace(config, experts=dataclasses.replace(experts, gate=ClampedGate(1.702, 7.0)))
    assert len({identity(), identity(config), identity(unnormalized), identity(clamped)}) == 4


def test_layers_without_rotation_do_not() -> None:
    layers = range(TOY.num_layers)
    configs = [
        dataclasses.replace(TOY, layer_ropes=tuple(NO_ROTATION if layer == none else TOY.rope for layer in layers))
        for none in layers
    ]
    assert len({identity(), *map(identity, configs)}) == 1 + TOY.num_layers


def test_a_context_with_other_frequencies_does_not() -> None:
    long = LongRopeScaling((1.0,) * 8, (2.0,) * 8, original_context_len=32, attention_factor=1.2)
    config = dataclasses.replace(TOY, rope=RopeConfig(scaling=long))
    of_length = {length: identity(config, context_length=length) for length in (16, 32, 33, 64)}
    assert of_length[16] == of_length[32] != of_length[33] == of_length[64]


def test_kernels_of_a_gpu_with_other_bits_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_settings(TOY, attention_backend="triton", dtype="bfloat16")
    settings = [plain, *(dataclasses.replace(plain, **{flag: True}) for flag in ("fuse_small_steps", "hopper_prefill"))]
    found = {kv_identity(one, TOY) for one in settings}
    monkeypatch.setattr(triton, "__version__", "another")
    assert len({*found, kv_identity(plain, TOY)}) == 4


def test_weights_are_recognised_by_their_bytes(tmp_path: Path) -> None:
    def of(name: str, content: bytes) -> bytes:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(content)
        return identity(dataclasses.replace(TOY, model_path=str(folder), load_format="safetensors", dtype="float32"))

    content = bytes(3 << 20)
    first = of("a", content)
    assert first == of("b", content), "the folder's name and the times of its files do not matter"
    assert first != of("c", content + b"\0")
    for number, place in enumerate((0, 4095, 1 << 20, (2 << 20) + 4095, len(content) - 1)):
        changed = bytearray(content)
        changed[place] = 1
        assert first != of(f"changed {number}", bytes(changed))


def test_a_gguf_file_is_its_own_identity(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"a")
    (tmp_path / "b.gguf").write_bytes(b"b")
    configs = [
        dataclasses.replace(TOY, model_path=str(tmp_path / name), load_format="gguf", dtype="float32")
        for name in ("a.gguf", "b.gguf")
    ]
    assert identity(configs[0]) != identity(configs[1])

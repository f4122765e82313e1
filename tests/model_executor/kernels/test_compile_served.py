"""What serving in bfloat16 combines: windows, norms of heads, fp8 KV, fused and dependent kernels, and splits.

The other test_compile_*.py compile many shapes with few flags. Here each combination that a server launches, and that
is in none of their tables, is compiled for sm_90 in one shape. A usual run compiles some, with each flag of a kernel.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path

import compiled_attention
import compiled_dependent
import compiled_fp8
import compiled_others
import pytest
import torch
from compiled_attention import decode_launches, extend_launches
from compiled_others import CALLS, launches_of
from meta_runner import make_meta_runner
from serving_shapes import SHAPES
from some_cases import covering
from triton_aot import Launch, assert_fits, assert_overlaps, compile_all, recorded

from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.rope_config import RopeConfig

pytestmark = pytest.mark.timeout(900)

SCRIPTS = Path(__file__).parents[3] / "scripts"
LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    vocab_size=9000,
    context_len=5000,
    load_format="dummy",
)
MODELS = {
    "llama": LLAMA,
    "qwen3": dataclasses.replace(LLAMA, architecture="Qwen3ForCausalLM", qk_norm="heads"),
    "olmo2": dataclasses.replace(
        LLAMA, architecture="Olmo2ForCausalLM", qk_norm="rows", input_norms=False, output_norms=True
    ),
    "window": dataclasses.replace(LLAMA, sliding_windows=(None, 300)),
    "gemma3": dataclasses.replace(
        LLAMA,
        architecture="Gemma3ForCausalLM",
        head_dim=256,
        num_kv_heads=4,
        qk_norm="heads",
        output_norms=True,
        norm_offset=1.0,
        embedding_scale=16.0,
        hidden_act="gelu_tanh",
        sliding_windows=(300, None),
        layer_ropes=(RopeConfig(), RopeConfig(1e6)),
    ),
}
KV = (("auto", None), ("auto", 1), ("fp8_e4m3", None))
"""Types and page sizes. None: the default, of whole KV tiles."""
SMALL_STEPS = ({}, {"fuse_small_steps": True}, {"fuse_small_steps": True, "dependent_launch": True})

Flags = tuple[object, ...]


def flags_of(launch: Launch) -> Flags:
    """What decides which branches of a kernel are compiled, and with which types."""
    arguments = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.kwargs
    found: list[object] = [launch.kernel.fn.__name__]
    for name, value in sorted(arguments.items()):
        if isinstance(value, bool) or name in ("SPLITS", "KV_FORMAT"):
            found.append((name, value))
        elif isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            found.append((name, str(value.dtype)))
    return tuple(found)


def compiled_elsewhere() -> Iterator[Launch]:
    for module in (compiled_attention, compiled_dependent, compiled_fp8, compiled_others):
        for case in module.CASES.values():
            yield from case()
    for call in CALLS:
        yield from launches_of(call)
    for shape in SHAPES:
        yield from extend_launches(shape, "sm_90", "one split")
        yield from decode_launches(shape, "sm_90", mixed=False)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[Flags, Launch]:
    """A launch of each combination, from servers that start."""
    monkeypatch.syspath_prepend(SCRIPTS)
    as_if_on = importlib.import_module("gpu_compile").as_if_on
    monkeypatch.setattr("tercet.model_executor.layers.linear.can_pack", lambda weight: False)
    found: dict[Flags, Launch] = {}
    servers = list(product(range(len(KV)), MODELS, range(len(SMALL_STEPS))))
    # A usual run starts servers with each pair of a model, KV and kinds of small steps.
    for kv, model, small_steps in covering(servers, lambda server: combinations(enumerate(server), 2)):
        (kv_cache_dtype, page_size), config, options = KV[kv], MODELS[model], SMALL_STEPS[small_steps]
        with pytest.MonkeyPatch.context() as patch, as_if_on("sm_90", 132, patch), recorded() as launches:
            make_meta_runner(
                patch, config, attention=None, attention_backend="triton", disable_cuda_graph=True,
                max_running_requests=64, max_total_tokens=6000, max_prefill_tokens=2500,
                kv_cache_dtype=kv_cache_dtype, page_size=page_size, **options,
            )  # fmt: skip
        for launch in launches:
            found.setdefault(flags_of(launch), launch)
    return found


def test_every_combination_compiles_and_fits(served: dict[Flags, Launch]) -> None:
    splits = {launch.kwargs["SPLITS"] for launch in served.values() if "SPLITS" in launch.kwargs}
    assert len(splits) == 3 and any("_fused_decode_kernel" in flags for flags in served)
    paged = {flags[0] for flags in served if ("PAGED", True) in flags}
    assert paged == {"extend_kernel", "_decode_split_kernel", "_fused_decode_kernel"}
    others = {flags_of(launch) for launch in compiled_elsewhere()}
    assert len(served.keys() & others) > 20, "the other tests compile none of these"
    new = [flags for flags in served if flags not in others]
    few = covering(new, lambda flags: [(flags[0], flag) for flag in flags])
    for resources in compile_all((served[flags] for flags in few), "sm_90"):
        assert_fits(resources, "sm_90")
        if resources.kernel in ("extend_kernel", "_decode_split_kernel", "_fused_decode_kernel"):
            assert_overlaps(resources)

"""The parts of scripts/gpu: tests and benchmarks in order of importance."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCH = [sys.executable, "-m"]
_TESTS = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
_MEMORY_TEST = "tests/gpu/test_memory_on_gpu.py"
"""Takes nearly all memory, so no other test may run beside it."""
_MOST_TEST_PROCESSES = 12
"""Each takes half a GiB of device memory for its context."""
_MODELS = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-0.6b")
_FUSED_MODELS = ("llama-3.2-1b", "llama-3.1-8b")


@dataclass(frozen=True)
class Part:
    """One command. It is not started with less than `needs_s` left, and is stopped after `limit_s`."""

    name: str
    what: str
    command: list[str]
    needs_s: int
    limit_s: int
    environment: dict[str, str] = field(default_factory=dict)


def bench(name: str, what: str, module: str, arguments: str, needs_s: int, limit_s: int) -> Part:
    return Part(name, what, [*BENCH, f"tercet.benchmarks.{module}", *shlex.split(arguments)], needs_s, limit_s)


def parts(quick: bool) -> list[Part]:
    """The parts in order of importance: first the tests, then the measurements."""
    one_batch = "--context-len 1024 --num-steps 64" if quick else "--context-len 1024,8192 --num-steps 128"
    big_batch, peer_batch = ("1024", "256") if quick else ("8192", "1024")
    # At most 8 requests have these kernels. Prompts do not, and are measured without the flag.
    fused = f"--fuse-small-steps --batch-size 1,8 {one_batch} --prefill-len ''"
    batch_of_32 = "--model-path llama-3.1-8b --num-prompts 32 --input-len 32 --output-len"
    return [
        Part("tests", "correctness on the device", _tests_at_once(), 60, 300),
        Part("tests-memory", "the KV pool leaves room for the largest steps", [*_TESTS, _MEMORY_TEST], 15, 120),
        Part("compile", "the kernels of the models below, on all cores", _compilation(), 80, 150),
        bench(
            "check",
            "kernels against their twins",
            "bench_kernels",
            "--check-only --quick" if quick else "--check-only",
            12,
            120,
        ),
        bench(
            "one-batch-1b",
            "Llama-3.2-1B: decode with and without CUDA graphs, device idle time",
            "bench_one_batch",
            f"--model-path llama-3.2-1b --batch-size 1,8,32 {one_batch} --prefill-len 4096 --compare-cuda-graph",
            28,
            180,
        ),
        bench(
            "one-batch-1b-fused",
            "Llama-3.2-1B: decode of 1 and 8 requests with --fuse-small-steps",
            "bench_one_batch",
            f"--model-path llama-3.2-1b {fused} --compare-cuda-graph",
            25,
            120,
        ),
        bench(
            "one-batch-1b-dependent",
            "Llama-3.2-1B: the same with --dependent-launch",
            "bench_one_batch",
            f"--model-path llama-3.2-1b {fused} --dependent-launch --compare-cuda-graph",
            25,
            120,
        ),
        bench(
            "one-batch-8b",
            "Llama-3.1-8B: decode, prefill of 4,096 tokens",
            "bench_one_batch",
            f"--model-path llama-3.1-8b --batch-size 1,8,32 {one_batch} --prefill-len 4096,16384",
            28,
            180,
        ),
        bench(
            "one-batch-8b-fused",
            "Llama-3.1-8B: decode of 1 and 8 requests with --fuse-small-steps",
            "bench_one_batch",
            f"--model-path llama-3.1-8b {fused}",
            20,
            120,
        ),
        bench(
            "one-batch-8b-dependent",
            "Llama-3.1-8B: the same with --dependent-launch",
            "bench_one_batch",
            f"--model-path llama-3.1-8b {fused} --dependent-launch",
            20,
            120,
        ),
        bench(
            "offline-0.6b",
            "Qwen3-0.6B: 256 requests, 100-1024 in and out",
            "bench_offline_throughput",
            f"--model-path qwen3-0.6b --num-prompts 256 --rounds {1 if quick else 3}",
            25,
            180,
        ),
        bench("kernels", "kernels against the ceilings", "bench_kernels", "--quick" if quick else "", 40, 240),
        bench(
            "offline-8b",
            f"Llama-3.1-8B: batch 32, {big_batch} new tokens each",
            "bench_offline_throughput",
            f"{batch_of_32} {big_batch}",
            25 if quick else 150,
            300,
        ),
        bench(
            "prefix",
            "Qwen3-0.6B: shared prefixes, with the cache and without",
            "bench_prefix_cache",
            f"--model-path qwen3-0.6b --num-groups 32 --prompts-per-group 8 --rounds {1 if quick else 3}",
            45,
            150,
        ),
        bench(
            "peer-0.6b",
            "Qwen3-0.6B: 256 requests, beside transformers",
            "bench_offline_throughput",
            "--model-path qwen3-0.6b --num-prompts 256 --compare transformers",
            90,
            300,
        ),
        # Without flash-attn, transformers pads all requests to one masked matrix. 8,192 tokens would take too long.
        bench(
            "peer-8b",
            f"Llama-3.1-8B: batch 32, {peer_batch} new tokens each, beside transformers",
            "bench_offline_throughput",
            f"{batch_of_32} {peer_batch} --compare transformers",
            120 if quick else 300,
            580,
        ),
        bench(
            "one-batch-8b-hopper",
            "Llama-3.1-8B: prompts with --hopper-prefill",
            "bench_one_batch",
            "--model-path llama-3.1-8b --batch-size 1 --context-len 1024 --num-steps 8 --prefill-len 512,4096,16384 "
            "--hopper-prefill",
            35,
            150,
        ),
        *sanitizer_parts(),
        *profile_parts(),
    ]


_CHECK_EXTEND = [*BENCH, "tercet.benchmarks.bench_kernels", "--check-only", "--quick", "--only", "extend"]
_CHECK_DECODE = [*BENCH, "tercet.benchmarks.bench_kernels", "--check-only", "--quick", "--only", "decode"]


def sanitizer_parts() -> list[Part]:
    """Extend attention under compute-sanitizer, if the CUDA toolkit is here."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return []
    command = [tool, "--error-exitcode", "1", *_CHECK_EXTEND]
    return [Part("sanitizer", "memory accesses of extend attention", command, 60, 240)]


def profile_parts() -> list[Part]:
    """Profiles of the kernels of attention and of small steps, if Nsight Compute is here. They are in the log."""
    tool = shutil.which("ncu")
    if tool is None:
        return []

    def profile(name: str, kernel: str, command: list[str]) -> Part:
        options = ["--kernel-name", f"regex:^{kernel}$", "--launch-count", "1", "--set", "full"]
        return Part(name, f"Nsight Compute's profile of {kernel}", [tool, *options, *command], 60, 180)

    return [
        profile("ncu-extend", "extend_kernel", _CHECK_EXTEND),
        profile("ncu-decode", "_decode_split_kernel", _CHECK_DECODE),
        profile("ncu-skinny", "_skinny_linear_kernel", _kernel_test("test_small_linear_layers and 4096")),
        profile(
            "ncu-fused",
            "_fused_decode_kernel",
            _kernel_test("test_decode_in_one_kernel_has_the_bits_of_three and llama-8b and False"),
        ),
    ]


def _kernel_test(chosen: str) -> list[str]:
    """The command of one test of the kernels, with the shapes of Llama-3.1-8B."""
    return [*_TESTS, "tests/gpu/test_kernels.py", "-k", chosen]


_HANGS = "import time; print('begun', flush=True); time.sleep(600)"


def tiny_parts(folder: Path) -> list[Part]:
    """The same programs with tiny sizes, to test this script on a machine without a GPU. The numbers have no value."""
    model = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 131,
        "max_position_embeddings": 512, "use_sliding_window": False, "eos_token_id": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    path = folder / "toy.json"
    path.write_text(json.dumps(model), encoding="utf-8")
    common = f"--model-path {shlex.quote(str(path))} --device cpu --dtype float32 --max-total-tokens 2000"
    return [
        Part(
            "check",
            "kernels in the interpreter",
            [*BENCH, "tercet.benchmarks.bench_kernels", "--tiny", "--check-only", "--only", "extend", "--model-path",
             str(path)],
            1,
            120,
            {"TRITON_INTERPRET": "1"},
        ),
        bench(
            "one-batch",
            "one batch",
            "bench_one_batch",
            f"{common} --small-ceilings --batch-size 2 --context-len 16 --prefill-len 32 --num-steps 2 --rounds 1",
            1,
            120,
        ),
        bench(
            "offline",
            "requests at once",
            "bench_offline_throughput",
            f"{common} --small-ceilings --num-prompts 4 --input-len 4-8 --output-len 4",
            1,
            120,
        ),
        Part("hangs", "a part that hangs", [sys.executable, "-c", _HANGS, "pytest"], 1, 60),
        bench("fails", "a part that fails", "bench_offline_throughput", "--model-path nowhere", 1, 60),
    ]  # fmt: skip


def _tests_at_once() -> list[str]:
    """Tests of one process compile some 300 kernels one after the other, which takes over 5 minutes."""
    at_once = []
    if importlib.util.find_spec("xdist") is not None:
        at_once = ["-n", str(min(len(os.sched_getaffinity(0)), _MOST_TEST_PROCESSES)), "--dist", "worksteal"]
    return [*_TESTS, *at_once, "tests/gpu", "--ignore", _MEMORY_TEST]


def _compilation() -> list[str]:
    models = [*_MODELS, *(f"{m}+fused" for m in _FUSED_MODELS), *(f"{m}+dependent" for m in _FUSED_MODELS)]
    return [sys.executable, str(ROOT / "scripts" / "gpu_compile.py"), *models]

"""Settings: the device and its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from .setting import Setting


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """The settings of the device and its memory."""

    TITLE: ClassVar[str] = "The device and its memory"

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Setting("Device of the model; auto: a GPU if there is one, else the CPU; CUDA_VISIBLE_DEVICES chooses the GPU"),
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "cpu", "torch", "triton"],
        Setting("Implementation of attention and layers; auto: triton on a GPU; cpu (C++) or else torch on a CPU"),
    ] = "auto"
    mem_fraction_static: Annotated[
        float | None,
        Setting(
            "Fraction of memory for weights and KV; default: on a GPU all that steps do not need, on a CPU a small pool"
        ),
    ] = None
    max_total_tokens: Annotated[
        int | None, Setting("Size of the KV pool in tokens; default: computed from the memory")
    ] = None
    page_size: Annotated[
        int | None,
        Setting(
            "Tokens in a KV page; default: 32 on a CPU whose C++ kernels support the model, 64 on an NVIDIA GPU of "
            "compute capability 9.0 with KV of 16 bits, else 1"
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8_e4m3"],
        Setting(
            "Data type of the KV cache; auto: --dtype; fp8_e4m3: 8 bits, scale 1, with --attention-backend triton, and "
            "on a GPU not with --dtype float32"
        ),
    ] = "auto"
    disable_overlap_schedule: Annotated[
        bool, Setting("Process the tokens of a step before planning the next one; a CPU always does this")
    ] = False
    disable_cuda_graph: Annotated[bool, Setting("Do not record steps: launch each kernel or operation separately")] = (
        False
    )
    cuda_graph_max_bs: Annotated[
        int | None, Setting("Batch size of the largest recorded decode step; default: 256")
    ] = None
    fuse_small_steps: Annotated[
        bool,
        Setting(
            "With Triton attention, compute steps of at most 8 tokens with fewer kernels: norms, sums and activations "
            "inside the linear layers, and attention with its rotation in one kernel. The bits of the results differ "
            "from those without the flag. Not with float16 or fp8 weights. On an H200, one request decodes 15 % faster "
            "with Llama-3.2-1B, and 8 % with Llama-3.1-8B"
        ),
    ] = False
    hopper_prefill: Annotated[
        bool,
        Setting(
            "With Triton attention, compute the attention of prompts with a kernel for GPUs of compute capability 9.0. "
            "Needs bfloat16, heads of 64 or 128 components, pages of a multiple of 64 tokens, and a model without "
            "sliding windows, attention sinks and soft caps of scores. The bits of the results differ from those "
            "without the flag. On an H200 with Llama-3.1-8B, prompts of 16,384, 4,096 and 512 tokens take 11 % less, "
            "3 % less and 53 % more time"
        ),
    ] = False
    dependent_launch: Annotated[
        bool,
        Setting(
            "With --fuse-small-steps, a kernel of these steps starts before the one before it has ended, and already "
            "fetches weights. Needs compute capability 9.0 or higher. 1 to 3 % faster on an H200"
        ),
    ] = False

"""The facts about a loaded model that other processes need."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from ..model_executor import cpu_extension
from ..model_executor.device.dtypes import dtype_name
from ..model_executor.runner.model_runner import ModelRunner
from ..model_executor.runner.settings import RunnerSettings
from ..srt.adapters import AdapterFacts
from ..srt.model_files.model_config import ModelConfig
from ..srt.start_reports import CpuKernels, SchedulerReady
from ..srt.weight_messages import WeightFacts
from .engine_runner import EngineRunner

logger = logging.getLogger(__name__)


def max_total_tokens(runner: EngineRunner) -> int:
    """The maximum of prompt and output tokens of a request. They must fit into the context and into the KV pool."""
    return min(runner.settings.context_len, runner.max_total_num_tokens)


def scheduler_facts(
    runner: ModelRunner, model_config: ModelConfig, adapters: Sequence[AdapterFacts] = ()
) -> SchedulerReady:
    """The facts about a loaded model, and its `adapters`. Logs them."""
    settings = runner.settings
    facts = SchedulerReady(
        max_total_num_tokens=runner.max_total_num_tokens,
        max_running_requests=settings.max_running_requests,
        max_req_input_len=max_total_tokens(runner) - 1,
        context_len=settings.context_len,
        chunked_prefill_size=settings.chunked_prefill_size,
        max_prefill_tokens=settings.max_prefill_tokens,
        vocab_size=model_config.vocab_size,
        dtype=dtype_name(settings.dtype),
        weights=weight_facts(settings, runner.num_bytes.weights),
        device=str(settings.device),
        attention_backend=settings.attention_backend,
        page_size=settings.page_size,
        kv_bytes=runner.num_bytes.kv_pool,
        graph_bytes=runner.num_bytes.graphs,
        cpu_kernels=_cpu_kernels(settings),
        adapters=list(adapters),
    )
    logger.info(
        "Model loaded: weights %s, activations %s on %s, %.0f MiB of weights, KV pool of %d tokens (%.0f MiB) in pages "
        "of %d, context %d, %s attention",
        facts.weights.dtype,
        facts.dtype,
        facts.device,
        facts.weights.num_bytes / 2**20,
        facts.max_total_num_tokens,
        facts.kv_bytes / 2**20,
        facts.page_size,
        facts.context_len,
        facts.attention_backend,
    )
    if facts.cpu_kernels is not None:
        logger.info(
            "CPU kernels: build %s, blocks of %d KiB, chunks of %d, bfloat16 %s, prefetch into %s, "
            "linear layers of %s, weights %s (%s)",
            *msgspec.structs.astuple(facts.cpu_kernels),
        )
    return facts


def weight_facts(settings: RunnerSettings, num_bytes: int) -> WeightFacts:
    forms = set(settings.weight_forms.values())
    dtype = ", ".join(sorted(forms)) if forms else dtype_name(settings.weight_dtype)
    return WeightFacts(dtype, num_bytes)


def _cpu_kernels(settings: RunnerSettings) -> CpuKernels | None:
    variant = cpu_extension.load() if settings.cpu_kernels is not None else None
    if settings.cpu_kernels is None or variant is None:
        return None
    tuning, source = settings.cpu_kernels
    return CpuKernels(
        build=variant.name,
        block_kib=tuning.block_kib,
        chunk=tuning.chunk,
        bfloat16=tuning.bfloat16,
        prefetch=tuning.prefetch,
        linears="onednn" if settings.onednn else "tercet",
        weights="compact" if settings.compact else "plain",
        source=source,
    )

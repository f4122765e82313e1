"""The scheduler's process: loads the model, builds the scheduler around it, says what fits, and loops."""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq

from ..mem_cache.allocator import BaseAllocator, make_allocator
from ..mem_cache.base_prefix_cache import BasePrefixCache
from ..mem_cache.chunk_cache import ChunkCache
from ..mem_cache.radix_cache import RadixCache
from ..mem_cache.req_to_token_pool import ReqToTokenPool
from ..model_executor.runner.load import load_runner
from ..model_executor.runner.model_runner import ModelRunner
from ..model_executor.runner.settings import resolve_settings
from ..srt.io_struct import SchedulerReady, ToDetokenizer, ToScheduler, ToTokenizer
from ..srt.ipc import Receiver, RunDir, Sender
from ..srt.model_files.model_config import ModelConfig
from ..srt.sampling_params import SamplingParams
from ..srt.server_args import ServerArgs
from ..srt.text.tokenizer import Tokenizer, load_tokenizer
from .kv_cache_manager import KVCacheManager
from .planner import PlanLimits, Planner
from .req import decode_options
from .req_factory import ReqFactory
from .request_queues import RequestQueues
from .scheduler import Scheduler
from .scheduler_io import SchedulerIO
from .scheduler_metrics import SchedulerMetrics
from .text_stream import StopStringChecker

logger = logging.getLogger(__name__)


def run_scheduler(
    server_args: ServerArgs,
    model_config: ModelConfig,
    run_dir: RunDir,
    on_ready: Callable[[SchedulerReady], None],
    should_stop: Callable[[], bool],
) -> None:
    """Runs until `should_stop()`, which is asked at least twice a second when nothing runs, else after each step.

    Raises ValueError for settings that do not fit the model or the machine.
    """
    assert server_args.random_seed is not None, "the parent draws it, so that all processes have the same"
    tokenizer = None
    if not server_args.skip_tokenizer_init:
        tokenizer = load_tokenizer(server_args.model_path, server_args.tokenizer_path)
    runner = load_runner(resolve_settings(server_args, model_config), model_config)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Receiver[ToScheduler] = Receiver(context, run_dir.scheduler, ToScheduler)
    detokenizer_link: Sender[ToDetokenizer] = Sender(context, run_dir.detokenizer)
    tokenizer_link: Sender[ToTokenizer] = Sender(context, run_dir.tokenizer)
    io = SchedulerIO(inbox, detokenizer_link, tokenizer_link)
    scheduler = build_scheduler(server_args, model_config, runner, tokenizer, io)
    on_ready(scheduler_facts(runner, model_config))
    scheduler.run(should_stop)
    inbox.close()
    detokenizer_link.close()
    tokenizer_link.close()
    context.term()


def build_scheduler(
    server_args: ServerArgs,
    model_config: ModelConfig,
    runner: ModelRunner,
    tokenizer: Tokenizer | None,
    io: SchedulerIO,
) -> Scheduler:
    """The scheduler of a loaded model, with its pools and its cache."""
    rows = ReqToTokenPool(runner.settings.max_running_requests, runner.settings.context_len)
    allocator, cache = _memory(server_args, runner)
    return Scheduler(
        Planner(_limits(server_args, runner), KVCacheManager(rows, allocator, cache), RequestQueues()),
        runner,
        io,
        ReqFactory(
            eos_ids=frozenset(model_config.eos_token_ids) | (tokenizer.eos_token_ids if tokenizer else frozenset()),
            max_total_tokens=_max_total_tokens(runner),
            max_queued_requests=server_args.max_queued_requests,
            stream_interval=server_args.stream_interval,
            make_stop_checker=lambda params: _stop_checker(tokenizer, params),
        ),
        SchedulerMetrics(server_args.decode_log_interval),
        enable_overlap=runner.is_asynchronous and not server_args.disable_overlap_schedule,
    )


def _limits(server_args: ServerArgs, runner: ModelRunner) -> PlanLimits:
    return PlanLimits(
        max_prefill_tokens=runner.settings.max_prefill_tokens,
        chunked_prefill_size=runner.settings.chunked_prefill_size,
        enable_mixed_chunk=server_args.enable_mixed_chunk,
        schedule_policy=server_args.schedule_policy,
        schedule_conservativeness=server_args.schedule_conservativeness,
    )


def _memory(server_args: ServerArgs, runner: ModelRunner) -> tuple[BaseAllocator, BasePrefixCache]:
    page_size = runner.settings.page_size
    allocator = make_allocator(runner.max_total_num_tokens, page_size)
    if server_args.disable_radix_cache:
        return allocator, ChunkCache(page_size)
    return allocator, RadixCache(allocator, page_size, server_args.radix_eviction_policy)


def _stop_checker(tokenizer: Tokenizer | None, params: SamplingParams) -> StopStringChecker:
    assert tokenizer is not None, "the TokenizerManager refuses stop strings without a tokenizer"
    return StopStringChecker(tokenizer, decode_options(params))


def _max_total_tokens(runner: ModelRunner) -> int:
    """Prompt and output of the longest request: both the context and the KV pool must hold it."""
    return min(runner.settings.context_len, runner.max_total_num_tokens)


def scheduler_facts(runner: ModelRunner, model_config: ModelConfig) -> SchedulerReady:
    """What other processes have to know of a loaded model. Logs it, too."""
    settings = runner.settings
    facts = SchedulerReady(
        max_total_num_tokens=runner.max_total_num_tokens,
        max_running_requests=settings.max_running_requests,
        max_req_input_len=_max_total_tokens(runner) - 1,
        context_len=settings.context_len,
        chunked_prefill_size=settings.chunked_prefill_size,
        max_prefill_tokens=settings.max_prefill_tokens,
        vocab_size=model_config.vocab_size,
        dtype=str(settings.dtype).removeprefix("torch."),
        device=str(settings.device),
        attention_backend=settings.attention_backend,
        page_size=settings.page_size,
        weight_bytes=runner.num_bytes.weights,
        kv_bytes=runner.num_bytes.kv_pool,
        graph_bytes=runner.num_bytes.graphs,
    )
    logger.info(
        "Model loaded: %s on %s, %.0f MiB of weights, KV pool of %d tokens (%.0f MiB) in pages of %d, context %d, "
        "%s attention",
        facts.dtype,
        facts.device,
        facts.weight_bytes / 2**20,
        facts.max_total_num_tokens,
        facts.kv_bytes / 2**20,
        facts.page_size,
        facts.context_len,
        facts.attention_backend,
    )
    return facts

"""The scheduler's process: it loads the model, builds the scheduler, reports its limits, and runs the loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import zmq

from ..mem_cache.allocator import BaseAllocator, make_allocator
from ..mem_cache.base_prefix_cache import BasePrefixCache
from ..mem_cache.chunk_cache import ChunkCache
from ..mem_cache.evict_policy import equal_cost_depth
from ..mem_cache.kv_files import MAX_OVERHEAD_BYTES, KVFiles
from ..mem_cache.kv_storage import KVStorage
from ..mem_cache.radix_cache import RadixCache
from ..mem_cache.recurrent_cache import RecurrentCache
from ..mem_cache.req_to_token_pool import ReqToTokenPool
from ..model_executor.device.inference_mode import inference_mode
from ..model_executor.device.step_profiler import StepProfiler
from ..model_executor.runner.kv_identity import kv_identity
from ..model_executor.runner.load import load_runner
from ..model_executor.runner.model_runner import ModelRunner
from ..model_executor.runner.settings import resolve_settings, weight_bytes
from ..srt.adapters import AdapterRef
from ..srt.io_struct import DecodeOptions, ToDetokenizer, ToScheduler, ToTokenizer
from ..srt.ipc import Receiver, RunDir, Sender
from ..srt.kv_events import read_config
from ..srt.model_files.load_config import load_model_config
from ..srt.model_files.model_config import ModelConfig
from ..srt.profile_messages import StartProfileReq
from ..srt.request_options import RequestOptions
from ..srt.server_args import ServerArgs
from ..srt.start_reports import SchedulerReady
from ..srt.step_journal import NO_JOURNAL, NoJournal, StepJournal, open_journal
from ..srt.tenant_weights import parse_weights
from ..srt.text.tokenizer import Tokenizer, load_tokenizer
from ..srt.weight_messages import UpdateWeightsReq
from .adapters import Adapters
from .engine_runner import EngineRunner
from .engine_view import StepLog
from .explained_planner import ExplainedPlanner
from .grammar_backends import make_compiler
from .grammar_loader import GrammarLoader
from .grammar_worker import eos_ids_of, grammar_vocabulary
from .kv_cache_manager import KVCacheManager
from .kv_event_publisher import KVEventPublisher
from .kv_tiers import KVTiers
from .ngram_proposer import make_proposer
from .planner import PlanLimits, Planner
from .prefix_states import PrefixStates
from .req_factory import ReqFactory
from .request_queues import RequestQueues
from .schedule_recorder import ScheduleRecorder, SchedulerEnds
from .scheduler import Scheduler
from .scheduler_facts import max_total_tokens, scheduler_facts, weight_facts
from .scheduler_io import SchedulerIO
from .scheduler_metrics import SchedulerMetrics
from .text_stream import StopStringChecker
from .timeouts import Timeouts
from .touch_ahead import HostKVPool, TouchAhead
from .weight_updates import LoadedWeights, LoadWeights

logger = logging.getLogger(__name__)


class LoadedModel(NamedTuple):
    """What a scheduler needs that takes long to load."""

    server_args: ServerArgs
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    runner: ModelRunner

    @property
    def may_fork(self) -> bool:
        """Whether a fork of this process can run the model.

        A fork has none of torch's threads, which only the compiled operations do without, and no device.
        """
        runner = self.runner
        return runner.settings.device.type == "cpu" and runner.model.compiled and runner.host_kv is None

    def with_settings(self, server_args: ServerArgs) -> LoadedModel:
        """With other adapters, which `run_scheduler` loads."""
        return self._replace(server_args=server_args)


def load_model(server_args: ServerArgs, model_config: ModelConfig) -> LoadedModel:
    """Raises ValueError for settings that do not fit the model or the machine."""
    assert server_args.random_seed is not None, "the parent draws it, so that all processes have the same"
    read_config(server_args.kv_events_config)
    tokenizer = None
    if not server_args.skip_tokenizer_init:
        tokenizer = load_tokenizer(server_args.model_path, server_args.tokenizer_path)
    runner = load_runner(resolve_settings(server_args, model_config), model_config)
    return LoadedModel(server_args, model_config, tokenizer, runner)


def run_scheduler(
    loaded: LoadedModel,
    run_dir: RunDir,
    on_ready: Callable[[SchedulerReady], None],
    should_stop: Callable[[], bool],
) -> None:
    """Runs until `should_stop()`. Calls it after each step, and at least twice a second when nothing runs.

    Raises ValueError for settings that do not fit the model or the machine.
    """
    server_args, model_config, tokenizer, runner = loaded
    is_restart = run_dir.life > 0
    config = read_config(server_args.kv_events_config)
    kv_events = None if config is None else KVEventPublisher(config)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Receiver[ToScheduler] = Receiver(context, run_dir.scheduler, ToScheduler)
    detokenizer_link: Sender[ToDetokenizer] = Sender(context, run_dir.detokenizer)
    tokenizer_link: Sender[ToTokenizer] = Sender(context, run_dir.tokenizer)
    ends = SchedulerEnds(inbox, detokenizer_link, StepLog(time.monotonic))
    recorder = None
    if server_args.record_schedule is not None:
        path = Path(server_args.record_schedule)
        recorder = ScheduleRecorder(path, server_args, model_config, runner, time.monotonic, is_restart=is_restart)
        ends = recorder.wrap(ends)
    io = SchedulerIO(ends.inbox, ends.outbox, tokenizer_link, time.monotonic)
    journal = open_journal(run_dir.journal, runner.settings.max_running_requests)
    scheduler = build_scheduler(
        server_args,
        model_config,
        runner,
        tokenizer,
        io,
        time.monotonic,
        step_log=ends.step_log,
        journal=journal,
        kv_events=kv_events,
        tiers=_tiers(server_args, model_config, runner, is_restart=is_restart),
        host_kv_pool=None if runner.is_asynchronous else runner.kv_pool,
        load_weights=partial(_load_weights, runner),
        is_restart=is_restart,
    )
    on_ready(scheduler_facts(runner, model_config, scheduler.adapters.facts))
    with inference_mode():  # of this thread, so that no step has to enter it
        scheduler.run(should_stop)
    if recorder is not None:
        recorder.close()
    inbox.close()
    detokenizer_link.close()
    tokenizer_link.close()
    if kv_events is not None:
        kv_events.close()
    context.term()


def build_scheduler(
    server_args: ServerArgs,
    model_config: ModelConfig,
    runner: EngineRunner,
    tokenizer: Tokenizer | None,
    io: SchedulerIO,
    clock: Callable[[], float],
    *,
    step_log: StepLog | None = None,
    journal: StepJournal | NoJournal = NO_JOURNAL,
    kv_events: KVEventPublisher | None = None,
    tiers: KVTiers | None = None,
    host_kv_pool: HostKVPool | None = None,
    load_weights: LoadWeights | None = None,
    compile_grammars_here: bool = False,
    planner_type: type[Planner] | None = None,
    cost_depth: float | None = None,
    slot_of: Callable[[AdapterRef], int] | None = None,
    is_restart: bool = False,
) -> Scheduler:
    """The scheduler of a loaded model, with its pools and its cache. `clock`: that of `io`. `step_log`: measures the
    steps; None: by `clock`.

    `host_kv_pool`: the KV pool, if its memory is the host's. It is touched while the engine is idle.
    `load_weights`: loads other weights into `runner`; None: it has always the same.
    `compile_grammars_here`: in the thread that calls the scheduler, and not in a thread of their own. `planner_type`:
    another rule without drafts, for simulations; None: the planner of the settings. `cost_depth`: that of the eviction
    policy `value`; None: `equal_cost_depth` of the model. `slot_of`: the slot of any adapter, for simulations; None: of
    the loaded ones. `is_restart`: see `Adapters.begin`. Raises ValueError for an adapter that cannot be used.
    """
    rows = ReqToTokenPool(runner.settings.max_running_requests, runner.settings.context_len)
    cost_depth = cost_depth or equal_cost_depth(model_config)
    allocator, cache = _memory(server_args, cost_depth, runner, clock)
    states = PrefixStates(cache) if isinstance(cache, RecurrentCache) else None
    kv = KVCacheManager(rows, allocator, cache, tiers, states)
    queues = RequestQueues(server_args.max_queued_requests)
    adapters = Adapters(runner, server_args.max_loras or 0, queues, io)
    adapters.begin(server_args.adapter_paths, is_restart=is_restart)
    if kv_events is not None:
        kv_events.watch(kv, adapters.with_fingerprint)
    return Scheduler(
        _planner(server_args, runner, kv, queues, clock, planner_type),
        runner,
        io,
        ReqFactory(
            eos_ids=eos_ids_of(tokenizer, model_config),
            max_total_tokens=max_total_tokens(runner),
            stream_interval=server_args.stream_interval,
            low_priority_values_first=server_args.schedule_low_priority_values_first,
            slot_of=slot_of or adapters.slot_of,
            make_stop_checker=lambda options: _stop_checker(tokenizer, options),
        ),
        SchedulerMetrics(server_args.decode_log_interval, clock),
        GrammarLoader(
            lambda: grammar_vocabulary(tokenizer, model_config),
            lambda vocabulary: make_compiler(server_args.grammar_backend, vocabulary),
            in_thread=not compile_grammars_here,
        ),
        Timeouts(server_args.waiting_timeout, server_args.running_timeout, clock),
        adapters,
        enable_overlap=runner.is_asynchronous and not server_args.disable_overlap_schedule,
        clock=clock,
        journal=journal,
        max_queue_time_s=server_args.max_queue_time,
        kv_events=kv_events,
        touch_ahead=None if host_kv_pool is None else TouchAhead(allocator, host_kv_pool, clock),
        start_trace=_start_trace,
        load_weights=load_weights,
        step_log=step_log,
    )


def _load_weights(runner: ModelRunner, wanted: UpdateWeightsReq) -> LoadedWeights:
    """Loads weights into the runner. Raises ValueError and OSError."""
    load_format: Any = wanted.load_format
    config = load_model_config(wanted.model_path, load_format)
    assert runner.weights is not None
    # First, because it reads the files, and after the update nothing may fail.
    identity = kv_identity(runner.weights.settings_for(config), config, wanted.weight_version)
    settings = runner.weights.update(config)
    return LoadedWeights(identity, weight_facts(settings, weight_bytes(settings, config)))


def _start_trace(wanted: StartProfileReq) -> StepProfiler:
    return StepProfiler(
        cpu=wanted.cpu, gpu=wanted.gpu, record_shapes=wanted.record_shapes, with_stack=wanted.with_stack
    )


def _planner(
    server_args: ServerArgs,
    runner: EngineRunner,
    kv: KVCacheManager,
    queues: RequestQueues,
    clock: Callable[[], float],
    planner_type: type[Planner] | None,
) -> Planner:
    limits, slow_s = _limits(server_args, runner), server_args.explain_schedule
    if planner_type is not None:
        return planner_type(limits, kv, queues, clock=clock)
    proposer = make_proposer(server_args, queues)
    if slow_s is None:
        return Planner(limits, kv, queues, proposer, clock=clock)
    return ExplainedPlanner(limits, kv, queues, proposer, clock=clock, slow_s=slow_s)


def _limits(server_args: ServerArgs, runner: EngineRunner) -> PlanLimits:
    return PlanLimits(
        max_prefill_tokens=runner.settings.max_prefill_tokens,
        chunked_prefill_size=runner.settings.chunked_prefill_size,
        enable_mixed_chunk=server_args.enable_mixed_chunk,
        schedule_policy=server_args.schedule_policy,
        schedule_conservativeness=server_args.schedule_conservativeness,
        preemption_threshold=(
            server_args.priority_scheduling_preemption_threshold if server_args.enable_priority_scheduling else None
        ),
        admission_watermark=server_args.admission_watermark,
        joins_forced_tokens=not runner.is_asynchronous,
        max_itl_s=_max_itl_s(server_args),
        random_seed=server_args.random_seed or 0,
        tenant_weights=parse_weights(server_args.tenant_weights),
    )


def _max_itl_s(server_args: ServerArgs) -> float | Literal["auto"] | None:
    bound = server_args.max_itl_ms
    if isinstance(bound, str):
        return "auto" if bound == "auto" else None
    return bound / 1000


def _memory(
    server_args: ServerArgs,
    cost_depth: float,
    runner: EngineRunner,
    clock: Callable[[], float],
) -> tuple[BaseAllocator, BasePrefixCache]:
    settings = runner.settings
    allocator = make_allocator(runner.max_total_num_tokens, settings.page_size)
    if server_args.disable_radix_cache:
        return allocator, ChunkCache(settings.page_size)
    make_cache: Callable[..., RadixCache] = RadixCache
    if settings.max_saved_states is not None:  # their rows follow those of requests
        first = settings.max_running_requests + 1
        make_cache = partial(RecurrentCache, rows=range(first, first + settings.max_saved_states))
    return allocator, make_cache(
        allocator,
        settings.page_size,
        server_args.radix_eviction_policy,
        equal_cost_depth=cost_depth,
        max_retained_share=server_args.max_retained_share,
        clock=clock,
    )


def _tiers(
    server_args: ServerArgs, model_config: ModelConfig, runner: ModelRunner, *, is_restart: bool
) -> KVTiers | None:
    """The tiers below the KV pool. Raises ValueError if the folder of the files cannot be used, or is too small.

    `is_restart`: if the folder cannot be used, the engine runs without files, because a disk that has failed since the
    start must not end it.
    """
    host_kv = runner.host_kv
    if host_kv is None:
        return None
    storage = None
    if server_args.hicache_storage_dir is not None:
        max_bytes, block_bytes = int(server_args.hicache_storage_size * 2**30), host_kv.memory.shape[1]
        if max_bytes < block_bytes + MAX_OVERHEAD_BYTES:  # first, because KVFiles would remove what others have
            raise ValueError(
                f"--hicache-storage-size {server_args.hicache_storage_size:g} is less than one file of "
                f"{host_kv.block_len} tokens ({block_bytes} bytes)"
            )
        try:
            files = KVFiles(Path(server_args.hicache_storage_dir), max_bytes)
        except ValueError as error:
            if not is_restart:
                raise
            logger.error("The engine runs without KV files: %s", error)
        else:
            storage = KVStorage(files, host_kv.memory, time.monotonic)
    return KVTiers(
        page_size=runner.settings.page_size,
        block_len=host_kv.block_len,
        num_blocks=host_kv.num_blocks,
        block_bytes=host_kv.memory.shape[1],
        identity=kv_identity(runner.settings, model_config, server_args.weight_version),
        storage=storage,
        clock=time.monotonic,
    )


def _stop_checker(tokenizer: Tokenizer | None, options: RequestOptions) -> StopStringChecker:
    assert tokenizer is not None, "the TokenizerManager refuses stop strings without a tokenizer"
    return StopStringChecker(tokenizer, DecodeOptions.of(options))

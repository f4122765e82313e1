"""`tercet.LocalEngine`: the scheduler and the model of a server in the caller's process, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, NamedTuple, TypeVar

import msgspec

from ..model_executor.runner.load import load_runner
from ..model_executor.runner.settings import resolve_settings
from ..srt.adapters import AdapterRef
from ..srt.engine_settings import engine_settings, http_settings
from ..srt.errors import InvalidRequest
from ..srt.io_struct import AbortReq, FinishReason, ToDetokenizer, TokenOut, ToScheduler, ToTokenizer, pack_ids
from ..srt.logprobs import LogprobOptions, sglang_lists
from ..srt.model_files.load_config import load_model_config
from ..srt.model_files.lora_limits import with_lora_limits
from ..srt.model_files.recurrence_limits import check_recurrence
from ..srt.plain_values import check_in_json, converted, plain_value
from ..srt.request_options import RequestOptions
from ..srt.sampling_params import SamplingParams
from ..srt.server_args import ServerArgs
from ..srt.tenant_names import tenant_name
from ..srt.text.tokenizer import tokenizer_of
from .input_processor import InputProcessor
from .request_registry import check_name
from .scheduler import InFlight
from .scheduler_facts import scheduler_facts
from .scheduler_io import SchedulerIO
from .scheduler_process import build_scheduler
from .token_out_reader import TokenOutReader

T = TypeVar("T")


@dataclass(frozen=True)
class StepResult:
    """The outputs of one step, by request id."""

    new_tokens: dict[str, list[int]] = field(default_factory=dict)
    """New token ids, including a stop token. It has only requests with new tokens."""
    finish_reasons: dict[str, FinishReason] = field(default_factory=dict)
    """Why requests ended: StopFinish, LengthFinish or AbortFinish (in `srt.io_struct`). An AbortFinish with a
    `status_code` is an error, for example a full waiting queue. Without it, the request was aborted by `abort`."""
    logprobs: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    """Log probabilities of the new tokens, and with a request's first tokens those of its prompt. The keys and values
    are those in `meta_info` of `/generate`, such as `output_token_logprobs`."""

    @property
    def finished(self) -> list[str]:
        """The requests that ended."""
        return list(self.finish_reasons)


class LocalEngine:
    """A loaded model with its scheduler, in this process: no other processes, no sockets, no threads of its own.

    `LocalEngine(model_path, **settings)` takes the settings of ServerArgs that concern the model and the scheduler.
    `LocalEngine(server_args=...)` takes all settings as one object. `LocalEngine()` loads the default model, if it is
    installed. Scheduler, runner, defaults and checks are those of a server, so a request gets the same tokens here.

    The constructor sets up this process like a scheduler process. On a CPU with compiled kernels, the kernels use all
    of torch's threads, and torch's own operations use one thread from then on (`torch.get_num_threads()` is 1). Call
    all methods from the same thread.

    The constructor raises ValueError or OSError for invalid settings or an invalid model. Methods raise InvalidRequest,
    a ValueError.
    """

    def __init__(
        self,
        model_path: str | PathLike[str] | None = None,
        *,
        server_args: ServerArgs | None = None,
        **settings: Any,
    ) -> None:
        refused = {
            **http_settings(),
            **dict.fromkeys(
                (
                    "kv_events_config",
                    "log_level",
                    "log_format",
                    "watchdog_timeout",
                    "soft_watchdog_timeout",
                    "engine_restarts",
                    "engine_restart_window",
                    "crash_report_requests",
                    "record_schedule",
                    "enable_return_hidden_states",
                    "weight_version",
                    "enable_hierarchical_cache",
                    "hicache_size",
                    "hicache_storage_dir",
                    "hicache_storage_size",
                ),
                "engines of several processes",
            ),
        }
        given = engine_settings(model_path, server_args, settings, refused=refused)
        given = with_lora_limits(given).with_seed()
        self.model_config = load_model_config(given.model_path, given.load_format)
        check_recurrence(given, self.model_config)
        self.server_args = given
        self.tokenizer = tokenizer_of(self.server_args)
        """None with `skip_tokenizer_init`; prompts must be token ids then."""
        self.runner = load_runner(resolve_settings(self.server_args, self.model_config), self.model_config)
        self._inbox, self._outbox = _Inbox(), _Outbox()
        self._reader = TokenOutReader()
        io = SchedulerIO(self._inbox, self._outbox, _Nobody(), time.monotonic)
        self.scheduler = build_scheduler(
            self.server_args,
            self.model_config,
            self.runner,
            self.tokenizer,
            io,
            time.monotonic,
            compile_grammars_here=True,
        )
        self._inputs = InputProcessor(
            self.server_args, self.model_config, self.tokenizer, scheduler_facts(self.runner, self.model_config)
        )
        self._unfinished: set[str] = set()
        self._scored: dict[str, _Scored] = {}
        self._in_flight: InFlight | None = None

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        sampling_params: Mapping[str, Any] | SamplingParams | None = None,
        *,
        cache_salt: str = "",
        lora_path: str | None = None,
        tenant: str = "",
        priority: int = 0,
        waiting_timeout: float | None = None,
        running_timeout: float | None = None,
        session_id: str = "",
        retention_seconds: float | None = None,
        prediction: str | Sequence[int] = "",
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        token_ids_logprob: Sequence[int] = (),
        return_text_in_logprobs: bool = False,
    ) -> None:
        """Add a request to the waiting queue. The next step may run it.

        `prompt`: a text, or token ids. `sampling_params`: parameters that a mapping does not give have the model's
        defaults. `n` must be 1; add one request for each sample. `cache_salt`: only requests with the same salt share
        cached prefixes. `lora_path`: the name of an adapter of the setting `lora_paths`. `tenant`: whose request it is;
        the tenants share the engine with `schedule_policy="dlpm"`.
        `prediction`: a text, or token ids, that the output probably resembles; drafts come from it, too. The other
        arguments are the fields of `/generate`; those of log probabilities fill `StepResult.logprobs`.

        A grammar is compiled in this call, without the limits on time and memory that a server has.

        Raises InvalidRequest where a server answers with status 400. Errors that only the scheduler can find, such as
        a full waiting queue, are in the `finish_reasons` of the next step.
        """
        call = _converted(
            _Call, request_id=request_id, prompt=prompt, return_logprob=return_logprob, prediction=prediction
        )
        check_name(request_id, "request_id")
        if request_id in self._unfinished:
            raise InvalidRequest(f"request id {request_id!r} is in use by a request that has not finished")
        sampling = self._inputs.make_sampling(_plain(sampling_params))
        if sampling.n != 1:
            raise InvalidRequest(f"n must be 1 in a LocalEngine, got {sampling.n}; add one request for each sample")
        if sampling.grammar is not None:
            self.scheduler.check_grammar(sampling.grammar)
        given = call.prompt
        all_ids = self._inputs.encode(given) if isinstance(given, str) else given
        ids = self._inputs.check_ids(all_ids, is_text=isinstance(given, str))
        logprobs = _converted(
            LogprobOptions,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            token_ids_logprob=token_ids_logprob,
            return_text_in_logprobs=return_text_in_logprobs,
        )
        options = _converted(
            RequestOptions,
            sampling=sampling,
            cache_salt=cache_salt,
            tenant=tenant_name(tenant) if isinstance(tenant, str) else tenant,
            priority=priority,
            waiting_timeout=waiting_timeout,
            running_timeout=running_timeout,
            session_id=session_id,
            retention_seconds=retention_seconds,
            stream=True,
            logprobs=logprobs if return_logprob else None,
            adapter=self._adapter(lora_path),
            prediction=self._inputs.prediction_ids(call.prediction) if call.prediction else b"",
        )
        self._inputs.check_options(options)
        self._inputs.check_logprobs(options, len(ids))
        seed = self._inputs.draw_seed() if sampling.sampling_seed is None else sampling.sampling_seed
        self._inbox.messages.append(self._inputs.generate_req(request_id, pack_ids(ids), options, seed))
        self._unfinished.add(request_id)
        if return_logprob:
            self._scored[request_id] = _Scored(logprobs, ids)

    def step(self) -> StepResult:
        """Run one turn of the scheduler: plan and launch a step of the model, and process a finished one.

        On a GPU with overlap, the finished step is the one before, so the first call returns no tokens. Without
        unfinished requests it returns at once.
        """
        self._in_flight = self.scheduler.turn(self._in_flight)
        result = StepResult()
        for message in self._outbox.take():
            for out in self._reader.read(message):
                if out.token_ids:
                    result.new_tokens.setdefault(out.rid, []).extend(out.token_ids)
                if out.logprobs is not None:
                    self._add_logprobs(result, out)
                if out.finish is not None:
                    result.finish_reasons[out.rid] = out.finish
                    self._unfinished.discard(out.rid)
                    self._scored.pop(out.rid, None)
        return result

    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._unfinished)

    def abort(self, request_id: str) -> bool:
        """Abort a request. Returns whether it exists. A later step reports its end."""
        if request_id not in self._unfinished:
            return False
        self._inbox.messages.append(AbortReq(request_id))
        return True

    def _adapter(self, name: str | None) -> AdapterRef | None:
        """Raises InvalidRequest for an adapter that is not loaded."""
        if not name:
            return None
        loaded = {one.name: one.ref for one in self.scheduler.adapters.facts}
        if name not in loaded:
            names = ", ".join(map(repr, loaded)) or "none"
            raise InvalidRequest(f"the LoRA adapter {name!r} is not loaded; loaded: {names}", param="lora_path")
        return loaded[name]

    def _add_logprobs(self, result: StepResult, out: TokenOut) -> None:
        assert out.logprobs is not None
        options, prompt_ids = self._scored[out.rid]
        text_of = None
        if options.return_text_in_logprobs and self.tokenizer is not None:
            text_of = self.tokenizer.token_text
        fields = result.logprobs.setdefault(out.rid, {})
        for name, items in sglang_lists(options, prompt_ids, out.token_ids, out.logprobs, text_of).items():
            fields.setdefault(name, []).extend(items)


class _Call(msgspec.Struct):
    """The arguments of a request besides its options."""

    request_id: str
    prompt: str | list[int]
    return_logprob: bool
    prediction: str | list[int]


class _Scored(NamedTuple):
    """A request with log probabilities."""

    options: LogprobOptions
    prompt_ids: Sequence[int]


class _Inbox:
    """Messages for the scheduler. `wait` never sleeps, because messages come only from this thread."""

    def __init__(self) -> None:
        self.messages: list[ToScheduler] = []

    def drain(self) -> list[ToScheduler]:
        messages, self.messages = self.messages, []
        return messages

    def wait(self, timeout_s: float) -> bool:
        return bool(self.messages)


class _Outbox:
    """The scheduler's outputs, until a step takes them."""

    def __init__(self) -> None:
        self._messages: list[ToDetokenizer] = []

    def send(self, message: ToDetokenizer, /) -> None:
        self._messages.append(message)

    def take(self) -> list[ToDetokenizer]:
        messages, self._messages = self._messages, []
        return messages


class _Nobody:
    def send(self, message: ToTokenizer, /) -> None:
        """Drops heartbeats."""


def _plain(given: Mapping[str, Any] | SamplingParams | None) -> Mapping[str, Any]:
    """Sampling parameters by name. SamplingParams give all of them."""
    if isinstance(given, SamplingParams):
        return msgspec.structs.asdict(given)
    if not isinstance(given, Mapping | None):
        message = f"sampling_params must be a mapping or SamplingParams, got {type(given).__name__}"
        raise InvalidRequest(message, param="sampling_params")
    names = SamplingParams.__struct_fields__
    for name in given or ():
        if name not in names:
            raise InvalidRequest(f"unknown sampling parameter {name!r}; known: {', '.join(names)}", param=name)
    plain: Mapping[str, Any] = plain_value(dict(given or {}))
    for name, value in plain.items():
        check_in_json(value, name)
    return plain


def _converted(kind: type[T], **values: Any) -> T:
    """A struct of these values. Raises InvalidRequest for a value of a wrong type or out of range."""
    plain = {name: one if isinstance(one, msgspec.Struct) else plain_value(one) for name, one in values.items()}
    for name, value in plain.items():
        if name not in ("prompt", "prediction"):  # they are checked when they are tokenised
            check_in_json(value, name)
    return converted(kind, plain)

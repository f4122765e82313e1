"""`tercet.Engine`: the engine without HTTP. Requests and answers are those of /generate, as Python values.

with tercet.Engine(model_path="...") as engine:
    engine.generate("The capital of France is", {"max_new_tokens": 8})["text"]
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, NoReturn, TypeAlias, overload

import msgspec

from ... import __version__
from ...managers.pause_control import PauseMode
from ..engine_settings import engine_settings, http_settings
from ..errors import InvalidRequest
from ..plain_values import check_in_json, is_utf8, plain_value
from ..sampling_params import SamplingParams
from ..server_args import ServerArgs
from ..text.tokenizer import Tokenizer
from . import admin, lora, native, pausing, profiling, weights
from .engine_request import AsyncEngineStream, EngineRequest, EngineStream, make_sample_limit
from .engine_thread import EngineThread
from .native_protocol import GenerateBody
from .processes import CHILD_MODULE
from .routing import Server
from .wire import shown

Sampling: TypeAlias = Mapping[str, Any] | SamplingParams | Sequence[Mapping[str, Any] | SamplingParams] | None

_ALSO_OF_AN_ENGINE = ("served_model_name", "incremental_streaming_output")
"""Settings of the HTTP server that an Engine also honours."""


class Engine:
    """The engine as a Python object. It may be used from any thread, inside a running event loop, and in a notebook.

    `Engine(model_path=..., **settings)` takes the settings of ServerArgs, except those of the HTTP server. `log_level`
    defaults to "warning". `Engine(server_args=...)` takes all settings as one object. `Engine()` loads the default
    model, if it is installed. The constructor waits until the model is loaded. The engine's processes end at
    `shutdown`, at the end of its `with` block, when the Engine is garbage-collected, when the interpreter exits, and
    when the interpreter is killed.

    The constructor raises ValueError or OSError for invalid settings or an invalid model, and EngineDead when a process
    fails. Methods raise subclasses of `tercet.TercetError`: InvalidRequest for an invalid request, EngineDead after
    a process has died. `tercet` has these classes.
    """

    _child_module: ClassVar[str] = CHILD_MODULE
    """The module that a child process runs; tests replace it."""

    def __init__(
        self,
        model_path: str | PathLike[str] | None = None,
        *,
        server_args: ServerArgs | None = None,
        **settings: Any,
    ) -> None:
        if server_args is None:
            settings.setdefault("log_level", "warning")
        refused = {name: owner for name, owner in http_settings().items() if name not in _ALSO_OF_AN_ENGINE}
        args = engine_settings(model_path, server_args, settings, refused=refused)
        self._thread = EngineThread(args, self._child_module)
        self._server = Server(self._thread.core.tokenizer_manager, __version__)
        self._sample_limit = make_sample_limit(self.server_args)
        # Runs once: at shutdown(), when this object is garbage-collected, or before the interpreter exits.
        self._finalizer = weakref.finalize(self, self._thread.stop)

    @property
    def server_args(self) -> ServerArgs:
        """The settings, with those of the weights in use."""
        return self._server.manager.server_args

    @overload
    def generate(
        self,
        prompt: str | Sequence[str] | None = ...,
        sampling_params: Sampling = ...,
        *,
        stream: Literal[True],
        **request: Any,
    ) -> EngineStream: ...
    @overload
    def generate(
        self,
        prompt: str | Sequence[str] | None = ...,
        sampling_params: Sampling = ...,
        *,
        stream: bool = ...,
        progress: bool | None = ...,
        **request: Any,
    ) -> Any: ...
    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Sampling = None,
        *,
        stream: bool = False,
        progress: bool | None = None,
        **request: Any,
    ) -> Any:
        """Generates the answer to one prompt, or to each prompt of a list.

        Returns a dict; for a list of prompts, or `n` > 1, a list of dicts. With `stream`, returns an iterator of dicts,
        whose text and token ids are cumulative (unless `incremental_streaming_output` is set). Closing the iterator
        aborts the request.

        `request`: further fields of /generate's body, such as `input_ids` (instead of `prompt`), `rid`, `cache_salt`,
        `tenant`, `lora_path`.
        `progress`: whether to show a progress bar. By default, a terminal shows one for more than 16 samples.

        A list may have any length: at most `max_queued_requests` samples are in the scheduler at a time. An exception
        during the call, Ctrl-C included, aborts all its samples.
        """
        made = self._request(prompt, sampling_params, request, stream=stream, progress=progress)
        if stream:
            return EngineStream(self, self._thread, made)
        return self._thread.wait(made.run(progress))

    @overload
    def async_generate(
        self,
        prompt: str | Sequence[str] | None = ...,
        sampling_params: Sampling = ...,
        *,
        stream: Literal[True],
        **request: Any,
    ) -> AsyncEngineStream: ...
    @overload
    def async_generate(
        self,
        prompt: str | Sequence[str] | None = ...,
        sampling_params: Sampling = ...,
        *,
        stream: bool = ...,
        progress: bool | None = ...,
        **request: Any,
    ) -> Awaitable[Any]: ...
    def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Sampling = None,
        *,
        stream: bool = False,
        progress: bool | None = None,
        **request: Any,
    ) -> Any:
        """`generate` for coroutines of any event loop. Returns an awaitable.

        With `stream`, returns an asynchronous iterator; awaiting it first starts the request. Cancelling the waiting
        task aborts the request, and ends the stream. So does a time limit for one answer (`asyncio.wait_for`).
        """
        made = self._request(prompt, sampling_params, request, stream=stream, progress=progress)
        if stream:
            return AsyncEngineStream(self, self._thread, made)
        return self._async_answer(made, progress)

    def abort(self, rid: str) -> bool:
        """Aborts the request with this name. Returns whether there was such a request."""
        return self._thread.wait(self._abort(rid))

    def flush_cache(self, timeout_s: float = 0.0) -> None:
        """Empties the prefix cache. Raises EngineBusy if requests are still running or waiting after `timeout_s`."""
        if not timeout_s >= 0:
            raise InvalidRequest(f"timeout_s must be 0 or more, got {timeout_s}", param="timeout_s")
        self._thread.wait(self._server.manager.flush_cache(timeout_s))

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Stops generation. Returns when no step runs. New requests wait until `continue_generation`.

        `mode`: abort: requests end with the output so far; retract: running requests release their KV, so the cache
        can be flushed; in_place: running requests keep their KV. Their tokens do not depend on the pause.
        """
        wanted = pausing.PAUSE_CODEC.convert({"mode": mode}).mode or "abort"
        self._thread.wait(self._server.manager.pause.begin(wanted))

    def continue_generation(self) -> None:
        """Ends a pause. Does nothing without one."""
        self._thread.wait(self._server.manager.pause.end())

    def update_weights_from_disk(
        self,
        model_path: str | PathLike[str],
        load_format: str = "auto",
        *,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
        drain_timeout: float | None = None,
    ) -> dict[str, Any]:
        """Loads other weights of the same model, from a folder or a GGUF file. Returns the answer of
        /update_weights_from_disk.

        Running requests end first, unless generation is paused. Raises InvalidRequest for weights that do not suit the
        engine, and EngineBusy if requests still run after `drain_timeout` seconds (default 60) or keep KV of the old
        weights in the pause. After an error the old weights are in use.
        """
        path = str(_path(model_path, "model_path").absolute())
        body = {
            "model_path": path,
            "load_format": load_format,
            "abort_all_requests": abort_all_requests,
            "weight_version": weight_version,
            "drain_timeout": drain_timeout,
        }
        wanted = weights.UPDATE_WEIGHTS_CODEC.convert(body)
        answer: dict[str, Any] = msgspec.structs.asdict(
            self._thread.wait(weights.load_weights(self._server.manager, path, wanted))
        )
        return answer

    def load_lora_adapter(self, lora_name: str, lora_path: str | PathLike[str]) -> dict[str, Any]:
        """Loads a LoRA adapter from a folder in PEFT's format. Returns the answer of /load_lora_adapter.

        Raises InvalidRequest for an adapter that does not suit the engine, for a name in use and if no slot is free.
        """
        path = str(_path(lora_path, "lora_path").resolve())
        wanted = lora.LOAD_CODEC.convert({"lora_name": lora_name, "lora_path": path})
        loading = lora.load_adapter(self._server.manager, wanted.lora_name, path)
        answer: dict[str, Any] = msgspec.structs.asdict(self._thread.wait(loading))
        return answer

    def unload_lora_adapter(self, lora_name: str) -> dict[str, Any]:
        """Unloads a LoRA adapter when its requests have ended. New ones that name it are refused from now on. Returns
        the answer of /unload_lora_adapter. Raises InvalidRequest if there is no such adapter."""
        wanted = lora.UNLOAD_CODEC.convert({"lora_name": lora_name})
        unloading = lora.unload_adapter(self._server.manager, wanted.lora_name)
        answer: dict[str, Any] = msgspec.structs.asdict(self._thread.wait(unloading))
        return answer

    def start_profile(
        self,
        output_dir: str | PathLike[str],
        *,
        num_steps: int | None = None,
        activities: Sequence[str] | None = None,
        record_shapes: bool = False,
        with_stack: bool = False,
        profile_prefix: str | None = None,
    ) -> str:
        """Records the next steps with torch's profiler, until `num_steps` or `stop_profile`. Returns the file of the
        trace, in Chrome's format. The arguments are the fields of /start_profile."""
        body = {
            "num_steps": num_steps,
            "activities": None if activities is None else list(activities),
            "record_shapes": record_shapes,
            "with_stack": with_stack,
            "profile_prefix": profile_prefix,
        }
        wanted = profiling.START_PROFILE_CODEC.convert(body)
        folder = _path(output_dir, "output_dir").resolve()
        return self._thread.wait(profiling.begin_profile(self._server.manager, folder, wanted))

    def stop_profile(self) -> str:
        """Ends the profile. Returns the file of the trace, which is written. Raises InvalidRequest without a
        profile."""
        return self._thread.wait(self._server.manager.profile.stop())

    def get_server_info(self) -> dict[str, Any]:
        """The response of /server_info: the effective settings, the limits, and the scheduler's state."""
        return self._thread.wait(admin.collect_server_info(self._server))

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer and chat template; None with `skip_tokenizer_init`."""
        return self._server.manager.inputs.tokenizer

    def shutdown(self) -> None:
        """Stops the engine and its processes. Running requests raise EngineDead. A second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Engine can be neither pickled nor copied; create it in the process that uses it")

    def _request(
        self,
        prompt: str | Sequence[str] | None,
        sampling: Sampling,
        request: Mapping[str, Any],
        *,
        stream: bool,
        progress: bool | None,
    ) -> EngineRequest:
        if stream and progress:
            raise InvalidRequest("a stream has no progress bar", param="progress")
        return EngineRequest(self._server, self._sample_limit, _body(prompt, sampling, request, stream=stream))

    async def _async_answer(self, request: EngineRequest, progress: bool | None) -> Any:
        """The complete answer. The coroutine keeps this Engine alive."""
        return await self._thread.wait_async(request.run(progress))

    async def _abort(self, rid: str) -> bool:
        return self._server.manager.abort(rid)


def _body(
    prompt: str | Sequence[str] | None, sampling: Sampling, request: Mapping[str, Any], *, stream: bool = False
) -> GenerateBody:
    """The body of /generate for a call of `generate`, with the same checks. Raises InvalidRequest."""
    for name in ("text", "stream", "sampling_params"):
        if name in request:
            raise InvalidRequest(f"{name} is an argument of generate(); it must not be repeated as a field", param=name)
    plain = plain_value({"text": prompt, "sampling_params": _plain_sampling(sampling), "stream": stream, **request})
    for name, value in plain.items():
        if name not in ("text", "input_ids"):  # prompts are checked when they are tokenised
            check_in_json(value, name)
    return native.GENERATE_CODEC.convert(plain)


def _plain_sampling(sampling: Any) -> Any:
    """Sampling parameters as plain values.

    A SamplingParams object sets every parameter. A mapping leaves the others to the model's defaults.
    """
    if isinstance(sampling, Iterable) and not isinstance(sampling, Mapping | str | bytes):
        return [_plain_params(params) for params in sampling]
    return _plain_params(sampling)


def _plain_params(params: Any) -> Any:
    return msgspec.structs.asdict(params) if isinstance(params, SamplingParams) else params


def _path(given: str | PathLike[str], param: str) -> Path:
    """A path that a caller names. Raises InvalidRequest for one that no file or no message can have."""
    path, text = Path(given), os.fspath(given)
    if not text or "\0" in text or not is_utf8(text):  # an empty path would be the working directory
        raise InvalidRequest(
            f"{param} must be a path of at least one character, in valid UTF-8 and without NUL characters, "
            f"got {shown(text)}",
            param=param,
        )
    return path

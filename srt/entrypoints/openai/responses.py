"""POST /v1/responses: a conversation of items becomes a chat, and its answer becomes items."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ...errors import InvalidRequest, TercetError
from ...io_struct import LengthFinish, StopFinish, TextOut
from ...sampling_params import SamplingParams
from ..error_handlers import text_with_param
from ..job import Sample
from ..lora import target_of
from ..request_names import RequestNames, names_of
from ..routing import Server, in_thread_if_large
from ..wire import BodyCodec
from .chat import CHAT_CODEC, run_chat
from .chat_protocol import ChatBody
from .common import usage_of
from .output_items import OutputItems
from .planned_format import NamedEventsFormat
from .responses_answer import (
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseStatus,
    ResponseUsage,
)
from .responses_input import chat_of, functions_of, items_of
from .responses_protocol import ResponsesBody, ResponsesTool, ResponsesToolChoice
from .storing import Storing
from .tools import AnswerPlan

RESPONSES_CODEC = BodyCodec(ResponsesBody)

_THEIR_NAMES = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format", "messages": "input"}
"""The fields of a chat that have another name in this API."""
_TOOL = re.compile(r"tools\[(\d+)\]")
_encode = msgspec.json.Encoder().encode


async def responses(server: Server, request: Request, body: ResponsesBody) -> ASGIApp:
    """Handler of /v1/responses."""
    model, adapter = target_of(server.manager, body.model, body.lora_path)
    names = names_of(request.scope)
    name = f"resp_{names.hex()}"
    choice = None if body.truncation is None else body.truncation == "auto"
    truncates = server.manager.inputs.truncates_prompt(choice)
    storing = Storing.of(server, request, body)
    try:
        chat = await in_thread_if_large(request, _chat, body, name, names, storing)
        return await run_chat(
            server,
            request,
            chat,
            name,
            lambda plan, sampling: _ResponsesFormat(body, name, model, plan, sampling, names, truncates, storing),
            adapter=adapter,
            truncates=truncates,
        )
    except InvalidRequest as error:
        raise _renamed(error, body) from None


def _chat(body: ResponsesBody, name: str, names: RequestNames, storing: Storing) -> ChatBody:
    before = storing.conversation()
    chat = CHAT_CODEC.convert({**chat_of(body, before), "rid": name})
    storing.note_input(items_of(body), names, before)
    return chat


def _renamed(error: InvalidRequest, body: ResponsesBody) -> InvalidRequest:
    """The error with the field names of this API."""
    message, param = error.message, error.param or ""
    if message.startswith("messages must "):
        message = "input" + message.removeprefix("messages")
    if param.startswith("response_format.json_schema."):  # text.format has the fields of a schema itself
        message, param = (text.replace("response_format.json_schema", "response_format") for text in (message, param))
    for ours, theirs in _THEIR_NAMES.items():
        if param == ours or param.startswith(f"{ours}."):
            param = theirs + param.removeprefix(ours)
            message = message.replace(ours, theirs) if ours != "messages" else message
    tool = _TOOL.match(param)
    if tool is not None:  # a chat has the functions of all namespaces in one list
        places = [place for _, place in functions_of(body)]
        param = places[int(tool[1])].path + param[tool.end() :]
    return type(error)(message, param=param or None)


class _ResponsesFormat(NamedEventsFormat):
    def __init__(
        self,
        body: ResponsesBody,
        name: str,
        model: str,
        plan: AnswerPlan,
        sampling: SamplingParams,
        names: RequestNames,
        truncates: bool,
        storing: Storing,
    ) -> None:
        super().__init__(plan, names, is_stream=bool(body.stream))
        self._storing = storing
        self._body = body
        self._model = model
        self._sampling = sampling
        self._truncation: Literal["auto", "disabled"] = "auto" if truncates else "disabled"
        self._name = name
        self._tools = [_repeated(_as_given(tool), "tools") for tool in body.tools or ()]
        self._format = _repeated((body.text and body.text.format) or {"type": "text"}, "text.format")
        self._items: OutputItems

    def begin(self, samples: Sequence[Sample]) -> None:
        super().begin(samples)
        in_namespaces = {
            name: (place.namespace.name, place.function.name)
            for name, place in functions_of(self._body)
            if place.namespace is not None
        }
        self._items = OutputItems(self._tell, self._names, self._readers[0].call_id, in_namespaces)
        self._tell("response.created", response=self._response("in_progress"))
        self._tell("response.in_progress", response=self._response("in_progress"))

    def events(self, sample: Sample, out: TextOut) -> bytes:
        self._read(out)
        return self._told()

    def last_events(self) -> bytes:
        response = self._final()
        self._storing.note_response(response)  # before the client gets its last event, and continues the response
        self._tell(f"response.{'completed' if response.status == 'completed' else 'incomplete'}", response=response)
        return self._told()

    def failure(self, error: TercetError) -> bytes:
        if isinstance(error, InvalidRequest):
            error = _renamed(error, self._body)
        shown = ResponseError(error.code or "server_error", text_with_param(error))
        self._tell("response.failed", response=self._response("failed", output=self._items.so_far(), error=shown))
        return self._told()

    def full_response(self) -> Any:
        self._read(self._samples[0].collected)
        response = self._final()
        self._storing.note_response(response)
        return response

    def _read(self, out: TextOut) -> None:
        ended = out.finish is not None
        reader = self._readers[0]
        reader.count(out.token_ids)
        self._items.add(reader.parts(out.text, is_last=ended))
        if ended:
            self._items.end("completed" if isinstance(out.finish, StopFinish) else "incomplete")
            self.note_end(self._samples[0])

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        return ResponseEvent(type=kind, sequence_number=self._num_events, **fields)

    def _final(self) -> Response:
        finish = self._samples[0].finish
        if isinstance(finish, StopFinish):
            took_s = self._samples[0].generation.finished_s or 0.0
            completed_at = int(self._names.began_s + took_s)
            return self._response("completed", output=self._items.done, completed_at=completed_at)
        if isinstance(finish, LengthFinish):
            cut = IncompleteDetails("max_output_tokens")
            return self._response("incomplete", output=self._items.done, incomplete_details=cut)
        return self._response("cancelled", output=self._items.done)

    def _usage(self) -> ResponseUsage:
        usage = usage_of(self._samples)
        cached = usage.prompt_tokens_details.cached_tokens
        thoughts = self._readers[0].num_reasoning_tokens
        return ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(cached, 0),
            usage.completion_tokens,
            OutputTokensDetails(thoughts),
            usage.total_tokens,
        )

    def _response(
        self,
        status: ResponseStatus,
        *,
        output: Sequence[OutputItem] = (),
        completed_at: int | None = None,
        incomplete_details: IncompleteDetails | None = None,
        error: ResponseError | None = None,
    ) -> Response:
        body, sampling = self._body, self._sampling
        return Response(
            id=self._name,
            created_at=self._names.created,
            completed_at=completed_at,
            status=status,
            incomplete_details=incomplete_details,
            error=error,
            model=self._model,
            output=list(output),
            usage=None if status == "in_progress" else self._usage(),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            tools=self._tools,
            tool_choice=_choice_as_given(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            text={"format": self._format},
            reasoning={
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": body.reasoning.summary if body.reasoning else None,
            },
            metadata=body.metadata or {},
            user=body.user,
            safety_identifier=body.safety_identifier,
            prompt_cache_key=body.prompt_cache_key,
            store=self._storing.is_on,
            previous_response_id=body.previous_response_id,
            truncation=self._truncation,
        )


def _repeated(given: Any, param: str) -> msgspec.Raw:
    """The JSON of a value of the request that the answer repeats.

    Raises InvalidRequest: the decoder and the encoder may differ by a level or two in the depth that they can take.
    """
    try:
        return msgspec.Raw(_encode(given))
    except RecursionError:
        raise InvalidRequest(f"{param} is nested too deeply", param=param) from None


def _as_given(tool: ResponsesTool) -> dict[str, Any]:
    """A tool, without the fields that the other type has."""
    others = ("tools",) if tool.type == "function" else ("parameters", "strict")
    return {name: getattr(tool, name) for name in tool.__struct_fields__ if name not in others}


def _choice_as_given(choice: ResponsesToolChoice | str | None) -> Any:
    """`tool_choice`, without the fields that another type has."""
    if isinstance(choice, ResponsesToolChoice):
        return {name: value for name, value in msgspec.to_builtins(choice).items() if value is not None}
    return "auto" if choice is None else choice

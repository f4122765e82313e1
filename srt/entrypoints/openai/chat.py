"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from ....managers.request_registry import Prompt
from ...adapters import AdapterRef
from ...errors import InvalidRequest, UnsupportedField
from ...io_struct import TextOut
from ...logprobs import LogprobOptions
from ...sampling_params import SamplingParams
from ..job import Sample
from ..lora import target_of
from ..options import options_of
from ..request_names import RequestNames, names_of
from ..routing import Server, in_thread_if_large
from ..sse import answer, event
from ..wire import BodyCodec, are_equal, shown
from .chat_protocol import (
    MAX_MESSAGES,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatFinishName,
    ChunkChoice,
    Delta,
    Message,
    TextPart,
)
from .common import Frame, check_stream_options, finish_name, matched_stop, sampling_of, usage_of
from .logprobs import ChatLogprobs, chat_logprobs, check_top
from .planned_format import PlannedFormat
from .protocol import CompletionTokensDetails, Usage
from .structured import grammar_field
from .tool_protocol import GivenToolCall
from .tools import AnswerPlan, constrained, limits_reasoning, plan_answer, see_marks

CHAT_CODEC = BodyCodec(ChatBody)

_RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})


async def chat_completions(server: Server, request: Request, body: ChatBody) -> ASGIApp:
    """Handler of /v1/chat/completions."""
    names = names_of(request.scope)
    target = target_of(server.manager, body.model, body.lora_path)
    frame = Frame(body, "chatcmpl", target.model, names)
    check_stream_options(body)

    def make_format(plan: AnswerPlan, sampling: SamplingParams) -> _ChatFormat:
        return _ChatFormat(server, frame, plan, names, has_prediction=body.prediction is not None)

    return await run_chat(server, request, body, frame.id, make_format, adapter=target.adapter)


async def run_chat(
    server: Server,
    request: Request,
    body: ChatBody,
    name: str,
    make_format: Callable[[AnswerPlan, SamplingParams], PlannedFormat],
    *,
    adapter: AdapterRef | None = None,
    truncates: bool | None = None,
) -> ASGIApp:
    """Runs a chat. `name`: of the request, for /abort_request. `make_format` makes the response format. `adapter`: that
    the body names. `truncates`: as in `Prompt`."""
    logprobs = _logprobs(body)
    plan = plan_answer(
        server.manager,
        [tool.function for tool in body.tools or ()],
        body.tool_choice,
        parallel=body.parallel_tool_calls,
        separate_reasoning=body.separate_reasoning,
        stream_reasoning=body.stream_reasoning,
        most_thoughts=_most_thoughts(server, body),
    )
    kwargs = _template_kwargs(server, body, plan)
    body, plan = await in_thread_if_large(request, constrained, body, plan)
    sampling = await _sampling(server, request, body, plan)
    prediction = await in_thread_if_large(request, _prediction, server, body)
    plan = see_marks(plan, sampling, server.manager.inputs.tokenizer)
    response_format = make_format(plan, sampling)
    # An answer with many log probabilities is written in a thread, and the manager belongs to the event loop.
    loop, tell = asyncio.get_running_loop(), server.manager.on_tool_call
    response_format.on_tool_call = lambda sample: loop.call_soon_threadsafe(tell, sample)
    render = functools.partial(
        in_thread_if_large,
        request,
        render_chat,
        server,
        body.messages,
        tools=plan.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        kwargs=kwargs,
    )
    prompt = Prompt(
        content=response_format.noting_prompt(render, _continued(body)),
        options=options_of(
            body,
            sampling,
            logprobs,
            shown_tokens=list(plan.shown_tokens),
            adapter=adapter,
            prediction=prediction,
        ),
        rid=name,
        add_special_tokens=False,  # the chat template writes them
        truncates=truncates,
        param="messages",
        grammar_param=plan.constrained_by if plan.constraint is not None else grammar_field(body),
        reasoning=lambda: response_format.reasoning,
    )
    return await answer(server, request, [prompt], response_format=response_format, name=name)


async def _sampling(server: Server, request: Request, body: ChatBody, plan: AnswerPlan) -> SamplingParams:
    """The sampling parameters of a body that `constrained` has returned.

    The body may have a structural tag that `constrained` has written. An error in this tag names the field of the
    client that it stands for.
    """
    max_tokens, max_tokens_field = _max_tokens(body)
    try:
        return await in_thread_if_large(request, sampling_of, server.manager, body, max_tokens, max_tokens_field)
    except InvalidRequest as error:
        if plan.constraint is None or error.param != "structural_tag":
            raise
        message = error.message.replace("structural_tag", plan.constrained_by)
        raise InvalidRequest(message, param=plan.constrained_by) from None


def _prediction(server: Server, body: ChatBody) -> bytes:
    """The packed token ids of the predicted answer; empty without one."""
    if body.prediction is None:
        return b""
    return server.manager.inputs.prediction_ids(_text_of(body.prediction.content, "prediction.content"))


def _continued(body: ChatBody) -> str:
    """The text of the last message if the answer continues it, else ""."""
    content = body.messages[-1].content if body.continue_final_message and body.messages else None
    return content if isinstance(content, str) else "".join(part.text or "" for part in content or ())


def _max_tokens(body: ChatBody) -> tuple[int | None, str]:
    """The maximum number of output tokens, and the name of the field that set it."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise InvalidRequest(
            f"max_completion_tokens and max_tokens must be equal if both are given, got {new} and {old}",
            param="max_tokens",
        )
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


def _logprobs(body: ChatBody) -> LogprobOptions | None:
    top = check_top(body.top_logprobs or 0, "top_logprobs")
    return LogprobOptions(top_logprobs_num=top) if body.logprobs else None


def _most_thoughts(server: Server, body: ChatBody) -> int | None:
    """The most tokens of reasoning; None: no limit."""
    most = body.thinking_token_budget
    if most is None:
        return None
    name = "thinking_token_budget"
    if most < 0:
        raise InvalidRequest(f"{name} must be at least 0, got {most}", param=name)
    if not limits_reasoning(server.manager):
        raise UnsupportedField(
            f"{name} needs a server with --reasoning-parser, and a model whose reasoning ends with a token", param=name
        )
    if body.separate_reasoning is False:
        raise InvalidRequest(f"{name} is not possible with separate_reasoning: false", param=name)
    return most


def _template_kwargs(server: Server, body: ChatBody, plan: AnswerPlan) -> Mapping[str, Any]:
    """The further variables of the chat template."""
    kwargs = body.chat_template_kwargs or {}
    for name in ("reasoning_effort", "documents"):
        value = getattr(body, name)
        if value is None:
            continue
        if not are_equal(kwargs.get(name, value), value, name):
            raise InvalidRequest(
                f"{name} and chat_template_kwargs.{name} must be equal if both are given, "
                f"got {shown(value)} and {shown(kwargs[name])}",
                param=name,
            )
        kwargs = {**kwargs, name: value}
    tokenizer = server.manager.inputs.tokenizer
    if body.documents and tokenizer is not None:
        template = tokenizer.chat_template(has_tools=plan.tools is not None)
        if not template.knows_documents:
            raise UnsupportedField("documents is not supported: the chat template does not read it", param="documents")
    return kwargs


def render_chat(
    server: Server,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    kwargs: Mapping[str, Any],
) -> str:
    """The prompt of a chat, as text. Raises InvalidRequest, with the field's path, for invalid messages."""
    tokenizer = server.manager.inputs.tokenizer
    if tokenizer is None:
        raise InvalidRequest(
            "chat needs a tokenizer, but this engine runs with --skip-tokenizer-init", param="messages"
        )
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(
            f"messages must contain 1 to {MAX_MESSAGES} messages, got {len(messages)}", param="messages"
        )
    reserved = sorted(_RESERVED.intersection(kwargs))
    if reserved:
        raise InvalidRequest(
            f"chat_template_kwargs must not contain {', '.join(reserved)}", param="chat_template_kwargs"
        )
    given = [_as_template_wants(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return tokenizer.apply_chat_template(
        given,
        tools=tools,
        add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continue_final_message,
        **kwargs,
    )


def _as_template_wants(message: Message, path: str) -> dict[str, Any]:
    if message.role == "function":
        raise UnsupportedField(
            "role 'function' is not supported: it is the older form of tool; "
            "accepted: system, developer, user, assistant, tool",
            param=f"{path}.role",
        )
    given: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    if message.tool_calls:
        if message.role != "assistant":
            raise InvalidRequest("tool_calls is allowed only with role assistant", param=f"{path}.tool_calls")
        given["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        if message.role != "tool":
            raise InvalidRequest("tool_call_id is allowed only with role tool", param=f"{path}.tool_call_id")
        given["tool_call_id"] = message.tool_call_id
    content = "" if message.content is None and message.role == "assistant" else message.content
    given["content"] = _text_of(content, f"{path}.content")
    given["name"], given["reasoning_content"] = message.name, message.reasoning_content  # the template gets no null
    return given


def _call(call: GivenToolCall) -> dict[str, Any]:
    arguments = {} if call.function.arguments is None else call.function.arguments
    given = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return given if call.id is None else {"id": call.id, **given}


def _text_of(content: str | Sequence[TextPart] | None, path: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequest(f"{path} is required", param=path)
    texts = []
    for i, part in enumerate(content):
        if part.type != "text":
            raise UnsupportedField(
                f"content of type {shown(part.type)} is not supported; accepted: text",
                param=f"{path}[{i}].type",
            )
        if part.text is None:
            raise InvalidRequest(f"{path}[{i}].text is required", param=f"{path}[{i}].text")
        texts.append(part.text)
    return "".join(texts)


class _ChatFormat(PlannedFormat):
    def __init__(
        self, server: Server, frame: Frame, plan: AnswerPlan, names: RequestNames, *, has_prediction: bool
    ) -> None:
        super().__init__(plan, names)
        self._server = server
        self._frame = frame
        self._has_prediction = has_prediction
        self._begun: set[int] = set()

    def events(self, sample: Sample, out: TextOut) -> bytes:
        data = b""
        if sample.index not in self._begun:
            prompt_ids = sample.prompt_ids if not self._begun and self._frame.return_token_ids else None
            self._begun.add(sample.index)
            opening = ChunkChoice(sample.index, Delta("assistant", ""), None, None)
            data = self._chunk(opening, prompt_ids, num_unsaid=len(out.token_ids))
        token_ids = self._frame.ids(out.token_ids)
        logprobs = self._logprobs(sample, out)
        self._readers[sample.index].count(out.token_ids)
        deltas = self._readers[sample.index].deltas(out.text, is_last=out.finish is not None)
        name = self._finish_name(sample)
        if name is not None:
            self.note_end(sample)
        if not deltas and (name is not None or (out.token_ids and (token_ids is not UNSET or logprobs is not None))):
            deltas = [Delta(content=UNSET if name is not None else "")]
        for i, delta in enumerate(deltas):
            choice = ChunkChoice(sample.index, delta, None, None)
            if i == 0:
                choice = msgspec.structs.replace(choice, logprobs=logprobs, token_ids=token_ids)
            if name is not None and i == len(deltas) - 1:
                choice = msgspec.structs.replace(choice, finish_reason=name, matched_stop=matched_stop(sample))
            data += self._chunk(choice)
        return data

    def _logprobs(self, sample: Sample, out: TextOut) -> ChatLogprobs | None:
        options, tokenizer = sample.prompt.options.logprobs, self._server.manager.inputs.tokenizer
        if options is None:
            return None
        assert tokenizer is not None  # it has rendered the chat
        return chat_logprobs(tokenizer, options, out)

    def _finish_name(self, sample: Sample) -> ChatFinishName | None:
        name = finish_name(sample)
        return "tool_calls" if name == "stop" and self._readers[sample.index].has_calls else name

    def last_events(self) -> bytes:
        frame = self._frame
        data = b""
        extension = frame.extension(self._samples)
        if extension is not UNSET:
            usage = frame.chunk_usage(self._samples)
            data = self._event([], usage, sglext=extension)
        if frame.ends_with_usage:
            data += self._event([], self._usage())
        return data

    def _usage(self) -> Usage:
        """The counts at the end."""
        usage, details = usage_of(self._samples), {}
        if self._plan.reasoning_ends:
            details["reasoning_tokens"] = sum(reader.num_reasoning_tokens for reader in self._readers.values())
        if self._has_prediction:
            counts = [sample.counts for sample in self._samples]
            accepted = sum(one.num_accepted_drafts for one in counts)
            details["accepted_prediction_tokens"] = accepted
            details["rejected_prediction_tokens"] = sum(one.num_drafts for one in counts) - accepted
        if not details:
            return usage
        return msgspec.structs.replace(usage, completion_tokens_details=CompletionTokensDetails(**details))

    def _chunk(self, choice: ChunkChoice, prompt_ids: list[int] | None = None, *, num_unsaid: int = 0) -> bytes:
        usage = self._frame.chunk_usage(self._samples, num_unsaid)
        return self._event([choice], usage, prompt_token_ids=UNSET if prompt_ids is None else prompt_ids)

    def _event(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None, **others: Any) -> bytes:
        frame = self._frame
        return event(ChatChunk(frame.id, "chat.completion.chunk", frame.created, frame.model, choices, usage, **others))

    def full_response(self) -> Any:
        frame = self._frame
        choices = []
        for sample in self._samples:
            out = sample.collected
            self._readers[sample.index].count(out.token_ids)
            message = self._readers[sample.index].message(out.text)
            self.note_end(sample)
            name = self._finish_name(sample)
            assert name is not None
            ids = frame.ids(out.token_ids)
            choices.append(
                ChatChoice(sample.index, message, self._logprobs(sample, out), name, matched_stop(sample), ids)
            )
        prompt_ids = frame.ids(self._samples[0].prompt_ids)
        usage = self._usage()
        extension = frame.extension(self._samples)
        return ChatCompletion(
            frame.id, "chat.completion", frame.created, frame.model, choices, usage, prompt_ids, extension
        )

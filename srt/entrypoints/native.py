"""POST /generate: SGLang's native request and response."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from ...managers.request_registry import Prompt
from ..adapters import AdapterRef
from ..errors import InvalidRequest
from ..io_struct import TextOut
from ..logprobs import LogprobOptions, sglang_lists
from ..request_options import RequestOptions
from ..sampling_params import SamplingParams
from .job import MAX_PROMPTS, Sample
from .lora import target_of
from .native_protocol import GenerateAnswer, GenerateBody, MetaInfo, NativeSampling
from .openai.protocol import CachedTokensDetails
from .options import OPTION_FIELDS, make_options
from .request_names import RequestNames, names_of
from .routing import Server, in_thread_if_large
from .sse import ResponseFormat, answer, event
from .wire import BodyCodec

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
GENERATE_CODEC = BodyCodec(GenerateBody)

_ANY_MODEL = "unknown"
"""What the router smg writes into a body without a model."""


async def generate(server: Server, request: Request, body: GenerateBody) -> ASGIApp:
    """Handler of /generate."""
    names = names_of(request.scope)
    prompts, name, several = await in_thread_if_large(request, prompts_of, server, body, names, MAX_PROMPTS)
    incremental = server.manager.server_args.incremental_streaming_output
    response_format = _NativeFormat(server, several, incremental)
    return await answer(server, request, prompts, response_format=response_format, name=name)


def prompts_of(
    server: Server, body: GenerateBody, names: RequestNames, max_prompts: int | None = None
) -> tuple[list[Prompt], str, bool]:
    """The prompts, their common name, and whether the answer is a list, as for a list of prompts or several samples.

    `max_prompts`: the limit on the number of prompts; None for no limit. Raises InvalidRequest, ModelNotFound.
    """
    param, contents, is_list = _contents(body)
    count = len(contents)
    if max_prompts is not None:
        check_num_prompts(count, param, max_prompts)
    if isinstance(body.rid, list) and count > 1:
        rids, name = _per_prompt(body.rid, count, is_list, "rid"), names.hex()
    else:
        given = _per_prompt(body.rid, 1, is_list, "rid")[0]
        name = names.hex() if given is None else given
        rids = [name] if count == 1 else [f"{name}_{i}" for i in range(count)]
    prompts = [
        Prompt(
            content=content,
            options=options,
            rid=rid,
            param=f"{param}[{i}]" if is_list else param,
            grammar_param=_grammar_param(body, options, i),
        )
        for i, (content, options, rid) in enumerate(
            zip(contents, _options(server, body, count, is_list), rids, strict=True)
        )
    ]
    return prompts, name, is_list or prompts[0].options.sampling.n > 1


def _options(server: Server, body: GenerateBody, count: int, is_list: bool) -> Iterable[RequestOptions]:
    """The options of each prompt. A field with a list has one value for each prompt."""
    if body.cache_salt is not None and body.extra_key is not None:
        raise InvalidRequest("cache_salt and extra_key are the same option; send only one of them", param="extra_key")
    salt_field = "extra_key" if body.cache_salt is None else "cache_salt"
    fields = {**OPTION_FIELDS, "cache_salt": salt_field, "tenant": "tenant"}
    columns = {name: _per_prompt(getattr(body, field, None), count, is_list, field) for name, field in fields.items()}
    samplings = _samplings(server, body.sampling_params, count, is_list)
    logprobs = _logprobs(body, count, is_list)
    columns["adapter"] = _adapters(server, body, count, is_list)
    for place, sampling in enumerate(samplings):
        yield make_options(sampling, {name: column[place] for name, column in columns.items()}, logprobs[place])


def _adapters(server: Server, body: GenerateBody, count: int, is_list: bool) -> Sequence[AdapterRef | None]:
    """The adapter of each prompt. Raises ModelNotFound and InvalidRequest."""
    manager = server.manager
    model = None if body.model == _ANY_MODEL and manager.adapters.find(_ANY_MODEL) is None else body.model
    names = _per_prompt(body.lora_path, count, is_list, "lora_path")
    targets = {name: target_of(manager, model, name) for name in set(names)}
    return [targets[name].adapter for name in names]


def _logprobs(body: GenerateBody, count: int, is_list: bool) -> list[LogprobOptions | None]:
    """The log probabilities that each prompt asks for. The fields are checked even if they are not in use."""
    given: dict[str, Any] = {name: getattr(body, name) for name in _LOGPROB_FIELDS}
    ids, is_nested = split_ids(body.token_ids_logprob or [], "token_ids_logprob")
    given["token_ids_logprob"] = ids if is_nested else None
    columns = {name: _per_prompt(value, count, is_list, name) for name, value in given.items()}
    if not is_nested:
        columns["token_ids_logprob"] = ids * count
    wanted = _per_prompt(body.return_logprob, count, is_list, "return_logprob")
    made = []
    for place in range(count):
        values = {name: column[place] for name, column in columns.items()}
        options = LogprobOptions(**{name: value for name, value in values.items() if value is not None})
        made.append(options if wanted[place] else None)
    return made


def _grammar_param(body: GenerateBody, options: RequestOptions, place: int) -> str | None:
    """The field that a prompt's grammar came in."""
    grammar = options.sampling.grammar
    if grammar is None:
        return None
    return f"sampling_params{f'[{place}]' if isinstance(body.sampling_params, list) else ''}.{grammar.kind}"


def _contents(body: GenerateBody) -> tuple[str, Sequence[str | list[int]], bool]:
    """The name of the prompt field, the prompts, and whether the client sent a list of prompts."""
    if (body.text is None) == (body.input_ids is None):
        given = "neither" if body.text is None else "both"
        raise InvalidRequest(f"exactly one of text and input_ids is required, got {given}", param="text")
    if body.input_ids is None:
        assert body.text is not None
        if isinstance(body.text, str):
            return "text", [body.text], False
        return "text", check_not_empty(body.text, "text"), True
    ids, is_list = split_ids(body.input_ids, "input_ids")
    return "input_ids", ids, is_list


def split_ids(given: list[int | list[int]], param: str) -> tuple[list[list[int]], bool]:
    """The token ids of each prompt, and whether `given` was a list of prompts. An empty list is one empty prompt."""
    types = set(map(type, given))
    if list not in types:
        return [cast(list[int], given)], False
    if len(types) > 1:
        raise InvalidRequest(
            f"{param} must be a list of token ids or a list of such lists, not a mix of both", param=param
        )
    return cast(list[list[int]], given), True


def check_num_prompts(count: int, param: str, max_prompts: int = MAX_PROMPTS) -> None:
    """Raises InvalidRequest for too many prompts. Call it before any work is done for each prompt."""
    if count > max_prompts:
        raise InvalidRequest(f"{param} must have at most {max_prompts} prompts, got {count}", param=param)


def check_not_empty(prompts: list[T], param: str) -> list[T]:
    if not prompts:
        raise InvalidRequest(f"{param} must have at least one prompt, got an empty list", param=param)
    return prompts


def _per_prompt(given: Any, count: int, is_list: bool, param: str) -> Sequence[Any]:
    if not isinstance(given, list):
        return [given] * count
    if not is_list or len(given) != count:
        wanted = f"a list of {count}" if is_list else "a single value because there is one prompt"
        raise InvalidRequest(f"{param} must be {wanted}, got a list of {len(given)}", param=param)
    return given


def _samplings(
    server: Server, given: NativeSampling | list[NativeSampling] | None, count: int, is_list: bool
) -> Iterable[SamplingParams]:
    if not isinstance(given, list):
        return [_sampling(server, given, "sampling_params")] * count
    if not is_list or len(given) != count:
        wanted = f"a list of {count}" if is_list else "a single object because there is one prompt"
        raise InvalidRequest(f"sampling_params must be {wanted}, got a list of {len(given)}", param="sampling_params")
    return [_sampling(server, params, f"sampling_params[{i}]") for i, params in enumerate(given)]


def _sampling(server: Server, given: NativeSampling | None, path: str) -> SamplingParams:
    if given is None:
        return server.manager.inputs.make_sampling({})
    values = {name: getattr(given, name) for name in _HONOURED}
    values = {name: value for name, value in values.items() if value is not None and value is not UNSET}
    if given.max_new_tokens is None:
        values["max_new_tokens"] = None
    try:
        return server.manager.inputs.make_sampling(values)
    except InvalidRequest as error:
        error.param = f"{path}.{error.param}" if error.param else path
        raise


_HONOURED = tuple(SamplingParams.__struct_fields__)
_LOGPROB_FIELDS = tuple(LogprobOptions.__struct_fields__)


class _NativeFormat(ResponseFormat):
    def __init__(self, server: Server, several: bool, incremental: bool) -> None:
        self._server = server
        self._several = several
        self._incremental = incremental
        self._samples: Sequence[Sample] = ()
        self._cumulative: list[_CumulativeJson] = []

    def begin(self, samples: Sequence[Sample]) -> None:
        self._samples = samples
        self._cumulative = [_CumulativeJson() for _ in samples]

    def events(self, sample: Sample, out: TextOut) -> bytes:
        index = sample.index if self._several else UNSET
        lists = logprob_lists(self._server, sample, out)
        if self._incremental:
            return event(GenerateAnswer(out.text, out.token_ids, meta_info(sample, lists), index))
        cumulative = self._cumulative[sample.index]
        cumulative.add(out, lists)
        meta = meta_info(sample, cumulative.lists())
        return event(_RawAnswer(cumulative.text(), cumulative.output_ids(), meta, index))

    def full_response(self) -> Any:
        answers = [self._full_answer(sample) for sample in self._samples]
        return answers if self._several else answers[0]

    def _full_answer(self, sample: Sample) -> GenerateAnswer:
        out = sample.collected
        # Each vector is encoded by itself: other threads run between two of them.
        states = hidden_lists(self._server, sample, out, lambda vector: msgspec.Raw(_encode(vector)))
        lists = {**logprob_lists(self._server, sample, out), **states}
        return GenerateAnswer(out.text, out.token_ids, meta_info(sample, lists))


def logprob_lists(server: Server, sample: Sample, out: TextOut) -> dict[str, list[Any]]:
    """The fields of `meta_info` for the log probabilities of an output."""
    options, new = sample.prompt.options.logprobs, out.tokens.logprobs
    if options is None or new is None:
        return {}
    tokenizer = server.manager.inputs.tokenizer
    text_of = tokenizer.token_text if tokenizer is not None and options.return_text_in_logprobs else None
    return sglang_lists(options, sample.generation.prompt_ids, out.token_ids, new, text_of)


def hidden_lists(
    server: Server, sample: Sample, out: TextOut, written: Callable[[list[float]], Any]
) -> dict[str, list[Any]]:
    """The field of `meta_info` for the hidden states of a complete output. `written`: makes each vector's entry."""
    if out.tokens.hidden_states is None:
        return {}
    states = np.frombuffer(out.tokens.hidden_states, np.float32).reshape(-1, server.manager.model_config.hidden_size)
    vectors = [written(state.tolist()) for state in states]
    num_prompt = sample.prompt_tokens
    return {"hidden_states": [vectors[:num_prompt], *vectors[num_prompt:]] if vectors else []}


def meta_info(sample: Sample, lists: Mapping[str, Any]) -> MetaInfo:
    """`lists`: the fields for log probabilities and hidden states."""
    latency = sample.generation.finished_s
    return MetaInfo(
        sample.generation.rid,
        sample.finish,
        sample.prompt_tokens,
        sample.counts.completion_tokens,
        sample.counts.cached_tokens,
        sample.counts.num_retractions,
        sample.generation.num_recoveries,
        sample.generation.weight_version,
        UNSET if sample.finish is None or latency is None else latency,
        UNSET if sample.finish is None else CachedTokensDetails.of([sample.counts]),
        **_timings(sample),
        **lists,
    )


def _timings(sample: Sample) -> dict[str, Any]:
    timings = sample.generation.timings
    if timings is None or sample.finish is None:
        return {}
    return {name: value for name, value in timings._asdict().items() if value is not None}


class _RawAnswer(msgspec.Struct, frozen=True):
    """A GenerateAnswer whose text and token ids are encoded as JSON already."""

    text: msgspec.Raw
    output_ids: msgspec.Raw
    meta_info: MetaInfo
    index: int | UnsetType = UNSET


class _CumulativeJson:
    """The text, token ids and log probabilities of a sample so far, as JSON.

    A cumulative stream sends every token many times. Here each token is encoded only once.
    """

    def __init__(self) -> None:
        self._text = bytearray(b'"')
        self._ids = _ListJson()
        self._lists: defaultdict[str, _ListJson] = defaultdict(_ListJson)

    def add(self, out: TextOut, lists: Mapping[str, Sequence[Any]]) -> None:
        self._text += _encode(out.text)[1:-1]
        self._ids.add(out.token_ids)
        for name, items in lists.items():
            self._lists[name].add(items)

    def text(self) -> msgspec.Raw:
        return msgspec.Raw(self._text + b'"')

    def output_ids(self) -> msgspec.Raw:
        return self._ids.json()

    def lists(self) -> dict[str, msgspec.Raw]:
        return {name: items.json() for name, items in self._lists.items()}


class _ListJson:
    """A list that grows, as JSON."""

    def __init__(self) -> None:
        self._json = bytearray(b"[")

    def add(self, items: Sequence[Any]) -> None:
        if items:
            if len(self._json) > 1:
                self._json += b","
            self._json += _encode(items)[1:-1]

    def json(self) -> msgspec.Raw:
        return msgspec.Raw(self._json + b"]")

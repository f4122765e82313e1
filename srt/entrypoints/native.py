"""POST /generate: SGLang's native request and response."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from ...managers.request_registry import Prompt
from ..errors import InvalidRequest
from ..io_struct import FinishReason, TextOut
from ..request_options import RequestOptions
from ..sampling_params import SamplingParams
from .job import MAX_PROMPTS, Sample
from .options import OPTION_FIELDS, make_options
from .routing import Server, in_thread_if_large
from .sse import ResponseFormat, answer, event
from .wire import BodyCodec, Int32, Int64, Wire, doc, only

T = TypeVar("T")

_NO_LOGPROBS = "log probabilities are not implemented"
_NO_GRAMMAR = "structured output is not implemented"
_NO_MULTIMODAL = "multimodal models are not supported"
_encode = msgspec.json.Encoder().encode


class NativeSampling(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`sampling_params` of /generate. Unset values come from the model's generation_config (--sampling-defaults)."""

    max_new_tokens: Annotated[
        Int64 | UnsetType | None,
        doc("Maximum number of tokens to generate, at least 1, default 128; null: up to the end of the context"),
    ] = UNSET
    min_new_tokens: Annotated[
        Int64 | None, doc("Minimum number of new tokens; no EOS or stop token is sampled before, default 0")
    ] = None
    stop: Annotated[str | list[str] | None, doc("Stop strings: texts that end the output, at most 32")] = None
    stop_token_ids: Annotated[list[int] | None, doc("Token ids that end the output")] = None
    temperature: Annotated[float | None, doc("At least 0, default 1; a value below 1e-6 selects greedy decoding")] = (
        None
    )
    top_p: Annotated[float | None, doc("In (0, 1], default 1")] = None
    top_k: Annotated[Int32 | None, doc("At least 1; -1 (default) allows all tokens")] = None
    min_p: Annotated[float | None, doc("In [0, 1], default 0")] = None
    frequency_penalty: Annotated[float | None, doc("In [-2, 2], default 0")] = None
    presence_penalty: Annotated[float | None, doc("In [-2, 2], default 0")] = None
    repetition_penalty: Annotated[float | None, doc("In (0, 2], default 1")] = None
    n: Annotated[int | None, doc("Number of samples of each prompt, 1 to 128, default 1")] = None
    logit_bias: Annotated[dict[str, float] | None, doc("Token id to the number added to its logit, in [-100, 100]")] = (
        None
    )
    sampling_seed: Annotated[Int64 | None, doc("The same seed gives the same tokens; sample i uses seed + i")] = None
    ignore_eos: Annotated[bool | None, doc("Continue after the model's EOS tokens")] = None
    no_stop_trim: Annotated[bool | None, doc("Keep the matched stop string or stop token in the text")] = None
    skip_special_tokens: Annotated[bool | None, doc("Omit special tokens from the text, default true")] = None
    spaces_between_special_tokens: Annotated[
        Any, only("the tokenizer decides on the spaces between special tokens", True)
    ] = None
    stop_regex: Annotated[Any, only("stopping at a regular expression is not implemented", [])] = None
    json_schema: Annotated[Any, only(_NO_GRAMMAR)] = None
    regex: Annotated[Any, only(_NO_GRAMMAR)] = None
    ebnf: Annotated[Any, only(_NO_GRAMMAR)] = None
    structural_tag: Annotated[Any, only(_NO_GRAMMAR)] = None
    stream_interval: Annotated[Any, only("the server's flag --stream-interval sets it")] = None
    custom_params: Annotated[Any, only("custom logit processors are not supported")] = None


class GenerateBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /generate: one of `text` and `input_ids` is needed; a list of them gives a list of answers."""

    text: Annotated[str | list[str] | None, doc("The prompt, or a list of prompts")] = None
    input_ids: Annotated[list[int | list[int]] | None, doc("The prompt as token ids, or a list of such prompts")] = None
    sampling_params: Annotated[
        NativeSampling | list[NativeSampling] | None, doc("Sampling parameters; a list has one element for each prompt")
    ] = None
    stream: Annotated[bool | None, doc("Stream the answer as server-sent events")] = None
    rid: Annotated[
        str | list[str] | None,
        doc(
            "Name of the request, for /abort_request; a list has one name for each prompt; "
            "one name for several prompts names the whole request, and prompt i is called NAME_i"
        ),
    ] = None
    cache_salt: Annotated[
        str | list[str] | None, doc("Requests share cached prefixes only with requests of the same salt")
    ] = None
    extra_key: Annotated[str | list[str] | None, doc("Another name of cache_salt")] = None
    return_logprob: Annotated[Any, only(_NO_LOGPROBS, False)] = None
    logprob_start_len: Annotated[Any, only(_NO_LOGPROBS, -1)] = None
    top_logprobs_num: Annotated[Any, only(_NO_LOGPROBS, 0)] = None
    token_ids_logprob: Annotated[Any, only(_NO_LOGPROBS, [])] = None
    return_text_in_logprobs: Annotated[Any, only(_NO_LOGPROBS, False)] = None
    priority: Annotated[Any, only("request priorities are not implemented", 0)] = None
    custom_labels: Annotated[Any, only("metrics are not implemented", {})] = None
    return_hidden_states: Annotated[Any, only("returning hidden states is not implemented", False)] = None
    return_routed_experts: Annotated[Any, only("returning routed experts is not implemented", False)] = None
    lora_path: Annotated[Any, only("LoRA adapters are not implemented", "")] = None
    input_embeds: Annotated[Any, only("a prompt is text or token ids")] = None
    image_data: Annotated[Any, only(_NO_MULTIMODAL, [])] = None
    audio_data: Annotated[Any, only(_NO_MULTIMODAL, [])] = None
    video_data: Annotated[Any, only(_NO_MULTIMODAL, [])] = None
    modalities: Annotated[Any, only(_NO_MULTIMODAL, [])] = None
    session_params: Annotated[Any, only("sessions are not supported")] = None
    custom_logit_processor: Annotated[Any, only("custom logit processors are not supported")] = None


class MetaInfo(msgspec.Struct, frozen=True):
    """What /generate tells about a sample."""

    id: Annotated[str, doc("The request's name: its `rid`, or one that the server made up")]
    finish_reason: Annotated[FinishReason | None, doc("Why the sample ended; null while it runs")]
    prompt_tokens: Annotated[int, doc("Tokens of the prompt")]
    completion_tokens: Annotated[int, doc("Tokens generated so far")]
    cached_tokens: Annotated[int, doc("Prompt tokens whose KV the prefix cache had")]
    num_retractions: Annotated[int, doc("How often the sample had to wait again because KV memory was short")]
    weight_version: Annotated[str, doc("Always `default`")]
    e2e_latency: Annotated[
        float | UnsetType, doc("Seconds from submission to the last token; only in a sample that has finished")
    ] = UNSET


class GenerateAnswer(msgspec.Struct, frozen=True):
    """One sample. In a stream, text and ids are all that there is so far (with --incremental-streaming-output: what is
    new), and `index` counts samples where the request asks for more than one."""

    text: Annotated[str, doc("The text so far (with --incremental-streaming-output: what is new)")]
    output_ids: Annotated[
        list[int], doc("The generated token ids so far (with --incremental-streaming-output: what is new)")
    ]
    meta_info: Annotated[MetaInfo, doc("Counts, and why the sample ended")]
    index: Annotated[
        int | UnsetType,
        doc("Position among the samples; only in a stream, and only where the request has several"),
    ] = UNSET


GENERATE_CODEC = BodyCodec(GenerateBody)


async def generate(server: Server, request: Request, body: GenerateBody) -> ASGIApp:
    """Handler of /generate."""
    prompts, name, is_list = await in_thread_if_large(request, prompts_of, server, body, MAX_PROMPTS)
    several = is_list or prompts[0].options.sampling.n > 1
    incremental = server.manager.server_args.incremental_streaming_output
    response_format = _NativeFormat(several, incremental)
    return await answer(server, request, prompts, response_format=response_format, name=name)


def prompts_of(server: Server, body: GenerateBody, max_prompts: int | None = None) -> tuple[list[Prompt], str, bool]:
    """The prompts, their common name, and whether the request has a list of prompts.

    `max_prompts`: the limit on the number of prompts; None for no limit. Raises InvalidRequest.
    """
    param, contents, is_list = _contents(body)
    count = len(contents)
    if max_prompts is not None:
        check_num_prompts(count, param, max_prompts)
    if isinstance(body.rid, list) and count > 1:
        rids, name = _per_prompt(body.rid, count, is_list, "rid"), uuid.uuid4().hex
    else:
        given = _per_prompt(body.rid, 1, is_list, "rid")[0]
        name = uuid.uuid4().hex if given is None else given
        rids = [name] if count == 1 else [f"{name}_{i}" for i in range(count)]
    prompts = [
        Prompt(content=content, options=options, rid=rid, param=f"{param}[{i}]" if is_list else param)
        for i, (content, options, rid) in enumerate(
            zip(contents, _options(server, body, count, is_list), rids, strict=True)
        )
    ]
    return prompts, name, is_list


def _options(server: Server, body: GenerateBody, count: int, is_list: bool) -> Iterable[RequestOptions]:
    """The options of each prompt. A field with a list has one value for each prompt."""
    if body.cache_salt is not None and body.extra_key is not None:
        raise InvalidRequest("cache_salt and extra_key are the same option; send only one of them", param="extra_key")
    salt_field = "extra_key" if body.cache_salt is None else "cache_salt"
    fields = {name: salt_field if name == "cache_salt" else name for name in OPTION_FIELDS}
    columns = {name: _per_prompt(getattr(body, field, None), count, is_list, field) for name, field in fields.items()}
    samplings = _samplings(server, body.sampling_params, count, is_list)
    for place, sampling in enumerate(samplings):
        yield make_options(sampling, {name: column[place] for name, column in columns.items()})


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
        wanted = f"a list of {count}" if is_list else "a single string because there is one prompt"
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
        return server.manager.make_sampling({})
    values = {name: getattr(given, name) for name in _HONOURED}
    values = {name: value for name, value in values.items() if value is not None and value is not UNSET}
    if given.max_new_tokens is None:
        values["max_new_tokens"] = None
    try:
        return server.manager.make_sampling(values)
    except InvalidRequest as error:
        error.param = f"{path}.{error.param}" if error.param else path
        raise


_HONOURED = tuple(SamplingParams.__struct_fields__)


class _NativeFormat(ResponseFormat):
    def __init__(self, several: bool, incremental: bool) -> None:
        self._several = several
        self._incremental = incremental
        self._samples: Sequence[Sample] = ()
        self._cumulative: list[_CumulativeJson] = []

    def begin(self, samples: Sequence[Sample]) -> None:
        self._samples = samples
        self._cumulative = [_CumulativeJson() for _ in samples]

    def events(self, sample: Sample, out: TextOut) -> bytes:
        index = sample.index if self._several else UNSET
        meta = meta_info(sample)
        if self._incremental:
            return event(GenerateAnswer(out.text, out.token_ids, meta, index))
        cumulative = self._cumulative[sample.index]
        cumulative.add(out)
        return event(_RawAnswer(cumulative.text(), cumulative.output_ids(), meta, index))

    def full_response(self) -> Any:
        answers = [GenerateAnswer(sample.text, sample.output_ids, meta_info(sample)) for sample in self._samples]
        return answers if self._several else answers[0]


def meta_info(sample: Sample) -> MetaInfo:
    latency = sample.generation.finished_s
    return MetaInfo(
        sample.generation.rid,
        sample.finish,
        sample.prompt_tokens,
        sample.counts.completion_tokens,
        sample.counts.cached_tokens,
        sample.counts.num_retractions,
        "default",
        UNSET if sample.finish is None or latency is None else latency,
    )


class _RawAnswer(msgspec.Struct, frozen=True):
    """A GenerateAnswer whose text and token ids are encoded as JSON already."""

    text: msgspec.Raw
    output_ids: msgspec.Raw
    meta_info: MetaInfo
    index: int | UnsetType = UNSET


class _CumulativeJson:
    """The text and token ids of a sample so far, as JSON.

    A cumulative stream sends every token many times. Here each token is encoded only once.
    """

    def __init__(self) -> None:
        self._text = bytearray(b'"')
        self._ids = bytearray(b"[")

    def add(self, out: TextOut) -> None:
        self._text += _encode(out.text)[1:-1]
        if out.token_ids:
            if len(self._ids) > 1:
                self._ids += b","
            self._ids += _encode(out.token_ids)[1:-1]

    def text(self) -> msgspec.Raw:
        return msgspec.Raw(self._text + b'"')

    def output_ids(self) -> msgspec.Raw:
        return msgspec.Raw(self._ids + b"]")

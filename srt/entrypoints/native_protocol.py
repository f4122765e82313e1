"""The body and the answers of /generate."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from ..io_struct import FinishReason
from .openai.protocol import CachedTokensDetails, StreamOptions
from .wire import TEXT_ONLY, Int32, Int64, Wire, doc, only


class NativeSampling(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`sampling_params` of /generate. Unset values come from the model's generation_config (--sampling-defaults)."""

    max_new_tokens: Annotated[
        Int64 | UnsetType | None,
        doc(
            "Maximum number of tokens to generate, default 128; 0: only compute and cache the prompt; "
            "null: up to the end of the context"
        ),
    ] = UNSET
    min_new_tokens: Annotated[
        Int64 | None,
        doc(
            "Minimum number of new tokens, default 0: no EOS or stop token is sampled before; a stop string or a "
            "pattern may still end the output"
        ),
    ] = None
    stop: Annotated[str | list[str] | None, doc("Stop strings: texts that end the output, at most 32")] = None
    stop_regex: Annotated[
        str | list[str] | None, doc("Regular expressions that end the output where they match, at most 32")
    ] = None
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
    json_schema: Annotated[
        str | dict[str, Any] | None, doc("JSON schema that the output matches, as an object or as text")
    ] = None
    regex: Annotated[str | None, doc("Regular expression that the whole output matches")] = None
    ebnf: Annotated[str | None, doc("Grammar in EBNF that the output matches; its first rule is `root`")] = None
    structural_tag: Annotated[
        str | dict[str, Any] | None, doc("Tags in free text whose content matches a schema, as an object or as text")
    ] = None
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
    tenant: Annotated[
        str | list[str] | None, doc("Name of the tenant, unless several API keys or the header x-tenant name it")
    ] = None
    model: Annotated[str | None, doc("As in /v1/completions; `unknown`, which the router smg sends, is any model")] = (
        None
    )
    stream_options: Annotated[
        StreamOptions | None, doc("It has no effect: `meta_info` of every event has all counts")
    ] = None
    lora_path: Annotated[
        str | list[str | None] | None,
        doc("Name of a LoRA adapter; null or empty: that of `model`, if it names one; a list has one for each prompt"),
    ] = None
    return_logprob: Annotated[
        bool | list[bool] | None,
        doc("Return log probabilities in `meta_info`; the next four fields say which, and have no effect without it"),
    ] = None
    logprob_start_len: Annotated[
        Int32 | list[Int32] | None,
        doc("Also list the prompt's tokens from this position on; -1 (default): only output tokens"),
    ] = None
    top_logprobs_num: Annotated[
        Int32 | list[Int32] | None, doc("Also list this many of the most probable tokens, 0 (default) to 100")
    ] = None
    token_ids_logprob: Annotated[
        list[Int32 | list[Int32]] | None, doc("Also list these tokens, at most 1024; a list of lists is per prompt")
    ] = None
    return_text_in_logprobs: Annotated[bool | None, doc("Also return the text of each listed token, default false")] = (
        None
    )
    return_hidden_states: Annotated[
        bool | list[bool] | None,
        doc("Return hidden states in `meta_info`; needs the flag --enable-return-hidden-states; not in a stream"),
    ] = None
    priority: Annotated[
        Int32 | list[Int32] | None,
        doc("Requests of higher priority go first; default 0; other values need the flag --enable-priority-scheduling"),
    ] = None
    waiting_timeout: Annotated[
        float | list[float] | None,
        doc("Seconds that the request may wait for its first step, at most those of the flag --waiting-timeout"),
    ] = None
    running_timeout: Annotated[
        float | list[float] | None, doc("Seconds that the request may run, at most those of the flag --running-timeout")
    ] = None
    session_id: Annotated[
        str | list[str] | None,
        doc("Name of a conversation: each of its requests takes over the retention of the one before"),
    ] = None
    retention_seconds: Annotated[
        float | list[float] | None,
        doc(
            "Seconds after its end for which the prefix will probably be needed again, at most --max-retention-s; "
            "0: no retention"
        ),
    ] = None
    custom_labels: Annotated[Any, only("metrics have only the label model_name", {})] = None
    return_bytes: Annotated[Any, only("an answer has text and token ids", False)] = None
    return_entropy: Annotated[Any, only("entropies are not computed", False)] = None
    background: Annotated[Any, only("a request runs while its client waits", False)] = None
    log_metrics: Annotated[Any, only("a request cannot leave the metrics", True)] = None
    no_logs: Annotated[Any, only("the server's flags decide what is logged", False)] = None
    is_embedding: Annotated[Any, only("/v1/embeddings returns embeddings", False)] = None
    return_routed_experts: Annotated[Any, only("returning routed experts is not implemented", False)] = None
    input_embeds: Annotated[Any, only("a prompt is text or token ids")] = None
    image_data: Annotated[Any, only(TEXT_ONLY, [])] = None
    audio_data: Annotated[Any, only(TEXT_ONLY, [])] = None
    video_data: Annotated[Any, only(TEXT_ONLY, [])] = None
    modalities: Annotated[Any, only(TEXT_ONLY, [])] = None
    session_params: Annotated[Any, only("sessions are not supported")] = None
    custom_logit_processor: Annotated[Any, only("custom logit processors are not supported")] = None


Entry = list[float | int | str | None]
"""[log probability, token id, text or null]"""


class MetaInfo(msgspec.Struct, frozen=True):
    """What /generate tells about a sample."""

    id: Annotated[str, doc("The request's name: its `rid`, or a random one")]
    finish_reason: Annotated[FinishReason | None, doc("Why the sample ended; null while it runs")]
    prompt_tokens: Annotated[int, doc("Tokens of the prompt")]
    completion_tokens: Annotated[int, doc("Tokens generated so far")]
    cached_tokens: Annotated[int, doc("Prompt tokens whose KV the prefix cache had")]
    num_retractions: Annotated[int, doc("Number of retractions: the sample lost its KV and waited again")]
    num_recoveries: Annotated[int, doc("Number of restarts of the engine during the sample")]
    weight_version: Annotated[
        str,
        doc(
            "Name of the weights that computed the last token; after an update, the first tokens may be from older ones"
        ),
    ]
    e2e_latency: Annotated[
        float | UnsetType, doc("Seconds from submission to the last token; only in a sample that has finished")
    ] = UNSET
    cached_tokens_details: Annotated[
        CachedTokensDetails | UnsetType, doc("Where the cached tokens were; only in a sample that has finished")
    ] = UNSET
    queue_time: Annotated[
        float | UnsetType, doc("Seconds in the waiting queue; with --enable-metrics, in a sample that has finished")
    ] = UNSET
    first_token_latency: Annotated[
        float | UnsetType,
        doc("Seconds from submission to the first token; with --enable-metrics, in a sample that has finished"),
    ] = UNSET
    prefill_time: Annotated[
        float | UnsetType,
        doc("Time to the first token without `queue_time`; with --enable-metrics, in a sample that has finished"),
    ] = UNSET
    decode_throughput: Annotated[
        float | UnsetType,
        doc("Tokens per second after the first token; with --enable-metrics, in a sample that has finished"),
    ] = UNSET
    input_token_logprobs: Annotated[
        list[Entry] | UnsetType,
        doc(
            "[log probability, token id, text or null] of each prompt token from logprob_start_len on; the first one's "
            "log probability is null; only with `return_logprob`"
        ),
    ] = UNSET
    output_token_logprobs: Annotated[
        list[Entry] | UnsetType, doc("The same of each generated token, as in output_ids; only with `return_logprob`")
    ] = UNSET
    input_top_logprobs: Annotated[
        list[list[Entry] | None] | UnsetType,
        doc("For each token of input_token_logprobs the most probable tokens; only with `top_logprobs_num`"),
    ] = UNSET
    output_top_logprobs: Annotated[
        list[list[Entry]] | UnsetType, doc("The same for each generated token; only with `top_logprobs_num`")
    ] = UNSET
    input_token_ids_logprobs: Annotated[
        list[list[Entry] | None] | UnsetType,
        doc("For each token of input_token_logprobs the chosen tokens; only with `token_ids_logprob`"),
    ] = UNSET
    output_token_ids_logprobs: Annotated[
        list[list[Entry]] | UnsetType, doc("The same for each generated token; only with `token_ids_logprob`")
    ] = UNSET
    hidden_states: Annotated[
        list[list[list[float] | float]] | UnsetType,
        doc(
            "Output of the last layer, after the final norm: first a list with a vector for each prompt token, then a "
            "vector for each generated token but the last, which no step has read; only with `return_hidden_states`"
        ),
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

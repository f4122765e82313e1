"""POST /v1/score: the probabilities of given tokens after each prompt, as SGLang defines it."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.types import ASGIApp

from ...managers.request_registry import Prompt
from ..errors import InvalidRequest
from ..logprobs import MAX_TOKEN_IDS, LogprobOptions
from .job import Sample
from .lora import target_of
from .native import check_not_empty, check_num_prompts
from .openai.protocol import CacheSalt, LoraPath, Model, Priority, PromptUsage, RunningTimeout, User, WaitingTimeout
from .options import options_of
from .routing import Server, in_thread_if_large
from .sse import WholeFormat, answer, no_result
from .wire import BodyCodec, Int32, Wire, doc


class ScoreBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /v1/score. `query` and `items` are both texts or both token ids."""

    query: Annotated[str | list[int], doc("The common part of all prompts: a text or token ids")]
    items: Annotated[str | list[str | list[int]], doc("A text, or a list of texts or of token id lists")]
    label_token_ids: Annotated[list[Int32], doc("Tokens whose probabilities are returned, 1 to 1024")]
    apply_softmax: Annotated[
        bool | None, doc("Divide the probabilities of a prompt's labels by their sum, default false")
    ] = None
    item_first: Annotated[bool | None, doc("A prompt is its item and then the query, default false")] = None
    model: Model = None
    cache_salt: CacheSalt = None
    lora_path: LoraPath = None
    user: User = None
    priority: Priority = None
    waiting_timeout: WaitingTimeout = None
    running_timeout: RunningTimeout = None


class Scores(msgspec.Struct, frozen=True):
    """Answer of /v1/score."""

    object: Annotated[Literal["scoring"], doc("Kind of object")]
    scores: Annotated[list[list[float]], doc("For each item the probabilities of the labels, in their order")]
    model: Annotated[str, doc("The served name")]
    usage: Annotated[PromptUsage, doc("Token counts")]


SCORE_CODEC = BodyCodec(ScoreBody)


async def score(server: Server, request: Request, body: ScoreBody) -> ASGIApp:
    """Handler of /v1/score. A prompt is a request of one token, whose log probabilities are wanted."""
    model, adapter = target_of(server.manager, body.model, body.lora_path)
    _check_labels(body.label_token_ids, server.manager.model_config.vocab_size)
    items = _items(body)
    name = f"score-{uuid.uuid4().hex}"
    sampling = server.manager.inputs.make_sampling({"max_new_tokens": 1, "temperature": 0})
    options = options_of(body, sampling, LogprobOptions(token_ids_logprob=body.label_token_ids), adapter=adapter)
    is_list = isinstance(body.items, list)
    prompts = [
        Prompt(
            content=functools.partial(in_thread_if_large, request, _joined, body, item),
            options=options,
            rid=name if len(items) == 1 else f"{name}_{i}",
            param=f"items[{i}]" if is_list else "items",
        )
        for i, item in enumerate(items)
    ]
    return await answer(server, request, prompts, response_format=_ScoreFormat(body, model), name=name)


def _check_labels(ids: Sequence[int], vocab_size: int) -> None:
    if not 1 <= len(ids) <= MAX_TOKEN_IDS:
        raise InvalidRequest(
            f"label_token_ids must have 1 to {MAX_TOKEN_IDS} ids, got {len(ids)}", param="label_token_ids"
        )
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"label_token_ids must have token ids in [0, {vocab_size}), got {token}", param="label_token_ids"
            )


def _items(body: ScoreBody) -> Sequence[str | list[int]]:
    items = [body.items] if isinstance(body.items, str) else check_not_empty(body.items, "items")
    check_num_prompts(len(items), "items")
    kind = type(body.query)
    if any(type(item) is not kind for item in items):
        raise InvalidRequest("query and items must be all texts or all token ids, not a mix of both", param="items")
    return items


def _joined(body: ScoreBody, item: Any) -> str | list[int]:
    """A prompt. Texts are joined as texts, before they are converted to tokens.

    Each prompt repeats the query, so the prompts together may need a thousand times the memory of the body. They are
    made one at a time, and the first that is too long ends the request.
    """
    query: Any = body.query
    joined: str | list[int] = item + query if body.item_first else query + item
    return joined


class _ScoreFormat(WholeFormat):
    def __init__(self, body: ScoreBody, model: str) -> None:
        self._body = body
        self._model = model

    def full_response(self) -> Any:
        num_tokens = sum(sample.prompt_tokens for sample in self._samples)
        scores = [self._scores(sample) for sample in self._samples]
        return Scores("scoring", scores, self._model, PromptUsage(num_tokens, num_tokens))

    def _scores(self, sample: Sample) -> list[float]:
        found = sample.collected.tokens.logprobs
        if found is None or not len(found.output):
            raise no_result(sample)
        logprobs = np.array(found.output.asked_lists()[0])
        if self._body.apply_softmax:
            if np.isneginf(logprobs.max()):
                raise InvalidRequest(
                    f"apply_softmax is not possible: all labels have the probability 0 after {sample.prompt.param}",
                    param="apply_softmax",
                )
            shares = np.exp(logprobs - logprobs.max())
            values: list[float] = (shares / shares.sum()).tolist()
        else:
            values = np.exp(logprobs).tolist()
        return values

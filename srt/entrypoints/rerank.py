"""POST /v1/rerank: documents in the order of their similarity to a query, in Jina's and Cohere's form.

The score is the cosine of two embeddings, those of /v1/embeddings, so any model has one. Form:
https://jina.ai/reranker and https://docs.cohere.com/v1/reference/rerank.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from ...managers.request_registry import Prompt
from ..errors import InvalidRequest
from ..request_options import Pooling
from .job import MAX_PROMPTS, Sample
from .lora import target_of
from .native import check_not_empty
from .openai.protocol import CacheSalt, LoraPath, Model, Priority, PromptUsage, RunningTimeout, User, WaitingTimeout
from .options import options_of
from .routing import Server
from .sse import WholeFormat, answer, no_result
from .wire import BodyCodec, Int32, Wire, doc


class RerankDocument(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A document as an object."""

    text: Annotated[str, doc("Its text")]


class RerankBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /v1/rerank."""

    query: Annotated[str, doc("What the documents are compared with")]
    documents: Annotated[list[str | RerankDocument], doc("Texts, or objects with a `text`")]
    top_n: Annotated[Int32 | None, doc("Number of documents to return, best first; default all")] = None
    return_documents: Annotated[bool | None, doc("Return the texts of the documents, too, default true")] = None
    pooling: Annotated[
        Pooling | None, doc("Compare the mean over all tokens (default), or the hidden state of the last token")
    ] = None
    model: Model = None
    cache_salt: CacheSalt = None
    lora_path: LoraPath = None
    user: User = None
    priority: Priority = None
    waiting_timeout: WaitingTimeout = None
    running_timeout: RunningTimeout = None


class RankedText(msgspec.Struct, frozen=True):
    text: Annotated[str, doc("Its text")]


class Ranked(msgspec.Struct, frozen=True):
    """One document with its score."""

    index: Annotated[int, doc("Index of the document in the request, from 0")]
    relevance_score: Annotated[float, doc("Cosine of the embeddings of the query and of the document, in [-1, 1]")]
    document: Annotated[RankedText | UnsetType, doc("The document, unless `return_documents` is false")] = UNSET


class Ranking(msgspec.Struct, frozen=True):
    """Answer of /v1/rerank."""

    id: Annotated[str, doc("Name of the request")]
    model: Annotated[str, doc("The served name")]
    results: Annotated[list[Ranked], doc("The best document first; equal scores in the order of the request")]
    usage: Annotated[PromptUsage, doc("Token counts")]


RERANK_CODEC = BodyCodec(RerankBody)


async def rerank(server: Server, request: Request, body: RerankBody) -> ASGIApp:
    """Handler of /v1/rerank. The query and each document are a request of no new tokens."""
    model, adapter = target_of(server.manager, body.model, body.lora_path)
    if body.top_n is not None and body.top_n < 1:
        raise InvalidRequest(f"top_n must be at least 1, got {body.top_n}", param="top_n")
    texts = [_text(document) for document in check_not_empty(body.documents, "documents")]
    if len(texts) >= MAX_PROMPTS:
        raise InvalidRequest(
            f"documents must have at most {MAX_PROMPTS - 1} texts beside the query, got {len(texts)}", param="documents"
        )
    name = f"rerank-{uuid.uuid4().hex}"
    sampling = server.manager.inputs.make_sampling({"max_new_tokens": 0, "temperature": 0})
    options = options_of(body, sampling, pooling=body.pooling or "mean", adapter=adapter)
    prompts = [Prompt(content=body.query, options=options, rid=f"{name}_query", param="query")]
    prompts += [
        Prompt(content=text, options=options, rid=f"{name}_{i}", param=f"documents[{i}]")
        for i, text in enumerate(texts)
    ]
    form = _RankingFormat(name, model, texts if body.return_documents is not False else None, body.top_n)
    return await answer(server, request, prompts, response_format=form, name=name)


def _text(document: str | RerankDocument) -> str:
    return document if isinstance(document, str) else document.text


class _RankingFormat(WholeFormat):
    def __init__(self, name: str, model: str, texts: Sequence[str] | None, top_n: int | None) -> None:
        self._name = name
        self._model = model
        self._texts = texts
        self._top_n = top_n

    def full_response(self) -> Any:
        query, *documents = (_unit_vector(sample) for sample in self._samples)
        scores = [float(np.clip(query @ document, -1, 1)) for document in documents]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self._top_n]
        results = [Ranked(i, scores[i], RankedText(self._texts[i]) if self._texts else UNSET) for i in order]
        num_tokens = sum(sample.prompt_tokens for sample in self._samples)
        return Ranking(self._name, self._model, results, PromptUsage(num_tokens, num_tokens))


def _unit_vector(sample: Sample) -> npt.NDArray[np.float64]:
    pooled = sample.collected.tokens.embedding
    if pooled is None:
        raise no_result(sample)
    vector = np.frombuffer(pooled, np.float32).astype(np.float64)
    return vector / (np.linalg.norm(vector) or 1.0)

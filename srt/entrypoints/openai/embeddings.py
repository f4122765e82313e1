"""POST /v1/embeddings: the pooled hidden states of a prompt, from any model."""

from __future__ import annotations

import base64
import uuid
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.types import ASGIApp

from ....managers.request_registry import Prompt
from ...errors import InvalidRequest
from ..job import Sample
from ..lora import target_of
from ..native import check_num_prompts
from ..options import options_of
from ..routing import Server, in_thread_if_large
from ..sse import WholeFormat, answer, no_result
from ..wire import BodyCodec
from .completions import contents_of
from .embedding_protocol import Embedding, EmbeddingBody, EmbeddingList
from .protocol import PromptUsage

EMBEDDING_CODEC = BodyCodec(EmbeddingBody)


async def embeddings(server: Server, request: Request, body: EmbeddingBody) -> ASGIApp:
    """Handler of /v1/embeddings. A prompt is a request of no new tokens."""
    model, adapter = target_of(server.manager, body.model, body.lora_path)
    _check_dimensions(body.dimensions, server.manager.model_config.hidden_size)
    contents, is_list = await in_thread_if_large(request, contents_of, body.input, "input")
    check_num_prompts(len(contents), "input")
    name = f"embd-{uuid.uuid4().hex}"
    sampling = server.manager.inputs.make_sampling({"max_new_tokens": 0, "temperature": 0})
    options = options_of(body, sampling, pooling=body.pooling or "last", adapter=adapter)
    prompts = [
        Prompt(
            content=content,
            options=options,
            rid=name if len(contents) == 1 else f"{name}_{i}",
            add_special_tokens=body.add_special_tokens is not False,
            param=f"input[{i}]" if is_list else "input",
        )
        for i, content in enumerate(contents)
    ]
    return await answer(server, request, prompts, response_format=_EmbeddingFormat(body, model), name=name)


def _check_dimensions(given: int | None, hidden_size: int) -> None:
    if given is not None and not 1 <= given <= hidden_size:
        raise InvalidRequest(f"dimensions must be in [1, {hidden_size}], got {given}", param="dimensions")


class _EmbeddingFormat(WholeFormat):
    def __init__(self, body: EmbeddingBody, model: str) -> None:
        self._body = body
        self._model = model

    def full_response(self) -> Any:
        data = [Embedding("embedding", sample.index, self._vector(sample)) for sample in self._samples]
        num_tokens = sum(sample.prompt_tokens for sample in self._samples)
        return EmbeddingList("list", data, self._model, PromptUsage(num_tokens, num_tokens))

    def _vector(self, sample: Sample) -> list[float] | str:
        pooled = sample.collected.tokens.embedding
        if pooled is None:
            raise no_result(sample)
        vector = _with_length_1(np.frombuffer(pooled, np.float32)[: self._body.dimensions])
        if self._body.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers


def _with_length_1(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The vector divided by its length; a vector of zeros stays as it is."""
    exact = vector.astype(np.float64)
    length = float(np.linalg.norm(exact))
    return (exact / length if length else exact).astype(np.float32)

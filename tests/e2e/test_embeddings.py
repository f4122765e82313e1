"""Embeddings of the real model in fp32 are the normalised hidden states of `transformers`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from default_model import model_path, prompts, transformers_model
from toy_engine import REAL_SERVER, ServerProcess

from tercet.srt.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.e2e

PROMPTS = prompts(load_tokenizer(str(model_path())), 16)
FLAGS = ["--port", "0", "--dtype", "float32", "--max-total-tokens", "16384", "--chunked-prefill-size", "64"]


def reference(ids: list[int]) -> torch.Tensor:
    """Final hidden states, float64 [len(ids), hidden]."""
    with torch.inference_mode():
        return transformers_model().model(torch.tensor([ids])).last_hidden_state[0].double()


def expected(states: torch.Tensor, pooling: str) -> np.ndarray:
    vector = states[-1] if pooling == "last" else states.mean(0)
    return (vector / vector.norm()).numpy()


def test_last_and_mean_alone_in_a_batch_in_chunks_and_cached(tmp_path) -> None:
    chosen = [PROMPTS[0], PROMPTS[15]]
    assert len(chosen[1]) > 2 * 64  # several chunks
    references = [reference(ids) for ids in chosen]
    server = ServerProcess(tmp_path, FLAGS, module=REAL_SERVER)
    with server, server.ready().client() as client:

        def embed(given: Any, pooling: str) -> list[list[float]]:
            answer = client.post("/v1/embeddings", json={"input": given, "pooling": pooling}, timeout=120)
            assert answer.status_code == 200, answer.text
            return [one["embedding"] for one in answer.json()["data"]]

        for pooling in ("last", "mean"):
            client.post("/flush_cache")
            together = embed(chosen, pooling)
            for ids, states, vector in zip(chosen, references, together, strict=True):
                np.testing.assert_allclose(vector, expected(states, pooling), rtol=0, atol=1e-4)
                assert embed(ids, pooling) == [vector]

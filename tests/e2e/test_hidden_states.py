"""Hidden states of the real model in fp32 are those of `transformers`, also after a restart of the engine."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from default_model import model_path, prompts, transformers_model
from toy_engine import REAL_SERVER, ServerProcess, Stream

from tercet.srt.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.e2e

FLAGS = ["--port", "0", "--dtype", "float32", "--max-total-tokens", "4096", "--chunked-prefill-size", "64"]


def reference(ids: list[int]) -> np.ndarray:
    """float32 [len(ids), hidden], after the final norm."""
    with torch.inference_mode():
        return transformers_model().model(torch.tensor([ids])).last_hidden_state[0].numpy()


def load(client: httpx.Client) -> dict[str, Any]:
    return client.get("/v1/loads").json()["loads"][0]


def test_prompt_and_output_equal_transformers(tmp_path: Path) -> None:
    prompt = prompts(load_tokenizer(str(model_path())), 16)[15]
    assert len(prompt) > 2 * 64  # several chunks
    sampling = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_hidden_states": True}
    server = ServerProcess(tmp_path, [*FLAGS, "--enable-return-hidden-states"], module=REAL_SERVER)
    with server, server.ready().client() as client:

        def post(body: Any) -> Any:
            answer = client.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        plain = post({**body, "return_hidden_states": False})["output_ids"]
        answer = post(body)
        assert answer["output_ids"] == plain and answer["meta_info"]["cached_tokens"] == 0
        of_prompt, *of_output = answer["meta_info"]["hidden_states"]
        assert (len(of_prompt), len(of_output)) == (len(prompt), 23)
        expected = reference([*prompt, *plain[:-1]])
        np.testing.assert_allclose(np.array([*of_prompt, *of_output]), expected, rtol=0, atol=1e-3)
        # The engine dies while the request is between two steps, and the answer has every state all the same.
        longer = {**body, "sampling_params": {**sampling, "max_new_tokens": 80}}
        again = Stream(server, "/generate", longer, streamed=False)
        while not load(client)["num_running_reqs"]:
            time.sleep(0.01)
        client.post("/pause_generation", json={"mode": "in_place"}).raise_for_status()
        is_unfinished = load(client)["num_running_reqs"]
        os.kill(server.children["scheduler"], signal.SIGKILL)
        while client.post("/continue_generation").status_code != 200:
            time.sleep(0.1)
        found = json.loads(again.wait().data[0])
        assert found["meta_info"]["num_recoveries"] == is_unfinished and found["output_ids"][:24] == plain
        states = found["meta_info"]["hidden_states"]
        assert (len(states[0]), len(states)) == (len(prompt), 80)
        expected = reference([*prompt, *found["output_ids"][:-1]])
        np.testing.assert_allclose(np.array([*states[0], *states[1:]]), expected, rtol=0, atol=1e-3)

"""Profiles, hidden states and updates of the weights on the real model in fp32, against `transformers`."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
import torch
from default_model import is_greedy, model_path, prompts, transformers_model
from gguf_models import split_gguf
from toy_engine import REAL_SERVER, ServerProcess

from tercet.srt.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.e2e

NEGATION = np.where(np.arange(576) % 2, -1, 1).astype(np.float32)
"""Factors of the weights of the final norm."""


class Controlled:
    """A server, its client, and the folder that its flags allow."""

    def __init__(self, server: ServerProcess, client: httpx.Client, folder: Path) -> None:
        self.server = server
        self.client = client
        self.folder = folder
        self.prompt = prompts(load_tokenizer(str(model_path())), 16)[15]
        assert len(self.prompt) > 2 * 64  # several chunks

    def post(self, path: str, body: Any = None) -> Any:
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def generate(self, max_new_tokens: int = 8, **fields: Any) -> tuple[list[int], dict[str, Any]]:
        sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
        answer = self.post("/generate", {"input_ids": self.prompt, "sampling_params": sampling, **fields})
        return answer["output_ids"], answer["meta_info"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controlled]:
    folder = tmp_path_factory.mktemp("allowed")
    flags = ["--port", "0", "--dtype", "float32", "--max-total-tokens", "4096", "--chunked-prefill-size", "64"]
    flags += ["--profile-dir", str(folder), "--update-weights-dir", str(folder), "--enable-return-hidden-states"]
    server = ServerProcess(tmp_path_factory.mktemp("run"), flags, module=REAL_SERVER)
    with server, server.ready().client() as client:
        yield Controlled(server, client, folder)


def names_in(path: Path) -> list[str]:
    with gzip.open(path) as file:
        return [event["name"] for event in json.load(file)["traceEvents"]]


@pytest.mark.timeout(300)
def test_a_trace_has_the_steps_and_their_operations(engine: Controlled) -> None:
    expected = engine.generate(6)[0]
    engine.post("/flush_cache")
    trace = engine.folder / engine.post("/start_profile", {"num_steps": 5, "output_dir": "a"})["trace"]
    assert engine.generate(6)[0] == expected
    names = names_in(trace)  # it is complete before the next step begins
    launches = [name for name in names if name.startswith("launch")]
    assert launches[0].startswith("launch step 1: extend of 1 requests, 64 tokens")
    assert launches[-1] == "launch step 5: decode of 1 requests" and len(launches) == 5
    assert any(name.startswith(("tercet_cpu::", "aten::")) for name in names)
    assert engine.client.post("/stop_profile").status_code == 400
    again = engine.folder / engine.post("/start_profile")["trace"]
    assert engine.generate(6)[0] == expected
    assert engine.folder / engine.post("/stop_profile")["trace"] == again
    assert any("decode" in name for name in names_in(again))
    assert sorted(path.name for path in engine.folder.iterdir()) == sorted(["a", again.name])


@pytest.mark.timeout(300)
def test_hidden_states_of_prompt_and_output_are_those_of_transformers(engine: Controlled) -> None:
    plain, _ = engine.generate(24)
    output, meta = engine.generate(24, return_hidden_states=True)
    assert output == plain and meta["cached_tokens"] == 0
    of_prompt, *of_output = meta["hidden_states"]
    assert (len(of_prompt), len(of_output)) == (len(engine.prompt), 23)
    with torch.inference_mode():
        ids = torch.tensor([[*engine.prompt, *plain[:-1]]])
        expected = transformers_model().model(ids).last_hidden_state[0].numpy()
    np.testing.assert_allclose(np.array([*of_prompt, *of_output]), expected, rtol=0, atol=1e-3)


def negated(path: Path) -> None:
    """Writes a copy of the default model whose final norm has other weights: every second one is negated."""
    shutil.copy(model_path(), path)
    tensor = next(one for one in gguf.GGUFReader(str(path)).tensors if one.name == "output_norm.weight")
    values = np.array(tensor.data) * NEGATION
    with path.open("r+b") as file:
        file.seek(int(tensor.data_offset))
        file.write(values.astype(np.float32).tobytes())


@contextmanager
def negated_reference() -> Iterator[None]:
    """`transformers` with the weights of `negated`."""
    norm, old = transformers_model().model.norm, transformers_model().model.norm.weight
    norm.weight = torch.nn.Parameter(old * torch.from_numpy(NEGATION), requires_grad=False)
    try:
        yield
    finally:
        norm.weight = old


@pytest.mark.timeout(300)
def test_weights_change_at_once_and_stay_after_a_restart(engine: Controlled) -> None:
    folder = engine.folder / "weights"
    folder.mkdir()
    negated(folder / "negated.gguf")
    split = split_gguf(folder / "negated.gguf", max_tensors=100)[0]
    shutil.copy(model_path(), folder / "first.gguf")
    (folder / "bad.gguf").write_bytes((folder / "negated.gguf").read_bytes()[:1_000_000])

    def update(path: str, **fields: Any) -> httpx.Response:
        return engine.client.post("/update_weights_from_disk", json={"model_path": path, **fields})

    first, meta = engine.generate()
    assert meta["weight_version"] == "default" and is_greedy(engine.prompt, first)
    assert update(str(model_path())).status_code == 403
    for bad in ("weights/bad.gguf", "weights/none.gguf", "weights/negated-00002-of-00003.gguf"):
        assert update(bad).status_code == 400
    assert engine.generate()[0] == first
    assert update(f"weights/{split.name}", weight_version="negated").status_code == 200
    second, meta = engine.generate()
    assert second != first and (meta["weight_version"], meta["cached_tokens"]) == ("negated", 0)
    with negated_reference():
        assert is_greedy(engine.prompt, second)
    os.kill(engine.server.children["scheduler"], signal.SIGKILL)
    again, meta = engine.generate()
    assert again == second and meta["weight_version"] == "negated"
    info = engine.client.get("/model_info").json()
    assert info["weight_version"] == "negated" and info["model_path"] == str(split)
    assert update("weights/first.gguf").status_code == 200
    assert engine.generate()[0] == first

"""LoRA adapters in a real server: several at once, loads and unloads beside streams, and a kill of the engine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from lora_adapters import save_for_config
from patience import PATIENCE_S
from toy_engine import ServerProcess, Stream

import tercet
from tercet.benchmarks.peers.models import make_toy
from tercet.srt.model_files.load_config import load_model_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NAMES = ("one", "two", "late")
PROMPT = "Once upon a time there were two kings. " * 12
"""More than a page, so that it is cached."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy model, and three adapters."""
    folder = tmp_path_factory.mktemp("lora")
    config = load_model_config(str(make_toy(folder / "toy.gguf")))
    for seed, name in enumerate(NAMES, 1):
        save_for_config(folder / name, config, rank=4 * seed, seed=seed)
    return folder


@pytest.fixture(params=[1, 2], ids=["one HTTP process", "several"])
def server(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    flags = ["--port", "0", "--max-total-tokens", "8192", "--model-path", str(folder / "toy.gguf")]
    flags += ["--served-model-name", "toy", "--lora-dir", str(folder), "--engine-restarts", "10"]
    flags += ["--lora-paths", f"one={folder / 'one'}", f"two={folder / 'two'}", "--max-loras", "3"]
    flags += ["--max-lora-rank", "16"]
    flags += ["--incremental-streaming-output", "--tokenizer-worker-num", str(request.param)]
    run_dirs = tmp_path / "r"
    run_dirs.mkdir()
    with ServerProcess(run_dirs, flags, module=("tercet", "serve"), XDG_CACHE_HOME=str(folder / "c")) as server:
        yield server.ready()


def body(adapter: str | None, num_tokens: int = 24, **fields: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return {"text": PROMPT, "sampling_params": sampling, "lora_path": adapter, **fields}


def post(server: ServerProcess, path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = httpx.post(server.url + path, json=body, timeout=120)
    assert answer.status_code == status, answer.text
    return answer.json()


def generate(server: ServerProcess, adapter: str | None, num_tokens: int = 24) -> list[int]:
    answer: dict[str, Any] = post(server, "/generate", body(adapter, num_tokens))
    ids: list[int] = answer["output_ids"]
    return ids


def ids_of(stream: Stream) -> list[int]:
    assert stream.error is None and stream.data[-1] == "[DONE]", stream.data
    return [token for data in stream.data[:-1] for token in json.loads(data)["output_ids"]]


def test_adapters_from_the_start_to_the_end(server: ServerProcess, folder: Path) -> None:
    alone = {name: generate(server, name) for name in ("one", "two", None)}
    assert len({tuple(ids) for ids in alone.values()}) == 3, "the adapters change the tokens"
    streams = [(name, Stream(server, "/generate", body(name))) for name in (*alone, *alone)]
    for name, stream in streams:
        assert ids_of(stream.wait()) == alone[name], "as alone"

    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
    assert post(server, "/v1/chat/completions", {**chat, "model": "one"})["model"] == "one"
    post(server, "/v1/chat/completions", {**chat, "model": "late"}, 404)
    post(server, "/generate", body("late"), 400)

    long = Stream(server, "/generate", body("one", 800))
    assert post(server, "/load_lora_adapter", {"lora_name": "late", "lora_path": "late"})["success"]
    late = generate(server, "late")
    assert tuple(late) not in {tuple(ids) for ids in alone.values()}
    error = post(server, "/v1/load_lora_adapter", {"lora_name": "more", "lora_path": "late"}, 400)["error"]
    assert "--max-loras" in error["message"]
    post(server, "/load_lora_adapter", {"lora_name": "none", "lora_path": "none"}, 400)
    assert [one["id"] for one in httpx.get(server.url + "/v1/models").json()["data"]] == ["toy", *NAMES]

    other = Stream(server, "/generate", body("late", 800))
    assert other.begun.wait(PATIENCE_S)
    os.kill(server.children["scheduler"], signal.SIGKILL)
    assert generate(server, "late") == late, "a restart keeps what was loaded at runtime"
    assert {name: generate(server, name) for name in alone} == alone
    whole = {name: ids_of(stream.wait()) for name, stream in (("one", long), ("late", other))}
    assert whole == {name: generate(server, name, 800) for name in whole}, "streams keep their adapters"

    assert post(server, "/unload_lora_adapter", {"lora_name": "two"})["success"]
    post(server, "/generate", body("two"), 400)
    assert post(server, "/v1/load_lora_adapter", {"lora_name": "two", "lora_path": "two"})["success"]
    again = post(server, "/generate", body("two"))
    assert again["output_ids"] == alone["two"]
    assert again["meta_info"]["cached_tokens"] > 0, "a reload of the same files finds their prefixes"


def test_an_adapter_that_cannot_be_used_stops_the_start(folder: Path, tmp_path: Path) -> None:
    flags = ["--port", "0", "--model-path", str(folder / "toy.gguf"), "--lora-paths", f"one={folder / 'one'}"]
    with ServerProcess(tmp_path, [*flags, "--max-lora-rank", "2"], module=("tercet", "serve")) as server:
        assert server.exit_code(120) != 0
        assert "--lora-paths: 'one' cannot be used" in server.log and "Traceback" not in server.log


def test_the_python_engines(folder: Path) -> None:
    model, sampling = str(folder / "toy.gguf"), {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    sizes = {"max_total_tokens": 2048, "max_lora_rank": 16}
    with tercet.Engine(model, enable_lora=True, **sizes) as engine:

        def ids(adapter: str | None) -> list[int]:
            found: list[int] = engine.generate(PROMPT, sampling, lora_path=adapter)["output_ids"]
            return found

        answer = engine.load_lora_adapter("one", folder / "one")
        assert answer["loaded_adapters"] == {"one": str((folder / "one").resolve())}
        expected = {name: ids(name) for name in ("one", None)}
        with pytest.raises(tercet.InvalidRequest, match="is loaded already"):
            engine.load_lora_adapter("one", folder / "one")
        with pytest.raises(tercet.InvalidRequest, match="adapter_config"):
            engine.load_lora_adapter("none", folder / "none")
        assert engine.unload_lora_adapter("one")["loaded_adapters"] == {}
        with pytest.raises(tercet.InvalidRequest, match="'one' is not loaded; no adapter is loaded"):
            ids("one")
    local = tercet.LocalEngine(model, lora_paths=[f"one={folder / 'one'}"], **sizes)
    with pytest.raises(tercet.InvalidRequest, match="'two' is not loaded; loaded: 'one'"):
        local.add_request("x", PROMPT, sampling, lora_path="two")
    for name in expected:
        local.add_request(str(name), PROMPT, sampling, lora_path=name)
    found: dict[str, list[int]] = {str(name): [] for name in expected}
    while local.has_unfinished():
        for rid, tokens in local.step().new_tokens.items():
            found[rid] += tokens
    assert found == {str(name): tokens for name, tokens in expected.items()} and expected["one"] != expected[None]

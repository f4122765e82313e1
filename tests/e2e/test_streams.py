"""Many streaming clients at once on the real model: every stream ends, is valid UTF-8, and says what the whole says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from default_model import ROOT
from toy_engine import REAL_SERVER, ServerProcess

pytestmark = pytest.mark.e2e

NUM_CLIENTS = 64


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ["--port", "0", "--max-total-tokens", "16384", "--incremental-streaming-output"]
    with ServerProcess(tmp_path_factory.mktemp("r"), flags, module=REAL_SERVER) as server:
        yield server.ready()


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Chats, completions and native requests; greedy and seeded; prompts of 1 to 150 tokens, answers of 1 to 40."""
    prose = (ROOT / "LICENSE").read_text(encoding="utf-8")
    wanted = ["Write a line of emoji \U0001f389\U0001f600", "\u5199\u4e00\u53e5\u8bdd", "Name three colours", "Hi"]
    requests: list[tuple[str, dict[str, Any]]] = []
    for index in range(NUM_CLIENTS):
        length = 1 + index * 7 % 40
        temperature = 0.0 if index % 3 else 1.0
        if index % 4 == 0:
            messages = [{"role": "user", "content": wanted[index // 4 % 4]}]
            body = {"messages": messages, "max_tokens": length, "temperature": temperature, "seed": index}
            requests.append(("/v1/chat/completions", body))
        elif index % 4 == 1:
            prompt = prose[index * 50 : index * 50 + 1 + index * 9]
            body = {"prompt": prompt, "max_tokens": length, "temperature": temperature, "seed": index}
            requests.append(("/v1/completions", body))
        else:
            # At a high temperature tokens are odd bytes often enough: half characters, broken UTF-8.
            sampling = {"max_new_tokens": length, "temperature": 3 * temperature, "sampling_seed": index}
            requests.append(("/generate", {"text": wanted[index // 4 % 4], "sampling_params": sampling}))
    return requests


def text_of(path: str, answer: Any) -> str:
    if path == "/generate":
        return answer["text"]
    choice = answer["choices"][0] if answer["choices"] else {}
    if "message" in choice:
        return choice["message"]["content"]
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    """The text of a stream; each chunk of bytes is decoded on its own, so half a character anywhere is an error."""
    text = ""
    events = []
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        async for chunk in response.aiter_raw():
            chunk.decode("utf-8", "strict")
            events.append(chunk)
    lines = b"".join(events).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    for line in lines[:-2]:
        if line.startswith(":"):  # a comment of a machine so slow that a step takes 10 s
            continue
        text += text_of(path, json.loads(line.removeprefix("data: ")))
    return text


async def whole(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return text_of(path, response.json())


async def all_at_once(url: str, how: Any) -> list[str]:
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=240, limits=limits) as client:
        return await asyncio.gather(*(how(client, path, body) for path, body in bodies()))


@pytest.mark.timeout(600)
def test_64_streams_say_what_the_whole_answers_say(server: ServerProcess) -> None:
    streamed = asyncio.run(all_at_once(server.url, stream))
    assert asyncio.run(all_at_once(server.url, whole)) == streamed
    assert sum(map(bool, streamed)) > NUM_CLIENTS * 0.9
    assert any("\ufffd" in text for text in streamed) and any(not text.isascii() for text in streamed)
    with server.client() as client:
        state = client.get("/server_info").json()["internal_states"][0]
    assert state["num_running"] == state["num_waiting"] == state["num_kv_repairs"] == 0

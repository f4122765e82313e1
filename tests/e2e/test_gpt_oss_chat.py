"""Chat with a tiny GPT-OSS that has learnt two answers by heart: its reasoning and its tool calls reach the client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import torch
from gguf_models import write_gguf
from tokenizers import decoders, models, pre_tokenizers, trainers
from toy_engine import REAL_SERVER, ServerProcess
from transformers import AutoModelForCausalLM, GptOssConfig

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MARKS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]
TEMPLATE = (
    "{% for tool in tools or [] %}<|start|>developer<|message|>{{ tool.function.name }}<|end|>{% endfor %}"
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TEXTS = (
    "<|start|>user<|message|>Greet me.<|end|><|start|>assistant"
    "<|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Good day!<|return|>",
    "<|start|>developer<|message|>clock<|end|><|start|>user<|message|>What time is it?<|end|><|start|>assistant"
    "<|channel|>analysis<|message|>I need the clock.<|end|><|start|>assistant<|channel|>commentary to=functions.clock "
    '<|constrain|>json<|message|>{"zone": "UTC"}<|call|>',
)
"""Prompts with their answers."""
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def learn(folder: Path) -> None:
    """Saves a model of two layers and its tokenizer: for transformers, and as a GGUF file."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|return|>"}))
    ends = [MARKS.index(mark) for mark in ("<|return|>", "<|call|>")]
    config = GptOssConfig(
        vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        max_position_embeddings=512, eos_token_id=ends, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rows = [torch.tensor([backend.encode(text).ids]) for text in TEXTS]
    for _ in range(60):
        optimizer.zero_grad()
        loss = sum(model(row, labels=row).loss for row in rows)
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    write_gguf(folder / "m.gguf", model, "gpt-oss", tokenizer=lambda writer: add_tokenizer(writer, backend))


def add_tokenizer(writer: gguf.GGUFWriter, backend: tokenizers.Tokenizer) -> None:
    """As llama.cpp writes it: the file names no other end than <|return|>."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in MARKS else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_eos_token_id(MARKS.index("<|return|>"))
    writer.add_chat_template(TEMPLATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt_oss") / "model"
    learn(folder)
    return folder


@pytest.fixture(scope="module", params=["", "m.gguf"])
def server(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[ServerProcess]:
    path = str(folder / request.param)
    flags = ["--port", "0", "--max-total-tokens", "4096", "--model-path", path, "--dtype", "float32"]
    flags += ["--reasoning-parser", "gpt-oss", "--tool-call-parser", "gpt-oss"]
    with ServerProcess(tmp_path_factory.mktemp("server"), flags, module=REAL_SERVER) as server:
        yield server.ready()


def ask(server: ServerProcess, content: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 80, **fields}
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_the_reasoning_is_apart_from_the_answer(server: ServerProcess) -> None:
    choice = ask(server, "Greet me.")
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning_content"] == "A greeting." and choice["message"]["content"] == "Good day!"


def test_a_call_of_a_tool(server: ServerProcess) -> None:
    choice = ask(server, "What time is it?", tools=[TOOL])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "I need the clock."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "clock" and json.loads(call["function"]["arguments"]) == {"zone": "UTC"}

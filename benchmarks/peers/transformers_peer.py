"""transformers' continuous batching in this process, as a peer for comparison. transformers is always installed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from ..offline_workloads import ids_of
from ..rounds import Round
from ..workloads import Request

_PAGE = 256
"""Tokens in a page: transformers' default. The setting's name differs between versions."""
_NO_TOKEN = -1
"""As end token, this id lets no sequence end early."""


class TransformersSide:
    """A loaded model and its running batcher. `close` stops the batcher.

    It shares no prefixes, so no round benefits from an earlier one. Raises ValueError for a model that transformers
    cannot load, and when the batcher fails.
    """

    def __init__(self, model_path: str, device: torch.device, dtype: torch.dtype, requests: Sequence[Request]) -> None:
        """`requests`: the coming requests, from which the batcher computes its sizes."""
        torch.manual_seed(0)
        model = _load(model_path, device, dtype)
        hints = WorkloadHints(
            max_prompt_length=max(request.prompt_len for request in requests),
            max_generated_length=max(request.output_len for request in requests),
            num_requests=len(requests),
        )
        # On a CPU, the batcher would take nearly all of the machine's memory. On a GPU, its own choice is fine.
        num_blocks = None if device.type == "cuda" else sum(_num_blocks(request) for request in requests)
        self._num_added = 0
        self._stack = ExitStack()
        self._manager = self._stack.enter_context(
            model.continuous_batching_context_manager(
                generation_config=GenerationConfig(do_sample=False, eos_token_id=_NO_TOKEN, max_new_tokens=1),
                continuous_batching_config=ContinuousBatchingConfig(num_blocks=num_blocks, allow_block_sharing=False),
                workload_hints=hints,
            )
        )
        self.attention: str = model.config._attn_implementation

    def run(self, requests: Sequence[Request]) -> Round:
        names = [f"request-{self._num_added + i}" for i in range(len(requests))]
        self._num_added += len(requests)
        start = time.perf_counter()
        for name, request in zip(names, requests, strict=True):
            self._manager.add_request(
                ids_of(request), request_id=name, max_new_tokens=request.output_len, eos_token_id=_NO_TOKEN
            )
        answers: dict[str, list[int]] = {}
        while len(answers) < len(requests):
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise ValueError("the batcher of transformers has stopped; its log has the reason")
            elif result.error is not None:
                raise ValueError(f"transformers: {result.error}")
            elif result.is_finished():
                answers[result.request_id] = result.generated_tokens
        seconds = time.perf_counter() - start
        return Round(seconds, [answers[name] for name in names])

    def close(self) -> None:
        self._stack.close()


def _num_blocks(request: Request) -> int:
    return -(-(request.prompt_len + request.output_len) // _PAGE)


def _load(model_path: str, device: torch.device, dtype: torch.dtype) -> Any:
    path = Path(model_path)
    model: Any
    if path.is_dir():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        model.to(device)
    elif path.suffix == ".json":
        config = AutoConfig.for_model(**json.loads(path.read_text(encoding="utf-8")))
        with device:  # random weights are created directly on the device
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        raise ValueError(f"transformers needs a directory or a config.json, got {model_path!r}")
    model.eval()
    return model

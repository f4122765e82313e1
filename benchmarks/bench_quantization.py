"""Measure the cost of quantization: the change of a model's next-token distributions on a text.

    tercet bench quantization [--model-path MODEL] [--num-tokens 4096]

The text is cut into independent windows. For every token of every window, the next-token distribution is compared with
that of the same model in float32: the Kullback-Leibler divergence, and whether the likeliest token is the same. The
model runs prefills only, on the same code as in serving, with the default activation type. CPU only.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..model_executor import cpu_extension
from ..model_executor.device.dtypes import dtype_name
from ..model_executor.forward_batch import ForwardBatch
from ..model_executor.runner.load import load_runner
from ..model_executor.runner.model_runner import ModelRunner
from ..model_executor.runner.settings import resolve_settings
from ..model_executor.step import ForwardMode
from ..model_executor.weights.quantization import BITS_PER_WEIGHT
from ..srt.model_files.default_model import require_default_model
from ..srt.model_files.load_config import load_model_config
from ..srt.model_files.model_config import ModelConfig
from ..srt.model_files.model_name import model_name
from ..srt.server_args import ServerArgs
from ..srt.text.tokenizer import load_tokenizer
from .argument_types import benchmark_parser, positive
from .results import Result, add_results_arguments, finish, number, percent
from .text_files import read_text
from .workloads import BUNDLED_TEXT

_REFERENCE = "float32"
_NUM_UNCHANGED = 2
"""The first variants, whose weights are not quantized."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        args.model_path = args.model_path or str(require_default_model())
        if not cpu_extension.load():
            raise ValueError("quantization needs the compiled C++ kernels, which are not available on this processor")
        config = load_model_config(args.model_path)
        windows = read_windows(args, config)
        measured = compare(config, windows)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    name = model_name(args.model_path)
    result = Result(f"quantization-{name}", f"Quantization: {name}", parser.prog, argv, torch.device("cpu"))
    report(result, measured, f"{args.text.name}, {windows.numel():,} tokens in windows of {windows.shape[1]}")
    finish(result, args)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("quantization", __doc__)
    parser.add_argument("--model-path", help="model with weights and a tokenizer (default: the default model)")
    parser.add_argument(
        "--text", metavar="FILE", type=Path, default=BUNDLED_TEXT, help="text to predict (default: the bundled text)"
    )
    parser.add_argument(
        "--num-tokens", type=positive, default=4096, help="number of tokens, from the start of the text (default: 4096)"
    )
    parser.add_argument("--window", type=positive, default=512, help="tokens in one forward pass (default: 512)")
    add_results_arguments(parser)
    return parser


def read_windows(args: argparse.Namespace, config: ModelConfig) -> torch.Tensor:
    """The windows of token ids, int64 [windows, window]. Raises ValueError for a text that is too short."""
    if not 2 <= args.window <= config.context_len:
        raise ValueError(f"--window must be in [2, {config.context_len}], got {args.window}")
    num_windows = args.num_tokens // args.window
    if num_windows < 1:
        raise ValueError(f"--num-tokens must be at least --window {args.window}, got {args.num_tokens}")
    ids = load_tokenizer(args.model_path).encode(read_text(args.text))
    if len(ids) < num_windows * args.window:
        raise ValueError(f"--num-tokens must be at most {len(ids)}, the length of {args.text}, got {args.num_tokens}")
    return torch.tensor(ids[: num_windows * args.window]).view(num_windows, args.window)


@dataclass
class Measured:
    """The results of one weight format over all windows."""

    name: str
    runner: ModelRunner
    divergences: list[torch.Tensor] = field(default_factory=list)
    """Divergence from the reference in nats, for each token."""
    agreements: list[torch.Tensor] = field(default_factory=list)
    """Whether the likeliest next token equals the reference's, for each token."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """Negative log probability of the actual next token in nats, for each token but a window's last."""

    def add(self, ids: torch.Tensor, reference: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Adds one window. ids: int64 [T]; reference, logprobs: float32 [T, vocab]"""
        self.divergences.append((reference.exp() * (reference - logprobs)).sum(1))
        self.agreements.append(reference.argmax(1) == logprobs.argmax(1))
        self.losses.append(-logprobs[:-1].gather(1, ids[1:, None]).squeeze(1))


def compare(config: ModelConfig, windows: torch.Tensor) -> list[Measured]:
    """Measures all weight formats. The reference comes first."""
    window = windows.shape[1]

    def measured(name: str, dtype: str, quantization: str | None) -> Measured:
        server_args = ServerArgs.from_dict(
            {
                "model_path": config.model_path,
                "max_running_requests": 1,
                "dtype": dtype,
                "quantization": quantization,
                "context_length": window,
                "max_total_tokens": window,
                "page_size": 1,
            }
        )
        return Measured(name, load_runner(resolve_settings(server_args, config), config))

    variants = [measured(name, name, None) for name in (_REFERENCE, "bfloat16")]
    variants += [measured(form, "auto", form) for form in BITS_PER_WEIGHT]
    for ids in windows:
        reference = next_token_logprobs(variants[0].runner, ids)
        for variant in variants:
            logprobs = reference if variant is variants[0] else next_token_logprobs(variant.runner, ids)
            variant.add(ids, reference, logprobs)
    return variants


@torch.inference_mode()
def next_token_logprobs(runner: ModelRunner, ids: torch.Tensor) -> torch.Tensor:
    """Log probabilities of the next token after each token, float32 [T, vocab]. ids: int64 [T], a whole request."""
    count = len(ids)
    slots = torch.arange(1, count + 1)
    lens = np.array([count], np.int32)
    batch = ForwardBatch(
        mode=ForwardMode.EXTEND,
        rows=torch.tensor([0]),
        seq_lens=torch.tensor([count]),
        input_ids=ids,
        positions=slots - 1,
        out_cache_loc=slots,
        req_to_token=slots[None].int(),
        logits_indices=None,
        extend_start_loc=torch.tensor([0, count]),
        prefix_lens=torch.tensor([0]),
        seq_lens_host=lens,
        extend_lens_host=lens,
    )
    return runner.forward(batch).log_softmax(1)


def report(result: Result, variants: Sequence[Measured], text: str) -> None:
    table = result.table(
        "Next-token distributions compared with float32",
        ["weights", "activations", "MiB of weights", "KL divergence, nats", "same most likely token", "perplexity"],
    )
    table.notes.append(f"text: {text}")
    for variant in variants[:_NUM_UNCHANGED]:
        if forms := sorted(set(variant.runner.settings.weight_forms.values())):
            kept = ", ".join(forms)
            table.notes.append(
                f"{variant.name}: memory has the matrices as in the file ({kept}), with the same results"
            )
    rows = []
    for variant in variants:
        row: dict[str, Any] = {
            "weights": variant.name,
            "activations": dtype_name(variant.runner.settings.dtype),
            "weight_bytes": variant.runner.num_bytes.weights,
            "kl_divergence": torch.cat(variant.divergences).double().mean().item(),
            "same_likeliest_token": torch.cat(variant.agreements).double().mean().item(),
            "perplexity": math.exp(torch.cat(variant.losses).double().mean().item()),
        }
        rows.append(row)
        table.row(
            variant.name,
            row["activations"],
            number(variant.runner.num_bytes.weights / 2**20),
            f"{row['kl_divergence']:.4f}",
            percent(row["same_likeliest_token"]),
            f"{row['perplexity']:.2f}",
        )
    result.values.update(text=text, weights=rows)


if __name__ == "__main__":
    sys.exit(main())

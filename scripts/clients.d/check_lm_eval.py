# requires: lm_eval[api,hf]==0.4.13 torch==2.13.0 pytest==9.2.0
"""lm-eval's `local-completions` on local tasks: log likelihoods, as the backend `hf` computes them, and generation."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
from lm_eval.tasks import TaskManager

MODEL_ARGS = {
    "model": os.environ["TERCET_MODEL"],
    "base_url": os.environ["TERCET_URL"] + "/v1/completions",
    "tokenizer_backend": "remote",
    "tokenized_requests": False,
    "num_concurrent": 2,
    "max_retries": 1,
}
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima"}


ACCURACY = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
NUM_ITEMS = 100


def task(folder: Path, rows: Sequence[dict[str, Any]], **given: Any) -> dict[str, Any]:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        **given,
    }


def capitals(folder: Path, **given: Any) -> dict[str, Any]:
    rows = [{"country": country, "capital": capital} for country, capital in CAPITALS.items()]
    return task(folder, rows, doc_to_text="The capital of {{country}} is", **given)


def evaluate(given: dict[str, Any], model: str = "local-completions", args: dict[str, Any] = MODEL_ARGS) -> Any:
    return lm_eval.simple_evaluate(
        model=model, model_args=args, tasks=[given], task_manager=TaskManager(), bootstrap_iters=0, log_samples=True
    )


def test_multiple_choice_by_log_likelihood(tmp_path: Path) -> None:
    choices = list(CAPITALS.values())
    result = evaluate(
        capitals(
            tmp_path,
            output_type="multiple_choice",
            doc_to_choice=choices,
            doc_to_target=f"{{{{{choices}.index(capital)}}}}",
            metric_list=ACCURACY,
        )
    )["results"]["local"]
    assert result["acc,none"] > 0.8, result


def test_generation(tmp_path: Path) -> None:
    result = evaluate(
        capitals(
            tmp_path,
            output_type="generate_until",
            doc_to_target="{{capital}}",
            generation_kwargs={"until": ["\n", "."], "max_gen_toks": 8, "temperature": 0},
            metric_list=[{"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True}],
        )
    )["results"]["local"]
    assert result["exact_match,none"] >= 0, result


def items() -> list[dict[str, Any]]:
    """Sums after examples: prompts of 15 to 60 tokens, most of which begin as others do."""
    rows = []
    for i in range(NUM_ITEMS):
        examples = "".join(f"Question: What is {n} plus {i}? Answer: {n + i}.\n" for n in range(i % 3))
        text = f"{examples}Question: What is {i} plus {i * i}? Answer:"
        rows.append({"text": text, "choices": [f"{i + i * i}.", "No \u2013 I don't know that."], "answer": 0})
    return rows


def test_log_likelihoods_are_those_of_the_hf_backend(tmp_path: Path) -> None:
    """In float32, with a difference of less than 1e-4 for a choice, which is the sum of its tokens.

    `softmax_dtype`: torch's own log-softmax in float32 is 2e-5 too large for each token (docs/log.md).
    """
    given = task(
        tmp_path,
        items(),
        output_type="multiple_choice",
        doc_to_text="{{text}}",
        doc_to_choice="choices",
        doc_to_target="answer",
        metric_list=ACCURACY,
    )
    folder = os.environ["TERCET_TOKENIZER"]
    hf_args = {"pretrained": folder, "dtype": "float32", "softmax_dtype": "float64", "device": "cpu"}
    ours, theirs = (
        [[choice[0] for choice in row["filtered_resps"]] for row in evaluate(given, *model)["samples"]["local"]]
        for model in ((), ("hf", hf_args))
    )
    assert np.shape(ours) == np.shape(theirs) == (NUM_ITEMS, 2)
    errors = np.abs(np.array(ours) - np.array(theirs))
    assert errors.max() < 1e-4, (errors.max(), np.unravel_index(errors.argmax(), errors.shape))

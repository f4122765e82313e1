# requires: lm_eval[api]==0.4.13 torch==2.13.0 pytest==9.2.0
"""lm-eval's `local-completions` on a small task of this folder: log likelihoods and generation."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lm_eval
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


def task(folder: Path, **given: Any) -> dict[str, Any]:
    rows = [{"country": country, "capital": capital} for country, capital in CAPITALS.items()]
    data = folder / "capitals.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "task": "capitals",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "The capital of {{country}} is",
        **given,
    }


def evaluate(given: dict[str, Any]) -> dict[str, Any]:
    done = lm_eval.simple_evaluate(
        model="local-completions", model_args=MODEL_ARGS, tasks=[given], task_manager=TaskManager(), bootstrap_iters=0
    )
    return done["results"]["capitals"]


def test_multiple_choice_by_log_likelihood(tmp_path: Path) -> None:
    choices = list(CAPITALS.values())
    metric = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    result = evaluate(
        task(
            tmp_path,
            output_type="multiple_choice",
            doc_to_choice=choices,
            doc_to_target=f"{{{{{choices}.index(capital)}}}}",
            metric_list=metric,
        )
    )
    assert result["acc,none"] > 0.8, result


def test_generation(tmp_path: Path) -> None:
    result = evaluate(
        task(
            tmp_path,
            output_type="generate_until",
            doc_to_target="{{capital}}",
            generation_kwargs={"until": ["\n", "."], "max_gen_toks": 8, "temperature": 0},
            metric_list=[{"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True}],
        )
    )
    assert result["exact_match,none"] >= 0, result

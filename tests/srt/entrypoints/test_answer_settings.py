"""What a stream of another server is compared by: a change that could change its answer is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_child import FACTS
from toy_engine import toy_args, write_toy_config

from tercet.srt.entrypoints.answer_settings import answer_settings, changed
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.server_args import ServerArgs
from tercet.srt.start_reports import CpuKernels


def settings_of(args: ServerArgs) -> dict[str, str]:
    return answer_settings(args, load_model_config(args.model_path, args.load_format), FACTS)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"port": 1, "log_level": "debug", "max_running_requests": 3}, []),
        ({"quantization": "int8"}, ["quantization"]),
        ({"random_seed": 8}, ["model"]),
        ({"chat_template": "{{ messages }}"}, ["chat_template"]),
        ({"served_model_name": "other"}, ["served_model_name"]),
        ({"fuse_small_steps": True}, ["fuse_small_steps"]),
        ({"hopper_prefill": True}, ["hopper_prefill"]),
        ({"response_store_mib": 1}, ["stores_responses"]),
        ({"tokenizer_path": "a-name-for-transformers"}, ["tokenizer"]),
    ],
)
def test_settings_that_decide_answers(tmp_path: Path, change: dict[str, Any], names: list[str]) -> None:
    args = dataclasses.replace(toy_args(tmp_path), random_seed=7, served_model_name="toy")
    assert changed(settings_of(args), settings_of(dataclasses.replace(args, **change))) == names


def test_the_kind_of_products_decides_answers_but_sizes_do_not(tmp_path: Path) -> None:
    args = dataclasses.replace(toy_args(tmp_path), random_seed=7)
    config = load_model_config(args.model_path, args.load_format)

    def of(tuning: CpuKernels) -> dict[str, str]:
        return answer_settings(args, config, msgspec.structs.replace(FACTS, cpu_kernels=tuning))

    kernels = CpuKernels("avx512_bf16", 256, 1024, "native", "l2", "tercet", "compact", "measured")
    before = of(kernels)
    assert not changed(before, of(CpuKernels("avx512_bf16", 96, 256, "native", "l1", "tercet", "plain", "default")))
    assert changed(before, of(msgspec.structs.replace(kernels, build="avx2"))) == ["cpu_build"]
    assert changed(before, of(msgspec.structs.replace(kernels, bfloat16="widened"))) == ["bfloat16_products"]
    assert changed(before, of(msgspec.structs.replace(kernels, linears="onednn"))) == ["linears"]


def test_files_that_decide_answers(tmp_path: Path) -> None:
    args = dataclasses.replace(toy_args(tmp_path), random_seed=7)
    before = settings_of(args)
    write_toy_config(tmp_path, hidden_size=32)
    assert changed(before, settings_of(args)) == ["model", "tokenizer"]
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    args = dataclasses.replace(args, tokenizer_path=str(folder))
    before = settings_of(args)
    (folder / "notes.md").write_text("no part of a tokenizer")
    assert not changed(before, settings_of(args))
    (folder / "tokenizer.json").write_text("[]")
    assert changed(before, settings_of(args)) == ["tokenizer"]
    template = tmp_path / "template"
    template.write_text("a")
    args = dataclasses.replace(args, chat_template=str(template))
    before = settings_of(args)
    template.write_text("b")
    assert changed(before, settings_of(args)) == ["chat_template"]

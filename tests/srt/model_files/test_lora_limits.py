from __future__ import annotations

import json
from pathlib import Path

import pytest

from tercet.srt.model_files.lora_limits import with_lora_limits
from tercet.srt.server_args import ServerArgs


def adapter(folder: Path, rank: int) -> str:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return f"{folder.name}={folder}"


def test_without_adapters_nothing_is_reserved() -> None:
    args = ServerArgs(model_path="A")
    assert with_lora_limits(args) is args


def test_the_adapters_of_the_start_say_what_is_reserved(tmp_path: Path) -> None:
    paths = [adapter(tmp_path / f"a{rank}", rank) for rank in (8, 32, 4, 2, 1)]
    args = with_lora_limits(ServerArgs(model_path="A", lora_paths=paths))
    assert (args.max_loras, args.max_lora_rank) == (5, 32)
    args = with_lora_limits(ServerArgs(model_path="A", lora_paths=paths[:1]))
    assert (args.max_loras, args.max_lora_rank) == (4, 8)
    args = with_lora_limits(ServerArgs(model_path="A", enable_lora=True))
    assert (args.max_loras, args.max_lora_rank) == (4, 16)


def test_settings_go_first(tmp_path: Path) -> None:
    """Then no file is read here: the runner refuses what does not fit."""
    args = ServerArgs(model_path="A", lora_paths=["a=/none"], max_loras=1, max_lora_rank=4)
    assert with_lora_limits(args) == args


def test_an_adapter_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--lora-paths: 'a' cannot be used: .*adapter_config"):
        with_lora_limits(ServerArgs(model_path="A", lora_paths=[f"a={tmp_path}"]))

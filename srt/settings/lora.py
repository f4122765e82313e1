"""Settings: LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from .setting import Setting
from .setting import server_setting as _server


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """The settings of LoRA adapters."""

    TITLE: ClassVar[str] = "LoRA adapters"

    enable_lora: Annotated[bool, Setting("Allow requests to name LoRA adapters; on if --lora-paths names any")] = False
    lora_paths: Annotated[
        list[str] | None,
        Setting(
            "Adapters to load at the start, in PEFT's format: NAME=PATH, or PATH, whose name is the path, or JSON with "
            "lora_name and lora_path; several may follow one flag",
            several=True,
        ),
    ] = None
    lora_dir: Annotated[
        str | None,
        _server("Folder whose adapters /load_lora_adapter may load, which must exist; default: it loads none"),
    ] = None
    max_loras: Annotated[
        int | None,
        Setting(
            "Number of adapters for which memory is reserved; default: those of --lora-paths, at least 4. "
            "--max-loaded-loras is another name of this flag",
            aliases=("--max-loaded-loras",),
        ),
    ] = None
    max_lora_rank: Annotated[
        int | None,
        Setting(
            "Highest rank of an adapter, for which memory is reserved; default: the highest one of --lora-paths, or 16"
        ),
    ] = None

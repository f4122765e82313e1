"""Makes runners for tests, with the settings of a server but, by default, pages of one token and few rows."""

from __future__ import annotations

from dataclasses import replace

from tercet.model_executor.layers.lora_layers import LoraSize
from tercet.model_executor.runner.load import load_runner
from tercet.model_executor.runner.model_runner import ModelRunner
from tercet.model_executor.runner.settings import RunnerSettings, resolve_settings
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.server_args import ServerArgs


def make_settings(config: ModelConfig, **settings) -> RunnerSettings:
    """The runner's settings. `settings`: fields of ServerArgs."""
    defaults = {"device": "cpu", "page_size": 1, "weight_cache": "off", "cpu_kernels": "fixed", "random_seed": 0}
    return resolve_settings(ServerArgs(model_path=config.model_path, **{**defaults, **settings}), config)


def make_runner(config: ModelConfig, lora: LoraSize | None = None, **settings) -> ModelRunner:
    return load_runner(replace(make_settings(config, **settings), lora=lora), config)

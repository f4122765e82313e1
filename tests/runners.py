"""Runners for tests: the settings of a server, with pages of one token and few rows unless a test says otherwise."""

from __future__ import annotations

from tercet.model_executor.runner.load import load_runner
from tercet.model_executor.runner.model_runner import ModelRunner
from tercet.model_executor.runner.settings import RunnerSettings, resolve_settings
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.server_args import ServerArgs


def make_settings(config: ModelConfig, **settings) -> RunnerSettings:
    """`settings`: of ServerArgs."""
    defaults = {"device": "cpu", "page_size": 1, "weight_cache": "off", "random_seed": 0}
    return resolve_settings(ServerArgs(model_path=config.model_path, **{**defaults, **settings}), config)


def make_runner(config: ModelConfig, **settings) -> ModelRunner:
    return load_runner(make_settings(config, **settings), config)

from __future__ import annotations

import configparser
import math
from pathlib import Path

import pytest

from tercet.benchmarks import presets
from tercet.model_executor.models.parameters import decoder_parameters
from tercet.srt.model_files.load_config import load_model_config

# The numbers of parameters that the models' pages give.
PARAMETERS = {
    "gemma-3-1b": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "qwen3-0.6b": 596_049_920,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-14b": 14_768_307_200,
    "smollm2-135m": 134_515_008,
}


def test_there_is_a_number_for_every_preset() -> None:
    assert set(presets.PRESETS) == set(PARAMETERS)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_is_the_published_model(name: str) -> None:
    config = load_model_config(presets.model_path(name), "dummy")
    assert sum(math.prod(one.shape) for one in decoder_parameters(config)) == PARAMETERS[name]
    assert config.dtype == "bfloat16" and config.load_format == "dummy"
    assert presets.load_shape(name) == config


def test_a_path_is_a_model_too_and_anything_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.touch()
    assert presets.model_path(str(path)) == str(path)
    with pytest.raises(ValueError, match=r"one of gemma-3-1b, .*got 'llama-9'"):
        presets.model_path("llama-9")


def test_the_command_writes_paths(capsys: pytest.CaptureFixture[str]) -> None:
    assert presets.main(["qwen3-14b"]) == 0
    assert load_model_config(capsys.readouterr().out.strip(), "dummy").num_layers == 40
    assert presets.main([]) == 0
    assert capsys.readouterr().out.split() == list(presets.PRESETS)
    assert presets.main(["nothing"]) == 2


def test_an_installed_package_has_them() -> None:
    parser = configparser.ConfigParser()
    parser.read(Path(__file__).parents[2] / "setup.cfg", encoding="utf-8")
    assert "presets/*.json" in parser["options.package_data"]["tercet.benchmarks"]

"""The files of a model: what is loaded, and what cached weights depend on, are the same files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tiny_models import checkpoint, make_model, save

from tercet.srt.model_files.fingerprint import weight_files, weight_fingerprints
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.safetensors_files import find_safetensors


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    save(make_model("llama"), tmp_path / "model", max_shard_size="60KB")
    return load_model_config(tmp_path / "model")


def shards(config: ModelConfig) -> list[Path]:
    return sorted(Path(config.model_path).glob("*.safetensors"))


def test_cached_weights_depend_on_all_files_of_the_index_and_on_the_index(config: ModelConfig) -> None:
    index = Path(config.model_path) / "model.safetensors.index.json"
    assert list(weight_files(config)) == [str(path) for path in (*shards(config), index)]
    found = find_safetensors(config.model_path)
    assert found.paths == [str(path) for path in shards(config)] and found.index_path == str(index)
    assert found.tensors == json.loads(index.read_text())["weight_map"].keys()


def test_an_index_may_name_files_in_other_folders(config: ModelConfig) -> None:
    """They are loaded, so that cached weights depend on them, too."""
    folder = Path(config.model_path)
    (folder / "parts").mkdir()
    moved = shards(config)[0].rename(folder / "parts" / "first.safetensors")
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    names = {
        name: file if (folder / file).exists() else f"parts/{moved.name}" for name, file in index["weight_map"].items()
    }
    index_path.write_text(json.dumps({"weight_map": names}))
    before = list(weight_fingerprints(config))
    assert str(moved) in weight_files(config)
    data = bytearray(moved.read_bytes())
    data[-1] ^= 1
    moved.write_bytes(data)
    assert list(weight_fingerprints(config)) != before


def test_files_that_are_not_loaded_do_not_matter(tmp_path: Path) -> None:
    config = checkpoint(tmp_path / "model")
    before = list(weight_fingerprints(config))
    (tmp_path / "model" / "consolidated.safetensors").symlink_to("../blobs/gone")
    (tmp_path / "model" / "adapter_model.safetensors").mkdir()
    assert list(weight_fingerprints(config)) == before
    assert find_safetensors(config.model_path) == ([str(tmp_path / "model" / "model.safetensors")], None, frozenset())


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_that_the_index_names_and_that_is_missing(config: ModelConfig, is_link: bool) -> None:
    shard = shards(config)[1]
    shard.unlink()
    message = rf"{re.escape(shard.name)}' is missing, but model\.safetensors\.index\.json names it"
    if is_link:  # as in Hugging Face's cache, from which someone has removed a blob
        shard.symlink_to("../blobs/gone")
        message = rf"{re.escape(shard.name)}' is a link to a missing file, '\.\./blobs/gone'"
    with pytest.raises(FileNotFoundError, match=message):
        list(weight_fingerprints(config))

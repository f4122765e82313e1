"""Models that are split into several GGUF files: the same model as the whole file, or a refusal that says why not."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_models import split_gguf, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import checkpoint, make_model

from tercet.srt.model_files.fingerprint import weight_files, weight_fingerprints
from tercet.srt.model_files.gguf_file import GGUFFile
from tercet.srt.model_files.gguf_model import GGUFModel
from tercet.srt.model_files.load_config import LoadFormat, load_model_config
from tercet.srt.text.tokenizer import load_tokenizer

KEYS = "split.no", "split.count", "split.tensors.count"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    return write_gguf(path, make_model("llama_31_tied"), "llama", tokenizer=add_tokenizer)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "a", "b", "ab"])
    writer.add_token_types([2, 3, 3, 1, 1, 1])
    writer.add_token_scores([0.0, 0.0, 0.0, -1.0, -2.0, -0.5])
    writer.add_unk_token_id(0)


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> list[Path]:
    """Three parts or more."""
    return split_gguf(shutil.copy(whole, tmp_path), max_tensors=10)


def bytes_of(model: GGUFModel | GGUFFile) -> dict[str, bytes]:
    return {
        tensor.name: model.tensor_bytes(tensor, 4 * int(np.prod(tensor.shape))).tobytes() for tensor in model.tensors
    }


@settings(max_examples=20, deadline=None)
@given(max_tensors=st.integers(1, 29), empty_first=st.booleans())
def test_the_parts_are_the_whole_model(
    whole: Path, max_tensors: int, empty_first: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    paths = split_gguf(
        shutil.copy(whole, tmp_path_factory.mktemp("split")), max_tensors=max_tensors, empty_first=empty_first
    )
    model, file = GGUFModel(paths[0]), GGUFFile(whole)
    assert model.paths == list(map(str, paths)) and GGUFModel(whole).paths == [str(whole)]
    assert [tensor[:3] for tensor in model.tensors] == [tensor[:3] for tensor in file.tensors]
    assert bytes_of(model) == bytes_of(file) == bytes_of(GGUFModel(whole))
    assert [model.metadata[key] for key in KEYS] == [0, len(paths), len(file.tensors)]
    assert set(model.metadata) - set(file.metadata) == set(KEYS)
    config = load_model_config(paths[0])
    assert config == dataclasses.replace(load_model_config(whole), model_path=str(paths[0]))


def test_the_weights_are_those_of_all_parts(parts: list[Path]) -> None:
    """What is cached of a model depends on each part."""
    config = load_model_config(parts[0])
    assert list(weight_files(config)) == list(map(str, parts))
    before = list(weight_fingerprints(config))
    data = bytearray(parts[-1].read_bytes())
    data[-1] ^= 1
    parts[-1].write_bytes(data)
    after = list(weight_fingerprints(config))
    assert [one == other for one, other in zip(before, after, strict=True)] == [True] * (len(parts) - 1) + [False]


@pytest.mark.parametrize("count", [None, 0, 1])
def test_a_whole_model_may_have_the_name_of_a_part(tmp_path: Path, count: int | None) -> None:
    path = write_part(tmp_path / "m-00001-of-00003.gguf", {"a": 1.0}, no=0, count=count, tensors=1)
    assert GGUFModel(path).paths == [str(path)]


def test_a_file_without_an_ending_is_the_same_model(whole: Path, tmp_path: Path) -> None:
    """Ollama names a file by its digest."""
    blob = Path(
        shutil.copy(whole, tmp_path / "sha256-74701a8c35f6c8d9a4b91f3f3497643001d63e0c7a84e085bed452548fa88d45")
    )
    config = load_model_config(blob)
    assert config == dataclasses.replace(load_model_config(whole), model_path=str(blob))
    assert load_tokenizer(str(blob)).encode("abba") == load_tokenizer(str(whole)).encode("abba")
    assert load_model_config(blob, "gguf") == config
    blob.write_bytes(b"{{ .Prompt }}")
    with pytest.raises(ValueError, match=r"must be a directory with config.json, a GGUF file, or a config.json$"):
        load_model_config(blob)


@pytest.mark.parametrize("load_format", ["auto", "gguf"])
@pytest.mark.parametrize("config", [None, "{}"])
def test_the_models_in_a_folder_are_named(
    parts: list[Path], tmp_path: Path, config: str | None, load_format: LoadFormat
) -> None:
    """Folders of GGUF files may have a config.json."""
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    names = rf"m-00001-of-0000{len(parts)}\.gguf, m\.gguf"
    with pytest.raises(ValueError, match=rf"no safetensors files; give the path of one of its GGUF files: {names}$"):
        load_model_config(tmp_path, load_format)
    for name in ("n.gguf", "o.gguf", "p.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=rf"GGUF files: {names}, n\.gguf and 2 more$"):
        load_model_config(tmp_path, load_format)


def test_a_folder_may_have_a_gguf_file_beside_its_safetensors(whole: Path, tmp_path: Path) -> None:
    config = checkpoint(tmp_path / "a")
    shutil.copy(whole, tmp_path / "a")
    assert load_model_config(tmp_path / "a") == config


def test_parts_are_found_by_the_names_of_links(parts: list[Path], tmp_path: Path) -> None:
    """As in Hugging Face's cache."""
    (tmp_path / "snapshot").mkdir()
    links = [tmp_path / "snapshot" / path.name for path in parts]
    for number, (path, link) in enumerate(zip(parts, links, strict=True)):
        link.symlink_to(path.rename(tmp_path / f"blob{number}"))
    assert load_model_config(links[0]).num_layers == 3


def write_part(
    path: Path, values: Mapping[str, float], *, no: int | None, count: int | None, tensors: int | None
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in zip(KEYS, (no, count, tensors), strict=True):
        if value is not None:
            writer.add_uint32(key, value)
    for name, number in values.items():
        writer.add_tensor(name, np.array([number], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def part(folder: Path, number: int, values: Mapping[str, float], **changes: int | None) -> Path:
    """Writes part `number` (from 1) of 2, of a model with 2 tensors."""
    told: dict[str, int | None] = {"no": number - 1, "count": 2, "tensors": 2, **changes}
    return write_part(folder / f"m-{number:05d}-of-00002.gguf", values, **told)


@pytest.mark.parametrize("load", [load_model_config, lambda path: load_tokenizer(str(path))])
def test_a_later_part_names_the_first_one(parts: list[Path], load: Callable[[Path], object]) -> None:
    load(parts[0])
    with pytest.raises(ValueError, match=rf"is part 2 of {len(parts)}; give the first part, {parts[0]}$"):
        load(parts[1])


def test_the_first_part_has_the_tokenizer(parts: list[Path], whole: Path) -> None:
    expected, actual = (load_tokenizer(str(path)) for path in (whole, parts[0]))
    assert actual.encode("abba") == expected.encode("abba") == [1, 0, 5, 4, 3]


def test_missing_parts_are_named(parts: list[Path]) -> None:
    os.remove(parts[2])
    with pytest.raises(FileNotFoundError, match=rf"is part 1 of .* must have all parts; missing: {parts[2].name}$"):
        load_model_config(parts[0])


def test_few_of_many_missing_parts_are_named(tmp_path: Path) -> None:
    path = write_part(tmp_path / "m-00001-of-60000.gguf", {}, no=0, count=60000, tensors=1)
    with pytest.raises(FileNotFoundError, match=r"m-00002-of-60000.gguf, .*, m-00004-of-60000.gguf and 59996 more$"):
        GGUFModel(path)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"no": 1}, {}, "1-of-00002.gguf is part 2 of 2, so its name must end in '-00002-of-00002.gguf'"),
        ({"count": 3}, {}, "1-of-00002.gguf is part 1 of 3, so its name must end in '-00001-of-00003.gguf'"),
        ({}, {"no": 0}, "2-of-00002.gguf is part 1 of 2, so its name must end in '-00001-of-00002.gguf'"),
        ({}, {"count": 3}, "2-of-00002.gguf is part 2 of 3, so its name must end in '-00002-of-00003.gguf'"),
        ({"no": None}, {}, "1-of-00002.gguf: split.no must be an integer from 0 to 1, got None"),
        ({"no": 2}, {}, "1-of-00002.gguf: split.no must be an integer from 0 to 1, got 2"),
        ({"tensors": None}, {}, "1-of-00002.gguf: split.tensors.count must be an integer from 0 to .*, got None"),
        ({}, {"count": None}, "2-of-00002.gguf is no part of a model, because it has no split.count above 1"),
        ({}, {"tensors": 5}, "2-of-00002.gguf and .*1-of-00002.gguf are not parts of one model: .* is 5 and 2"),
        ({"tensors": 3}, {"tensors": 3}, "the 2 parts must have 3 tensors together, got 2"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    tmp_path: Path, first: dict[str, int | None], second: dict[str, int | None], message: str
) -> None:
    path = part(tmp_path, 1, {"a": 1.0}, **first)
    part(tmp_path, 2, {"b": 2.0}, **second)
    with pytest.raises(ValueError, match=message):
        GGUFModel(path)


def test_a_tensor_in_two_parts_is_named(tmp_path: Path) -> None:
    path = part(tmp_path, 1, {"a": 1.0})
    part(tmp_path, 2, {"a": 1.0})
    with pytest.raises(ValueError, match=r"1-of-00002.gguf and .*2-of-00002.gguf both have the tensor 'a'"):
        GGUFModel(path)


def test_a_part_of_another_name_is_refused(parts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is part 1 of .*, so its name must end in '-00001-of-"):
        GGUFModel(parts[0].rename(tmp_path / "renamed.gguf"))


def test_a_part_that_is_cut_short_is_named(parts: list[Path]) -> None:
    os.truncate(parts[1], 40)
    with pytest.raises(ValueError, match=rf"{parts[1].name} is cut short"):
        load_model_config(parts[0])

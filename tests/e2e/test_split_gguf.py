"""The Python engines with models of several GGUF files, which links name as in Hugging Face's cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_models import Kind, split_gguf, write_gguf
from tiny_models import make_model

import tercet

pytestmark = pytest.mark.e2e

PROMPT = list(range(3, 60))
SAMPLING = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
SETTINGS = {"skip_tokenizer_init": True, "dtype": "float32", "max_total_tokens": 512}


def split_model(folder: Path, *, negated: bool) -> tuple[Path, Path]:
    """Writes a model. Returns its whole file, and the link to the first of its parts."""
    for name in ("blobs", "snapshot", "whole"):
        (folder / name).mkdir(parents=True)
    model = make_model("llama")
    if negated:
        norm = model.model.norm.weight
        norm.data = norm * torch.where(torch.arange(len(norm)) % 2 == 0, -1.0, 1.0)
    whole = write_gguf(folder / "whole" / "m.gguf", model, "llama", kind=Kind.Q8_0)
    paths = split_gguf(whole, max_tensors=12, empty_first=negated)
    for number, path in enumerate(paths):
        (folder / "snapshot" / path.name).symlink_to(path.rename(folder / "blobs" / str(number)))
    return whole, folder / "snapshot" / paths[0].name


def local_tokens(path: Path) -> list[int]:
    engine = tercet.LocalEngine(path, **SETTINGS)
    engine.add_request("a", PROMPT, SAMPLING)
    found: list[int] = []
    while engine.has_unfinished():
        found += engine.step().new_tokens.get("a", [])
    return found


@pytest.mark.timeout(300)
def test_the_engines_load_all_parts(tmp_path: Path) -> None:
    whole, link = split_model(tmp_path / "one", negated=False)
    other_whole, other_link = split_model(tmp_path / "other", negated=True)
    expected, other = local_tokens(whole), local_tokens(other_whole)
    assert local_tokens(link) == expected != other
    with tercet.Engine(link, **SETTINGS) as engine:

        def tokens() -> list[int]:
            found: list[int] = engine.generate(input_ids=PROMPT, sampling_params=SAMPLING)["output_ids"]
            return found

        assert tokens() == expected
        engine.update_weights_from_disk(other_link)
        assert tokens() == other
        (other_link.parent / other_link.name.replace("00001-of", "00002-of")).unlink()
        with pytest.raises(tercet.InvalidRequest, match="its folder must have all parts; missing"):
            engine.update_weights_from_disk(other_link)
        assert tokens() == other

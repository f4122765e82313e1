"""The models of a comparison: both formats of one are the same weights and the same tokenizer."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import gguf
import pytest
import torch
from default_model import model_path
from safetensors.torch import load_file

from tercet.benchmarks.peers import models
from tercet.benchmarks.peers.model_files import TOY, ModelFiles, model_files
from tercet.model_executor.weights.gguf_checkpoint import GGUFCheckpoint
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.timeout(300)

TEXT = "In 1813, 12345 copies of 'Pride & Prejudice' (3 volumes)\n\tcost 18 shillings; the café's naïve!"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    where: Path = tmp_path_factory.mktemp("models")
    files = model_files(TOY, where)
    models.make(files, gguf.GGUFReader(str(model_path())), models._TOY_SETTINGS, models.toy_tensors())
    assert files.complete and sorted(where.iterdir()) == sorted([files.folder, files.gguf]), "nothing else is left"
    return files


def test_both_formats_have_the_same_weights(toy: ModelFiles) -> None:
    from_gguf = GGUFCheckpoint(load_model_config(toy.gguf))
    in_folder = load_file(toy.folder / "model.safetensors")
    assert from_gguf.names == in_folder.keys() and len(in_folder) == 2 + 2 * 9
    for name, weights in in_folder.items():
        assert weights.dtype == torch.bfloat16
        assert torch.equal(weights.float(), from_gguf.tensor(name).float()), name
    assert in_folder["model.layers.1.self_attn.q_proj.weight"].unique().numel() > 100, "they are random"


def test_both_formats_have_the_same_settings(toy: ModelFiles) -> None:
    from_gguf, in_folder = load_model_config(toy.gguf), load_model_config(toy.folder)
    for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "context_len"):
        assert getattr(from_gguf, name) == getattr(in_folder, name), name
    assert from_gguf.rope.theta == in_folder.rope.theta and from_gguf.rms_norm_eps == in_folder.rms_norm_eps
    assert from_gguf.eos_token_ids == in_folder.eos_token_ids
    assert (in_folder.num_layers, in_folder.hidden_size, in_folder.head_dim) == (2, 64, 32)
    assert from_gguf.tie_word_embeddings and in_folder.tie_word_embeddings


def test_both_formats_have_the_default_model_s_tokenizer(toy: ModelFiles) -> None:
    expected = load_tokenizer(str(model_path())).encode(TEXT)
    for place in (toy.gguf, toy.folder):
        assert load_tokenizer(str(place)).encode(TEXT) == expected


def test_weights_are_taken_as_the_file_has_them() -> None:
    source = gguf.GGUFReader(str(model_path()))
    for (name, values), tensor in zip(islice(models.plain_tensors(source), 1, 4), source.tensors[1:4], strict=True):
        assert name == tensor.name and values.dtype == "float32"
        assert values.shape == tuple(int(size) for size in reversed(tensor.shape))


def test_a_place_that_cannot_be_a_folder_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        models.main([__file__])
    assert caught.value.code == 2
    assert __file__ in capsys.readouterr().err

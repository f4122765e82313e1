"""Makes the models of a comparison: `python -m tercet.benchmarks.peers.models DIR`.

There are two models: the default model, and a toy model of two layers with random weights. The toy model is so small
that it shows the server's own overhead. Each is written as a GGUF file and as a Hugging Face folder, with the same
bfloat16 weights. Nothing is downloaded: both are made from the GGUF file of the installed default model.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ...model_executor.weights.gguf_checkpoint import GGUFCheckpoint
from ...srt.model_files.default_model import require_default_model
from ...srt.model_files.load_config import load_model_config
from ...srt.text.gguf_tokenizer import read_gguf_tokenizer
from .model_files import DEFAULT, TOY, ModelFiles, model_files

Array = np.ndarray[Any, np.dtype[Any]]

_TOY_LAYERS, _TOY_HIDDEN, _TOY_MLP, _TOY_HEADS, _TOY_KV_HEADS, _TOY_HEAD_DIM = 2, 64, 128, 2, 1, 32
_TOY_VOCAB = 49_152
"""That of the default model, whose tokenizer the toy has."""
_TOY_SETTINGS = {
    "general.name": "Toy",
    "llama.block_count": _TOY_LAYERS,
    "llama.embedding_length": _TOY_HIDDEN,
    "llama.feed_forward_length": _TOY_MLP,
    "llama.attention.head_count": _TOY_HEADS,
    "llama.attention.head_count_kv": _TOY_KV_HEADS,
    "llama.rope.dimension_count": _TOY_HEAD_DIM,
}
_TOY_STD = 0.02


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tercet.benchmarks.peers.models",
        description="Create the models of a comparison (default and toy, in bfloat16) as GGUF files and as folders.",
    )
    parser.add_argument("where", metavar="DIR", type=Path, help="target folder; files that exist are not changed")
    where = parser.parse_args(argv).where
    try:
        source = gguf.GGUFReader(str(require_default_model()))
        where.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for name in (DEFAULT, TOY):
        files = model_files(name, where)
        if not files.complete:
            toy = name == TOY
            make(files, source, _TOY_SETTINGS if toy else {}, toy_tensors() if toy else plain_tensors(source))
        sys.stdout.write(f"{files.folder} and {files.gguf}\n")
    return 0


def make(
    files: ModelFiles, source: gguf.GGUFReader, settings: Mapping[str, Any], tensors: Iterable[tuple[str, Array]]
) -> None:
    """Writes both formats of one model.

    The metadata comes from `source`, except for `settings`. `tensors`: the weights in float32, by their GGUF names.
    They are rounded to bfloat16. An interrupted call leaves no incomplete file under the final names.
    """
    part = files.folder.with_name(files.folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    _write_gguf(part / files.gguf.name, source, settings, tensors)
    _write_folder(part / files.gguf.name, part / files.folder.name)
    shutil.rmtree(files.folder, ignore_errors=True)
    for path in (files.gguf, files.folder):
        (part / path.name).replace(path)
    part.rmdir()


def make_toy(path: Path) -> Path:
    """Writes the toy model as a GGUF file, and nothing else. Returns the path."""
    _write_gguf(path, gguf.GGUFReader(str(require_default_model())), _TOY_SETTINGS, toy_tensors())
    return path


def plain_tensors(source: gguf.GGUFReader) -> Iterator[tuple[str, Array]]:
    """(name, float32 array in the file's layout) of every weight."""
    for tensor in source.tensors:
        yield tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)


def toy_tensors() -> Iterator[tuple[str, Array]]:
    """Random weights for `_TOY_SETTINGS`, equal in each call. The output head is the embedding."""
    rng = np.random.default_rng(0)
    hidden, mlp, q, kv = _TOY_HIDDEN, _TOY_MLP, _TOY_HEADS * _TOY_HEAD_DIM, _TOY_KV_HEADS * _TOY_HEAD_DIM
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
        "ffn_norm": (hidden,),
        "ffn_gate": (mlp, hidden),
        "ffn_up": (mlp, hidden),
        "ffn_down": (hidden, mlp),
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (_TOY_VOCAB, hidden)}
    for index in range(_TOY_LAYERS):
        shapes.update({f"blk.{index}.{name}": shape for name, shape in layer.items()})
    shapes["output_norm"] = (hidden,)
    for name, shape in shapes.items():
        is_norm = len(shape) == 1
        yield f"{name}.weight", np.ones(shape, np.float32) if is_norm else _normal(rng, shape)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(_TOY_STD)


def _write_gguf(
    path: Path, source: gguf.GGUFReader, settings: Mapping[str, Any], tensors: Iterable[tuple[str, Array]]
) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for field in source.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue  # the writer adds its own fields, and some fields no longer apply
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, settings.get(field.name, field.contents()), field.types[0], element)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    kind = gguf.GGMLQuantizationType.BF16
    for name, values in tensors:
        rounded = gguf.quantize(values, kind)
        # llama.cpp needs norms in float32. They are rounded first, so that both formats have the same weights.
        if values.ndim == 1:
            writer.add_tensor(name, gguf.dequantize(rounded, kind).astype(np.float32))
        else:
            writer.add_tensor(name, rounded, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_folder(path: Path, folder: Path) -> None:
    """Writes the GGUF file's model as a folder, with transformers."""
    config = load_model_config(path)
    checkpoint = GGUFCheckpoint(config)
    eos = config.eos_token_ids[0]
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.context_len,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=config.tie_word_embeddings,
            bos_token_id=config.bos_token_id,
            eos_token_id=eos,
            pad_token_id=eos,
        )
    )
    model.to(torch.bfloat16)
    missing, unexpected = model.load_state_dict(
        {name: checkpoint.tensor(name) for name in checkpoint.names}, strict=False
    )
    assert missing == ["lm_head.weight"] and not unexpected, "the head is the embedding"
    model.save_pretrained(folder)
    # The tokenizer is read with our code: transformers ignores the file's pre-tokenizer and splits numbers differently.
    parts = read_gguf_tokenizer(path)
    template = parts.chat_templates["default"]
    PreTrainedTokenizerFast(
        tokenizer_object=parts.backend, chat_template=template, **parts.special_tokens
    ).save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())

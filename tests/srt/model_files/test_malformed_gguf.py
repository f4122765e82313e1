"""GGUF files with a value of another type, or out of range: a ValueError that names the file, or a start."""

from __future__ import annotations

import math
import os
import struct

import gguf
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tercet.srt.model_files.gguf_file import GGUFFile
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.text.tokenizer import load_tokenizer

# GGUF: key -> (type, value); an array is (type of its items, values).
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
METADATA = {
    "general.architecture": (STRING, "llama"),
    "general.alignment": (UINT32, 32),
    "general.sampling.temp": (FLOAT32, 0.5),
    "general.sampling.top_k": (INT32, 40),
    "split.no": (2, 0),
    "split.count": (2, 0),
    "split.tensors.count": (INT32, 4),
    "llama.block_count": (UINT32, 2),
    "llama.context_length": (UINT32, 64),
    "llama.embedding_length": (UINT32, 32),
    "llama.feed_forward_length": (UINT32, 48),
    "llama.attention.head_count": (UINT32, 4),
    "llama.attention.head_count_kv": (UINT32, 2),
    "llama.attention.key_length": (UINT32, 8),
    "llama.attention.value_length": (UINT32, 8),
    "llama.attention.layer_norm_rms_epsilon": (FLOAT32, 1e-5),
    "llama.rope.dimension_count": (UINT32, 8),
    "llama.rope.freq_base": (FLOAT32, 1e5),
    "llama.rope.scaling.type": (STRING, "yarn"),
    "llama.rope.scaling.factor": (FLOAT32, 2.0),
    "llama.rope.scaling.original_context_length": (UINT32, 32),
    "llama.rope.scaling.finetuned": (BOOL, True),
    "llama.rope.scaling.yarn_beta_fast": (FLOAT32, 16.0),
    "llama.rope.scaling.yarn_beta_slow": (FLOAT32, 2.0),
    "llama.expert_count": (UINT32, 4),
    "llama.expert_used_count": (UINT32, 2),
    "llama.expert_feed_forward_length": (UINT32, 16),
    "llama.vocab_size": (UINT32, 4),
    "tokenizer.ggml.model": (STRING, "llama"),
    "tokenizer.ggml.pre": (STRING, "default"),
    "tokenizer.ggml.tokens": (ARRAY, (STRING, ["<unk>", "<s>", "</s>", "a"])),
    "tokenizer.ggml.token_type": (ARRAY, (INT32, [2, 3, 3, 1])),
    "tokenizer.ggml.scores": (ARRAY, (FLOAT32, [0.0, 0.0, 0.0, -1.0])),
    "tokenizer.ggml.merges": (ARRAY, (STRING, [])),
    "tokenizer.ggml.bos_token_id": (UINT32, 1),
    "tokenizer.ggml.eos_token_id": (UINT32, 2),
    "tokenizer.ggml.unknown_token_id": (UINT32, 0),
    "tokenizer.ggml.add_bos_token": (BOOL, True),
    "tokenizer.ggml.add_space_prefix": (BOOL, True),
    "tokenizer.chat_template": (STRING, "{{ x }}"),
    "tokenizer.chat_templates": (ARRAY, (STRING, ["other"])),
    "tokenizer.chat_template.other": (STRING, "y"),
}

LFM2 = METADATA | {
    "general.architecture": (STRING, "lfm2moe"),
    "llama.attention.head_count_kv": (ARRAY, (INT32, [0, 2])),
    "llama.shortconv.l_cache": (UINT32, 3),
    "llama.leading_dense_block_count": (UINT32, 1),
    "llama.expert_gating_func": (UINT32, 2),
    "llama.expert_weights_norm": (BOOL, True),
    "llama.expert_weights_scale": (FLOAT32, 1.0),
}
"""of LFM2-MoE, before `keys_of`"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


def packed_string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def packed(kind, value):
    if kind == STRING:
        return packed_string(value)
    if kind == ARRAY:
        of, items = value
        return struct.pack("<IQ", of, len(items)) + b"".join(packed(of, item) for item in items)
    return struct.pack(f"<{FORMATS[kind]}", value)


def write_gguf(path, metadata, tensors, last=b""):
    """`tensors`: name -> dimensions in the order of the file. `last`: bytes of one more entry of the metadata."""
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata) + bool(last))
    for key, (kind, value) in metadata.items():
        data += packed_string(key) + struct.pack("<I", kind) + packed(kind, value)
    data += last
    for name, dims in tensors.items():
        data += packed_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, 0)
    path.write_bytes(data + bytes(-len(data) % 32) + bytes(8192))
    return path


def keys_of(arch, metadata):
    """The metadata, in which the keys of the architecture llama are those of another."""
    return {key.replace("llama.", f"{arch}."): entry for key, entry in metadata.items()}


TENSORS = {"token_embd.weight": (32, 4), "blk.0.attn_q.weight": (32, 32)}
LFM2_TENSORS = {"token_embd.weight": (32, 4), "blk.1.attn_q.weight": (32, 32)}
gguf_scalars = {
    **{kind: st.integers(*limits) for kind, limits in {UINT32: (0, 2**32 - 1), INT32: (-(2**31), 2**31 - 1)}.items()},
    UINT64: st.sampled_from([0, 1, 2, 2**63, 2**64 - 1]),
    FLOAT32: st.floats(width=32),
    BOOL: st.booleans(),
    STRING: st.text(st.characters(codec="utf-8"), max_size=4),
}
gguf_values = st.sampled_from(sorted(gguf_scalars)).flatmap(
    lambda kind: (
        st.tuples(st.just(kind), gguf_scalars[kind])
        | st.tuples(st.just(ARRAY), st.tuples(st.just(kind), st.lists(gguf_scalars[kind], max_size=4)))
    )
)


def load_gguf(path):
    """Whether config and tokenizer can be had. Every other error than a ValueError that names the file is a failure."""
    for load in (load_model_config, lambda path: load_tokenizer(str(path))):
        try:
            load(path)
        except ValueError as error:
            assert str(path) in str(error)


@settings(max_examples=600)
@given(key=st.sampled_from(sorted(LFM2)), value=gguf_values)
@example("llama.attention.head_count_kv", (ARRAY, (UINT32, [2, 2])))
@example("llama.attention.head_count_kv", (ARRAY, (UINT64, [0, 2**64 - 1])))
@example("llama.attention.head_count_kv", (ARRAY, (FLOAT32, [0.0, math.nan])))
@example("llama.attention.head_count_kv", (ARRAY, (STRING, ["0", "2"])))
@example("llama.attention.head_count_kv", (ARRAY, (UINT32, [])))
@example("llama.shortconv.l_cache", (ARRAY, (UINT32, [3, 3])))
@example("tokenizer.ggml.eos_token_id", (ARRAY, (UINT32, [2, 2])))
@example("tokenizer.ggml.bos_token_id", (STRING, "1"))
@example("llama.expert_count", (STRING, "none"))
@example("split.count", (STRING, "1"))
@example("split.count", (ARRAY, (UINT32, [1, 2])))
@example("general.sampling.top_k", (FLOAT32, math.inf))
@example("general.sampling.temp", (FLOAT32, math.nan))
@example("llama.rope.scaling.type", (ARRAY, (UINT32, [1, 2])))
@example("llama.rope.scaling.original_context_length", (ARRAY, (UINT32, [1, 2])))
@example("tokenizer.ggml.add_bos_token", (ARRAY, (BOOL, [True, False])))
@example("tokenizer.ggml.model", (ARRAY, (UINT32, [1, 2])))
@example("tokenizer.ggml.scores", (ARRAY, (FLOAT32, [math.nan] * 4)))
@example("tokenizer.ggml.tokens", (ARRAY, (STRING, ["a"] * 4)))
def test_any_gguf_metadata(folder, key, value):
    load_gguf(write_gguf(folder / "m.gguf", METADATA | {key: value}, TENSORS))
    gpt2 = METADATA | {"tokenizer.ggml.model": (STRING, "gpt2")}
    load_gguf(write_gguf(folder / "m.gguf", gpt2 | {key: value}, TENSORS))
    gpt_oss = METADATA | {"general.architecture": (STRING, "gpt-oss"), "llama.attention.sliding_window": (UINT32, 4)}
    load_gguf(write_gguf(folder / "m.gguf", keys_of("gpt-oss", gpt_oss | {key: value}), TENSORS))
    load_gguf(write_gguf(folder / "m.gguf", keys_of("lfm2moe", LFM2 | {key: value}), LFM2_TENSORS))


def test_what_is_changed_there_can_be_read(folder):
    path = write_gguf(folder / "m.gguf", METADATA, TENSORS)
    assert load_model_config(path).context_len == 64
    assert load_tokenizer(str(path)).encode("a")
    assert load_model_config(path).eos_token_ids == (2,)
    assert gguf.GGUFReader(path).get_field("llama.block_count") is not None
    config = load_model_config(write_gguf(folder / "m.gguf", keys_of("lfm2moe", LFM2), LFM2_TENSORS))
    assert config.convolutions.layers == (0,) and config.experts.dense_layers == (0,)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.attention.head_count_kv", (ARRAY, (UINT32, [2, 1])), "head_count_kv must be an integer from 1 to"),
        ("tokenizer.ggml.eos_token_id", (ARRAY, (UINT32, [2])), "eos_token_id must be an integer"),
        ("llama.expert_count", (STRING, "8"), "expert_count must be an integer from 0 .* got '8'"),
        ("split.count", (STRING, "2"), "split.count must be an integer from 0 .* got '2'"),
        ("general.sampling.top_k", (FLOAT32, math.inf), "top_k must be a finite number, got inf"),
        ("llama.attention.layer_norm_rms_epsilon", (FLOAT32, math.nan), "epsilon must be a finite number above 0"),
        ("llama.attention.layer_norm_rms_epsilon", (FLOAT32, 0.0), "epsilon must be a finite number above 0, got 0.0"),
    ],
)
def test_gguf_metadata_is_refused_by_name(tmp_path, key, value, message):
    path = write_gguf(tmp_path / "m.gguf", METADATA | {key: value}, TENSORS)
    with pytest.raises(ValueError, match=rf"m\.gguf: .*{message}"):
        load_model_config(path)


def test_a_model_may_have_more_heads_than_its_vectors_have_numbers(tmp_path):
    """The scale of attention of this model depends on both."""
    given = {"embedding_length": 32, "block_count": 62, "attention.head_count": 64, "attention.head_count_kv": 2}
    given |= {"context_length": 64, "feed_forward_length": 64, "attention.key_length": 16}
    metadata = {f"gemma3.{key}": (UINT32, value) for key, value in given.items()}
    path = write_gguf(tmp_path / "m.gguf", metadata | {"general.architecture": (STRING, "gemma3")}, TENSORS)
    assert load_model_config(path).attention_scale == pytest.approx(2**0.5)


@pytest.mark.parametrize("no_token", [(INT32, -1), (UINT32, 2**32 - 1)])
def test_minus_one_is_no_token(tmp_path, no_token):
    keys = {f"tokenizer.ggml.{name}_token_id": no_token for name in ("bos", "eot")}
    config = load_model_config(write_gguf(tmp_path / "m.gguf", METADATA | keys, TENSORS))
    assert config.bos_token_id is None and config.eos_token_ids == (2,)


@settings(max_examples=100)
@given(
    name=st.sampled_from([*TENSORS, "rope_freqs.weight"]),
    dims=st.lists(st.sampled_from([0, 1, 4, 32, 2**40, 2**64 - 1]), max_size=5),
)
@example("token_embd.weight", [])
def test_any_dimensions_of_gguf_tensors(folder, name, dims):
    load_gguf(write_gguf(folder / "m.gguf", METADATA, TENSORS | {name: tuple(dims)}))


@pytest.mark.parametrize(
    "last",
    [
        packed_string("x") + struct.pack("<IQ", STRING, 10**6),
        packed_string("x") + struct.pack("<IQ", STRING, 2**63),
        packed_string("x") + struct.pack("<IIQQ", ARRAY, STRING, 1, 10**6),
        packed_string("x") + struct.pack("<IIQ", ARRAY, UINT64, 10**6),
    ],
)
def test_a_gguf_string_past_the_end(tmp_path, last):
    path = write_gguf(tmp_path / "m.gguf", METADATA, {}, last)
    with pytest.raises(ValueError, match=r"m\.gguf is cut short"):
        GGUFFile(path)


def test_gguf_strings_that_are_no_text(tmp_path):
    bad = struct.pack("<Q", 1) + b"\xff"
    for last in (struct.pack("<I", STRING) + bad, struct.pack("<IIQ", ARRAY, STRING, 1) + bad):
        file = GGUFFile(write_gguf(tmp_path / "m.gguf", METADATA, {}, packed_string("x") + last))
        with pytest.raises(ValueError, match=r"m\.gguf: the string at byte \d+ must be UTF-8"):
            file.metadata["x"]


def test_a_gguf_file_that_is_a_named_pipe(tmp_path):
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match="must be a regular file, got a named pipe"):
        load_model_config(tmp_path / "m.gguf")

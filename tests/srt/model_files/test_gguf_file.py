from __future__ import annotations

import gc
import os
import struct
import weakref

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tercet.srt.model_files.gguf_file import GGUFFile, is_gguf


def write_file(path, *, alignment=None):
    writer = gguf.GGUFWriter(str(path), "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(3)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bool("some.flag", True)
    writer.add_int64("some.big", -(2**40))
    writer.add_float64("some.double", 0.1)
    writer.add_token_list(["<s>", "é", "日本", ""])
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_chat_template("{{ x }}\nÜ")
    writer.add_tensor("a", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("b", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 64])
def test_reads_what_the_reference_writer_wrote(tmp_path, alignment):
    file = GGUFFile(write_file(tmp_path / "x.gguf", alignment=alignment))
    metadata = file.metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 3
    assert metadata["some.flag"] is True
    assert metadata["some.big"] == -(2**40)
    assert metadata["some.double"] == 0.1
    assert metadata["tokenizer.ggml.tokens"] == ["<s>", "é", "日本", ""]
    assert metadata["tokenizer.ggml.tokens"] is metadata["tokenizer.ggml.tokens"]
    assert np.array_equal(metadata["some.numbers"], [1, 2, 3])
    assert metadata["tokenizer.chat_template"] == "{{ x }}\nÜ"
    assert "some.flag" in metadata and "absent" not in metadata and metadata.get("absent") is None
    assert len(list(metadata)) == len(metadata)

    a, b = file.tensors
    assert (a.name, a.shape, a.type) == ("a", (3, 4), gguf.GGMLQuantizationType.F32)
    assert np.array_equal(file.tensor_bytes(a, 48).view(np.float32).reshape(a.shape), np.arange(12).reshape(3, 4))
    assert np.array_equal(file.tensor_bytes(b, 10).view(np.float16), np.arange(5))


def test_a_file_is_known_by_its_ending_or_by_its_first_bytes(tmp_path):
    path = write_file(tmp_path / "x.gguf")
    blob = path.rename(tmp_path / "sha256-0123")
    (tmp_path / "other").write_bytes(b"GGU")
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert [is_gguf(found) for found in (blob, str(blob), "absent.gguf")] == [True] * 3
    assert not any(
        is_gguf(tmp_path / name) for name in ("other", "folder.gguf", "pipe", "absent", "other/x", "x" * 300)
    )


def test_a_file_that_cannot_be_read_is_no_file_of_another_kind():
    with pytest.raises(OSError):
        is_gguf("/proc/self/mem")  # nothing is at the address 0


def test_agrees_with_the_reference_reader(tmp_path):
    path = write_file(tmp_path / "x.gguf")
    reference = gguf.GGUFReader(str(path))
    file = GGUFFile(path)
    assert set(file.metadata) == {key for key in reference.fields if not key.startswith("GGUF.")}
    expected = [
        (t.name, tuple(int(n) for n in reversed(t.shape)), int(t.tensor_type), t.data_offset) for t in reference.tensors
    ]
    assert [tuple(t) for t in file.tensors] == expected


def test_refuses_other_files_by_name(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + b"\0" * 100)
    with pytest.raises(ValueError, match="not a GGUF file"):
        GGUFFile(path)
    path.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="shorter than a header"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(ValueError, match="version 1"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(ValueError, match="big endian"):
        GGUFFile(path)
    with pytest.raises(FileNotFoundError):
        GGUFFile(tmp_path / "absent.gguf")


def test_a_file_cut_anywhere_is_a_value_error(tmp_path):
    whole = write_file(tmp_path / "x.gguf").read_bytes()
    file = GGUFFile(tmp_path / "x.gguf")
    last = file.tensors[-1]
    cut_path = tmp_path / "cut.gguf"
    for length in range(0, last.offset + 10, 7):
        cut_path.write_bytes(whole[:length])
        with pytest.raises(ValueError):
            cut = GGUFFile(cut_path)
            for tensor in cut.tensors:
                cut.tensor_bytes(tensor, 48 if tensor.name == "a" else 10)


@pytest.mark.parametrize("position", [8, 16])
def test_absurd_counts_are_a_value_error(tmp_path, position):
    whole = bytearray(write_file(tmp_path / "x.gguf").read_bytes())
    for count in (2**31, 2**63, 2**64 - 1):
        whole[position : position + 8] = struct.pack("<Q", count)
        (tmp_path / "absurd.gguf").write_bytes(whole)
        with pytest.raises(ValueError):
            GGUFFile(tmp_path / "absurd.gguf")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_never_do_worse_than_a_value_error(tmp_path, data):
    path = tmp_path / "x.gguf"
    if not path.exists():
        write_file(path)
    whole = bytearray(path.read_bytes())
    header = min(t.offset for t in GGUFFile(path).tensors)
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(whole)
    try:
        file = GGUFFile(damaged)
        for key in file.metadata:
            file.metadata[key]
    except ValueError:
        pass


def test_a_file_that_nobody_holds_is_closed_at_once(tmp_path):
    path = write_file(tmp_path / "x.gguf")
    gc.disable()
    try:
        file = GGUFFile(path)
        assert file.metadata
        gone = weakref.ref(file)
        del file
        assert gone() is None, "only a garbage collection would find it"
    finally:
        gc.enable()

"""Tokenizers out of GGUF files that the tests write themselves."""

from __future__ import annotations

import functools
import json

import gguf
import pytest
from hypothesis import assume, given
from tokenizer_samples import TEXTS, byte_level_tokenizer, texts

from tercet.srt.text.gguf_pre_tokenizers import MERGES_ARE_OPTIONAL, PRE_TOKENIZERS
from tercet.srt.text.gguf_tokenizer import merges_by_score
from tercet.srt.text.token_bytes import byte_level_alphabet
from tercet.srt.text.tokenizer import load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"
WAYS = (
    "gpt-2",
    "smollm",
    "llama-bpe",
    "qwen2",
    "qwen35",
    "seed-coder",
    "tekken",
    "gpt-4o",
    "deepseek-coder",
    "deepseek-llm",
    "hunyuan-dense",
    "default",
)


def write_gguf(path, *, model, tokens, types, merges=None, scores=None, arch="llama", pre=None, **more):
    writer = gguf.GGUFWriter(str(path), arch)
    # What transformers wants to know of a model before it looks at its tokenizer.
    writer.add_block_count(1)
    writer.add_context_length(8)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if tokens is not None:
        writer.add_token_list(tokens)
        writer.add_token_types(types)
    if scores is not None:
        writer.add_token_scores(scores)
    if merges is not None:
        writer.add_token_merges(merges)
    for key, value in more.items():
        key = f"tokenizer.{key}" if key.startswith("chat_template") else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_file(path, extra=(), **more):
    """The vocabulary and merges of a trained byte-level tokenizer, and `extra` tokens with their types. One is called
    <|endoftext|> because transformers adds a token of that name where there is none."""
    model = json.loads(byte_level_tokenizer().backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens = [token.replace("<|end|>", "<|endoftext|>").replace("<｜bar｜>", "<|second|>") for token in tokens]
    types = [CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 2)]
    return write_gguf(
        path,
        model="gpt2",
        tokens=[*tokens, *(token for token, _ in extra)],
        types=[*types, *(kind for _, kind in extra)],
        merges=[" ".join(merge) for merge in model["merges"]],
        **more,
    )


def sentencepiece_file(path, extra=(), **more):
    """Pieces of an English sentence, scored by how early they come, all bytes, and `extra` tokens with their types."""
    tokens, types = ["<unk>", "<s>", "</s>"], [UNKNOWN, CONTROL, CONTROL]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [BYTE] * 256
    words = (SPACE + "the quick brown fox isn't here, is it? 12 1 éa aa aaa aaaa").replace(" ", f" {SPACE}").split()
    pieces = dict.fromkeys(
        w[a:b] for n in (2, 3, 4, 5, 6) for w in words for a in range(len(w)) if (b := a + n) <= len(w)
    )
    pieces.update(dict.fromkeys([SPACE * 2, SPACE * 4, SPACE]))
    pieces.update(dict.fromkeys("".join(words)))
    tokens += pieces
    types += [NORMAL] * len(pieces)
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0] * len(extra)
    tokens += [token for token, _ in extra]
    types += [kind for _, kind in extra]
    return write_gguf(path, model="llama", tokens=tokens, types=types, scores=scores, **more)


def from_transformers(path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


@functools.cache
def both(folder, kind, **more):
    path = folder / f"{kind}-{'-'.join(f'{k}={v}' for k, v in more.items())}.gguf"
    write = byte_level_file if kind == "gpt2" else sentencepiece_file
    write(path, bos_token_id=0 if kind == "gpt2" else 1, eos_token_id=1 if kind == "gpt2" else 2, **more)
    return load_tokenizer(str(path)), from_transformers(path)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"])
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_as_transformers_reads_it(folder, pre, text):
    ours, theirs = both(folder, "gpt2", pre=pre, add_bos_token=pre == "tekken", add_eos_token=pre == "qwen2")
    if pre in MERGES_ARE_OPTIONAL:
        # A piece that is a token stays one, which transformers does not know of: spare it the difference.
        theirs.backend_tokenizer.model.ignore_merges = True
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


@pytest.mark.parametrize("pre", WAYS)
@given(text=texts)
def test_cutting_keeps_every_byte(pre, text):
    pieces = PRE_TOKENIZERS[pre]().pre_tokenize_str(text)
    alphabet = byte_level_alphabet()
    assert bytes(alphabet[character] for piece, _ in pieces for character in piece) == text.encode()


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's  12", ["it", "'s", " ", " 12"]),
        ("smollm", "it's  12 x٣½", ["it", "'s", "  ", "1", "2", " x", "٣", "½"]),
        ("starcoder", "a 1b", ["a", " ", "1", "b"]),
        (
            "hunyuan-dense",
            "a.bc 12345x 你好é+=1\n y",
            ["a", ".bc", " ", "123", "45", "x", " ", "你好", "é", "+=", "1", "\n", " y"],
        ),
        ("glm4", "IT'S 1234", ["IT", "'S", " ", "123", "4"]),
        ("llama-bpe", "IT'S  12345 x\n\n y", ["IT", "'S", " ", " ", "123", "45", " x", "\n\n", " y"]),
        ("lfm2", "IT'S  12345 x\n\n y", ["IT", "'S", " ", " ", "123", "45", " x", "\n\n", " y"]),
        ("qwen2", "a123 .b\n", ["a", "1", "2", "3", " .", "b", "\n"]),
        ("seed-coder", "a12 .\n\nb", ["a", "1", "2", " .", "\n\n", "b"]),
        ("tekken", "fooBar/\nX12", ["foo", "Bar", "/\n", "X", "1", "2"]),
        ("gpt-4o", "don'tStop 1234", ["don't", "Stop", " ", "123", "4"]),
        ("deepseek-coder", "a 12\nb!?", ["a", " ", "1", "2", "\n", "b", "!?"]),
        ("deepseek-llm", "Éa 12345\nb!? 你好ß ", ["É", "a", " ", "12345", "\n", "b", "!?", " ", "你好", "ß", " "]),
        ("deepseek-v3", "a.bc 12345x", ["a", ".bc", " ", "123", "45", "x"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
    ],
)
def test_the_ways_to_cut(pre, text, pieces):
    assert [text[a:b] for _, (a, b) in PRE_TOKENIZERS[pre]().pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("pre", ["llama-bpe", "lfm2"])
def test_a_piece_that_is_a_token_stays_one_where_the_model_wants_it(pre, tmp_path):
    """ "xyz" is a token that no merges lead to."""
    extra = [("xyz", NORMAL)]
    plain = load_tokenizer(str(byte_level_file(tmp_path / "a.gguf", extra, pre="qwen2")))
    whole = load_tokenizer(str(byte_level_file(tmp_path / "b.gguf", extra, pre=pre, add_bos_token=False)))
    assert len(plain.encode("xyz")) > 1
    assert [whole.id_to_token(token) for token in whole.encode("xyz")] == ["xyz"]


def test_special_and_user_defined_tokens(tmp_path):
    """Also such as are not written in the byte-level alphabet, and ordinary tokens that are named for padding."""
    extra = [("<｜User▁says｜>", CONTROL), ("<think>", USER_DEFINED), ("   ", USER_DEFINED), ("<unused>", UNUSED)]
    path = tmp_path / "x.gguf"
    first = byte_level_tokenizer().vocab_size - 1  # without the added one
    exclamation = byte_level_tokenizer().encode("!")[0]
    byte_level_file(path, extra, pre="qwen2", eos_token_id=1, eot_token_id=first, padding_token_id=exclamation)
    tokenizer = load_tokenizer(str(path))
    user, think, spaces, unused = range(first, first + 4)
    ids = tokenizer.encode("<|endoftext|>a<｜User▁says｜><think>   <unused>")
    assert ids[0] == 0 and ids[2:5] == [user, think, spaces] and unused not in ids
    assert tokenizer.special_ids == {0, 1, user}
    assert tokenizer.eos_token_ids == {1, user}
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|endoftext|>a<｜User▁says｜><think>   <unused>"
    assert tokenizer.decode([*ids, exclamation]) == "a<think>   <unused>!"
    assert tokenizer.vocab_size == first + 4


@pytest.mark.parametrize(
    ("more", "starts"),
    [
        ({"pre": "llama-bpe"}, True),
        ({"pre": "lfm2"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "qwen2"}, False),
        ({"pre": "qwen2", "add_bos_token": True}, True),
        ({}, False),
    ],
)
def test_bos(tmp_path, more, starts):
    tokenizer = load_tokenizer(str(byte_level_file(tmp_path / "x.gguf", bos_token_id=1, **more)))
    assert (tokenizer.encode("x")[0] == 1) == starts
    assert tokenizer.encode("x", add_special_tokens=False)[0] != 1
    assert tokenizer.bos_token_id == 1


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_as_transformers_reads_phi3(folder, text):
    """Of all architectures it is this one for which transformers puts the space mark where sentencepiece does."""
    ours, theirs = both(folder, "llama", arch="phi3")
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


@given(text=texts)
def test_sentencepiece_as_transformers_reads_llama(folder, text):
    """It marks the start of a text only, and not where a space is; we go with sentencepiece and llama.cpp."""
    assume(text and not text.startswith((" ", SPACE)) and not any(s in text for s in ("<s>", "</s>", "<unk>")))
    ours, theirs = both(folder, "llama")
    assert ours.encode(text) == theirs.encode(text)


def test_sentencepiece_marks(folder, tmp_path):
    ours, _ = both(folder, "llama")

    def pieces(tokenizer, text):
        return [tokenizer.id_to_token(token) for token in tokenizer.encode(text)]

    assert pieces(ours, "the") == ["<s>", SPACE + "the"]
    assert pieces(ours, " the</s>the") == ["<s>", SPACE, SPACE + "the", "</s>", SPACE + "the"]
    assert ours.decode(ours.encode(" the fox日")) == " the fox日"
    path = sentencepiece_file(tmp_path / "x.gguf", add_space_prefix=False, add_bos_token=False)
    bare = load_tokenizer(str(path))
    assert pieces(bare, "the fox") == ["the", SPACE + "fox"]
    assert bare.decode(bare.encode(" the")) == " the"


def test_ids_beyond_the_vocabulary_name_no_token(tmp_path):
    path = byte_level_file(tmp_path / "x.gguf", pre="qwen2", bos_token_id=1, eos_token_id=99_999, add_bos_token=True)
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.eos_token_ids == frozenset() and tokenizer.special_tokens == {"bos_token": "<|second|>"}
    path = write_gguf(tmp_path / "y.gguf", model="llama", tokens=["a"], types=[NORMAL], scores=[0.0])
    assert load_tokenizer(str(path)).special_tokens == {"unk_token": "a"}


@pytest.mark.parametrize(
    ("kind", "more", "ends"),
    [
        (CONTROL, {}, True),
        (CONTROL, {"eot_token_id": 0}, False),
        (NORMAL, {}, False),
    ],
)
def test_a_file_that_names_no_end_of_a_turn(tmp_path, kind, more, ends):
    """As in llama.cpp, it is found by its text."""
    extra = [("<|other|>", CONTROL), ("<|eot_id|>", kind)]
    path = byte_level_file(tmp_path / "x.gguf", extra, pre="llama-bpe", eos_token_id=1, **more)
    tokenizer = load_tokenizer(str(path))
    eot = tokenizer.token_to_id("<|eot_id|>")
    assert tokenizer.eos_token_ids == {1} | set(more.values()) | ({eot} if ends else set())


@pytest.mark.parametrize("kind", [NORMAL, CONTROL])
@pytest.mark.parametrize(("arch", "more"), [("gemma2", {}), ("gemma3", {}), ("gemma3", {"add_space_prefix": False})])
def test_gemma(tmp_path, kind, arch, more):
    """Some files give the marks of turns the type of ordinary tokens, and do not say that there is no prefix."""
    extra = [("<start_of_turn>", kind), ("<end_of_turn>", kind)]
    tokenizer = load_tokenizer(str(sentencepiece_file(tmp_path / "x.gguf", extra, arch=arch, **more)))
    start, end = map(tokenizer.token_to_id, ("<start_of_turn>", "<end_of_turn>"))
    ids = tokenizer.encode("<start_of_turn>the fox<end_of_turn>the")
    pieces = ["<s>", "<start_of_turn>", "the", SPACE + "fox", "<end_of_turn>", "the"]
    assert [tokenizer.id_to_token(token) for token in ids] == pieces
    assert tokenizer.eos_token_ids == {2, end} and {start, end} <= tokenizer.special_ids
    assert tokenizer.decode(ids) == "the foxthe"


@pytest.mark.parametrize("marks", [("<|return|>", "<|call|>"), ("<|return|>",), ("<|call|>",)])
def test_the_ends_of_gpt_oss(tmp_path, marks):
    """A file names only the end of an answer. <|end|> ends one of several messages, and <|call|> asks for a tool."""
    others = [("<|start|>", CONTROL), ("<|end|>", CONTROL), ("<|message|>", CONTROL)]
    first = byte_level_tokenizer().vocab_size - 1
    path = byte_level_file(
        tmp_path / "x.gguf",
        [*((mark, CONTROL) for mark in marks), *others],
        pre="gpt-4o",
        arch="gpt-oss",
        eos_token_id=first,
        padding_token_id=0,
    )
    tokenizer = load_tokenizer(str(path))
    ends = {tokenizer.id_to_token(token) for token in tokenizer.eos_token_ids}
    assert ends == ({*marks, "<|endoftext|>"} if len(marks) == 2 else {*marks, "<|end|>"})
    ids = tokenizer.encode("<|start|>user<|message|>Hi<|end|>")
    assert tokenizer.id_to_token(ids[0]) == "<|start|>" and tokenizer.id_to_token(ids[-1]) == "<|end|>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>user<|message|>Hi<|end|>"


def test_chat_templates(tmp_path):
    path = byte_level_file(tmp_path / "x.gguf", pre="qwen2", chat_template="{{ messages[0].content }}!")
    assert load_tokenizer(str(path)).apply_chat_template([{"role": "user", "content": "Hi"}]) == "Hi!"


def test_refuses_by_name(tmp_path):
    path = tmp_path / "x.gguf"
    with pytest.raises(ValueError, match=r"'no-such-pre'.*qwen2"):
        load_tokenizer(str(byte_level_file(path, pre="no-such-pre")))
    with pytest.raises(ValueError, match=r"'rwkv'.*gpt2"):
        load_tokenizer(str(write_gguf(path, model="rwkv", tokens=["a"], types=[NORMAL])))
    with pytest.raises(ValueError, match=r"tokens must be an array of strings"):
        load_tokenizer(str(write_gguf(path, model="gpt2", tokens=None, types=None)))
    with pytest.raises(ValueError, match=r"merges must be an array of strings"):
        load_tokenizer(str(write_gguf(path, model="gpt2", tokens=["a"], types=[NORMAL])))
    with pytest.raises(ValueError, match=r"'x' and 'y' is not in the vocabulary"):
        load_tokenizer(str(write_gguf(path, model="gpt2", tokens=["x", "y"], types=[NORMAL] * 2, merges=["x y"])))
    with pytest.raises(ValueError, match=r"is not in the vocabulary"):
        load_tokenizer(str(write_gguf(path, model="gpt2", tokens=["x", "y"], types=[NORMAL] * 2, merges=[""])))
    with pytest.raises(ValueError, match=r"token_type must be an array of 2 numbers"):
        load_tokenizer(str(write_gguf(path, model="gpt2", tokens=["x", "y"], types=[NORMAL], merges=["x x"])))
    with pytest.raises(ValueError, match=r"scores must be an array of 1 numbers"):
        load_tokenizer(str(write_gguf(path, model="llama", tokens=["a"], types=[NORMAL])))
    path.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="not a GGUF file"):
        load_tokenizer(str(path))


class CountingText(str):
    """Text that counts how often it is sliced."""

    num_slices = 0

    def __getitem__(self, key):
        CountingText.num_slices += 1
        return super().__getitem__(key)


def test_a_token_of_a_megabyte_is_cut_only_where_tokens_can_meet():
    """A damaged file may have one. All its splits would take minutes."""
    long = CountingText("x" * 1_000_000)
    tokens = ["x", "xx", "x" * 999_998, long]
    merges = merges_by_score(tokens, [0.0, -1.0, -2.0, -3.0])
    assert [(len(left), len(right)) for left, right in merges] == [(1, 1), (999_998, 2), (2, 999_998)]
    assert CountingText.num_slices < 20


def test_every_way_to_cut_is_tested():
    assert {PRE_TOKENIZERS[name] for name in WAYS} == set(PRE_TOKENIZERS.values())


FIM = [("<PRE>", NORMAL), ("<SUF>", USER_DEFINED), ("<MID>", CONTROL), ("<NEXT>", CONTROL)]


@pytest.mark.parametrize("older", [True, False])
def test_the_tokens_for_fill_in_the_middle_that_a_file_names(tmp_path, older):
    path, first = tmp_path / "x.gguf", len(byte_level_tokenizer().backend.get_vocab()) - 1
    new = {"fim_pre_token_id": first, "fim_suf_token_id": first + 1, "fim_mid_token_id": first + 2}
    old = {"prefix_token_id": first, "suffix_token_id": first + 1, "middle_token_id": first + 2}
    given = old if older else {**dict.fromkeys(old, 5), **new}
    tokenizer = load_tokenizer(str(byte_level_file(path, FIM, pre="qwen2", **given, fim_sep_token_id=first + 3)))
    assert tokenizer.fim.prompt([97], [98]) == [first, 97, first + 1, 98, first + 2]
    assert tokenizer.fim.end_ids == {*range(first, first + 4), tokenizer.token_to_id("<|endoftext|>")}
    assert [token for token in range(first, first + 4) if token in tokenizer.special_ids] == [first + 2, first + 3]


@pytest.mark.parametrize("beyond", [99_999, None])
def test_a_file_that_lacks_a_token_for_fill_in_the_middle(tmp_path, beyond):
    more = {} if beyond is None else {"fim_mid_token_id": beyond}
    path = byte_level_file(tmp_path / "x.gguf", pre="qwen2", fim_pre_token_id=5, fim_suf_token_id=6, **more)
    assert load_tokenizer(str(path)).fim is None


def test_a_file_with_a_family_of_tokens_for_fill_in_the_middle_need_not_name_them(tmp_path):
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
    path = byte_level_file(tmp_path / "x.gguf", [(name, CONTROL) for name in names], pre="qwen2")
    tokenizer = load_tokenizer(str(path))
    first = tokenizer.token_to_id("<|fim_prefix|>")
    assert tokenizer.fim.mark_ids == [first, first + 1, first + 2]
    assert first + 3 in tokenizer.fim.end_ids

"""Tokenizers out of Hugging Face directories, against transformers on the same directory."""

from __future__ import annotations

import json

import pytest
from tokenizer_samples import TEXTS, byte_level_tokenizer, sentencepiece_tokenizer
from tokenizers import AddedToken, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tercet.srt.text.tokenizer import load_tokenizer


def copy(backend):
    return type(backend).from_str(backend.to_str())


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def directory(request, tmp_path_factory):
    """As `save_pretrained` writes it, with BOS by a post-processor and specials that tokenizer.json does not name."""
    path = tmp_path_factory.mktemp("model")
    source = byte_level_tokenizer() if request.param == "byte-level" else sentencepiece_tokenizer()
    backend = copy(source.backend)
    bos = "<|end|>" if request.param == "byte-level" else "<s>"
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=AddedToken("<|eot|>", special=True),
        pad_token="<|pad|>",
        additional_special_tokens=["<|tool|>"],
    )
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}<|tool|>{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer.save_pretrained(path)
    return path


def assert_equal(ours, theirs):
    for text in [*TEXTS, "<|eot|>x <|tool|><|pad|>y<plain▁added>"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == {theirs.eos_token_id}
    specials = {token for token, added in theirs.added_tokens_decoder.items() if added.special}
    assert ours.special_ids == specials
    chat = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat, tokenize=False)


def test_as_transformers_reads_it(directory):
    ours = load_tokenizer(str(directory))
    assert_equal(ours, AutoTokenizer.from_pretrained(directory))
    assert ours.encode("x")[0] == ours.bos_token_id
    assert load_tokenizer("absent", tokenizer_path=str(directory)).encode("x") == ours.encode("x")
    for file in ("tokenizer.json", "config.json"):  # a config.json is also the path of a model with random weights
        assert load_tokenizer(str(directory / file)).encode("x") == ours.encode("x")


def test_specials_of_the_configuration_alone(directory, tmp_path):
    """tokenizer.json without them: the configuration brings them back."""
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    forgotten = ("<|pad|>", "<|tool|>")
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in forgotten]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert_equal(load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path))


def test_added_tokens_of_the_configuration_alone(tmp_path):
    backend = copy(byte_level_tokenizer().backend)
    backend.save(str(tmp_path / "tokenizer.json"))
    first = backend.get_vocab_size()
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {
        str(first + 1): {"content": "<|tool|>", "special": True, **flags},
        str(first): {"content": "<|pad|>", "special": False, **flags, "lstrip": True},
        "0": {"content": "<|end|>", "special": True, **flags},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "bos_token": "<|end|>",
        "eos_token": "<|tool|>",
        "chat_template": "{{ eos_token }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(str(tmp_path))
    assert_equal(ours, AutoTokenizer.from_pretrained(tmp_path))
    assert ours.encode("  <|pad|><|tool|>") == [first, first + 1]


def test_specials_of_the_configuration_as_transformers_reads_them(tmp_path):
    """A named token keeps its properties, and one that is only listed is special if tokenizer.json says so."""
    backend = copy(byte_level_tokenizer().backend)
    flags = {"lstrip": True, "rstrip": True, "normalized": False, "single_word": False}
    backend.add_tokens([AddedToken("<call>", normalized=False), AddedToken("<|turn|>", normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|turn|>",
        "pad_token": {"__type": "AddedToken", "content": "<|pad|>", **flags},
        "additional_special_tokens": ["<call>", "<|new|>"],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    ids = ours.encode("a  <|pad|>  <call>b<|turn|><|new|>")
    assert ids == theirs.encode("a  <|pad|>  <call>b<|turn|><|new|>")
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "a<call>b"


def test_the_older_special_tokens_map(tmp_path):
    backend = copy(byte_level_tokenizer().backend)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    names = {
        "bos_token": {
            "content": "<|end|>",
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        },
        "eos_token": "<|eot|>",
        "additional_special_tokens": ["<plain▁added>"],
    }
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    assert_equal(load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path))


def test_named_templates(tmp_path):
    byte_level_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    chat = [{"role": "user", "content": "Hi"}]

    def says(tools=None):
        return load_tokenizer(str(tmp_path)).apply_chat_template(chat, tools=tools)

    config = {"chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert says() == "plain" and says(tools=[]) == "tools"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    assert says() == "one" and says(tools=[]) == "one"
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert says() == "from a file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools from a file")
    assert says() == "from a file" and says(tools=[]) == "tools from a file"
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="none named 'default'"):
        says()


def test_a_broken_template_of_the_model_is_told_when_it_is_used(tmp_path):
    byte_level_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("x")
    with pytest.raises(ValueError, match="not valid"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_configuration(tmp_path, file, content):
    byte_level_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=file):
        load_tokenizer(str(tmp_path))


def test_older_formats_go_through_transformers(tmp_path):
    """vocab.json and merges.txt, as GPT-2 has them."""
    model = json.loads(byte_level_tokenizer().backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges)
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<|end|>",
        "eos_token": "<|end|>",
        "unk_token": "<|end|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_token_ids == {theirs.eos_token_id}
    assert ours.token_bytes is not None

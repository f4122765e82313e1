"""Files of a model with a value of another type, or out of range: a ValueError that names the file, or a start."""

from __future__ import annotations

import copy
import json
import math
import os
import re

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizer_samples import byte_level_tokenizer

from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.text.tokenizer import load_tokenizer

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 131,
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": [2, 3],
    "bos_token_id": 1,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": None,
    "quantization_config": None,
    "sliding_window": None,
}
ROPE = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1,
        "attention_factor": None, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": True, "rope_theta": 5e3,
    },
}  # fmt: skip
QWEN = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "use_sliding_window": True,
    "max_window_layers": 1,
    "sliding_window": 9,
    "layer_types": ["full_attention"] * 3,
}
PHI = LLAMA | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5] * 3, "long_factor": [2, 3.5] * 3},
}
QWEN_MOE = QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "layer_types": None,
    "max_window_layers": 0,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2}
GPT_OSS = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
    "attention_bias": True,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}
CONFIGS = [
    LLAMA,
    QWEN,
    PHI,
    QWEN_MOE,
    MIXTRAL,
    GPT_OSS,
    *(LLAMA | {"rope_scaling": scaling} for scaling in ROPE.values()),
]
GENERATION = {
    "temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1, "eos_token_id": [2],
}  # fmt: skip

scalars = (
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, -1, 2**31, 10**400, math.nan, math.inf, -math.inf, 0.5, 1e300, 5e-324])
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
)
values = st.recursive(
    scalars, lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=3), some, max_size=2)
)


def places(content, path=()):
    """The path of every value in nested objects and lists."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(content, path, value):
    content = copy.deepcopy(content)
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return content


def changes(*contents):
    """One of these JSON contents, in which one value is another."""
    choices = [(content, path) for content in contents for path in places(content)]
    return st.tuples(st.sampled_from(choices), values).map(lambda drawn: changed(*drawn[0], drawn[1]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@settings(max_examples=400)
@given(config=changes(*CONFIGS))
@example(LLAMA | {"rms_norm_eps": None})
@example(LLAMA | {"bos_token_id": []})
@example(LLAMA | {"eos_token_id": [None]})
@example(LLAMA | {"eos_token_id": 2**63})
@example(LLAMA | {"rope_scaling": {"rope_type": []}})
@example(LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 1e300}})
@example(QWEN | {"layer_types": 5})
@example(QWEN | {"layer_types": [[], [], []]})
@example(LLAMA | {"num_hidden_layers": 2**31 - 1})
@example(LLAMA | {"rope_theta": 10**400})
@example(LLAMA | {"architectures": [[]]})
@example(LLAMA | {"architectures": {"LlamaForCausalLM": 1}})
def test_any_config(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text("{}")
    try:
        loaded = load_model_config(folder)
    except ValueError as error:
        assert str(folder) in str(error)
    else:
        assert 0 < loaded.rms_norm_eps < math.inf and loaded.rope.theta > 1
        assert loaded.context_len < 2**31 and len(loaded.sliding_windows) == loaded.num_layers
        assert all(type(token) is int and 0 <= token < 2**31 for token in loaded.eos_token_ids)


@pytest.mark.parametrize("eps", [math.nan, 0, 0.0, -1e-6, math.inf, -math.inf, None, "1e-6", True, [1e-6]])
def test_the_eps_of_norms_is_positive_and_finite(tmp_path, eps):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"rms_norm_eps": eps}))
    given = re.escape(repr(eps))
    with pytest.raises(ValueError, match=rf"config\.json: rms_norm_eps must be a finite number above 0, got {given}"):
        load_model_config(tmp_path)


@settings(max_examples=200)
@given(generation=changes(GENERATION))
@example(GENERATION | {"top_k": math.inf})
@example(GENERATION | {"temperature": math.nan})
@example(GENERATION | {"eos_token_id": [None]})
def test_any_generation_config(folder, generation):
    (folder / "config.json").write_text(json.dumps(LLAMA))
    file = folder / "generation_config.json"
    file.write_text(json.dumps(generation))
    try:
        load_model_config(folder)
    except ValueError as error:
        assert str(file) in str(error)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"[" * 100_000, b"{", b"[]", b"\xff", b"null", b'{"a": "\xff"}'])
def test_files_that_are_no_json_object(tmp_path, name, content):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(name)):
        load_model_config(tmp_path)


TOKENIZER_CONFIG = {
    "added_tokens_decoder": {
        "0": {
            "content": "<|end|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
            "special": True,
        },
    },
    "bos_token": "<|end|>",
    "eos_token": {"content": "<|eot|>", "lstrip": False},
    "pad_token": None,
    "additional_special_tokens": ["<|a|>", {"content": "<|b|>"}],
    "extra_special_tokens": {"image": "<|c|>"},
    "chat_template": [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}],
}  # fmt: skip


@settings(max_examples=300)
@given(config=changes(TOKENIZER_CONFIG, TOKENIZER_CONFIG | {"chat_template": {"default": "x"}}))
@example(TOKENIZER_CONFIG | {"added_tokens_decoder": []})
@example(TOKENIZER_CONFIG | {"added_tokens_decoder": {"x": {"content": "y"}}})
@example(TOKENIZER_CONFIG | {"added_tokens_decoder": {"7": {}}})
@example(TOKENIZER_CONFIG | {"additional_special_tokens": 5})
@example(TOKENIZER_CONFIG | {"chat_template": 5})
@example(TOKENIZER_CONFIG | {"chat_template": [{}]})
@example(TOKENIZER_CONFIG | {"chat_template": [{"name": [], "template": "x"}]})
@example(TOKENIZER_CONFIG | {"chat_template": {"default": 5}})
@example(TOKENIZER_CONFIG | {"bos_token": 5})
@example(TOKENIZER_CONFIG | {"bos_token": {"content": 5}})
def test_any_tokenizer_config(folder, config):
    byte_level_tokenizer().backend.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(config))
    try:
        tokenizer = load_tokenizer(str(folder))
        tokenizer.compile_chat_template()
    except ValueError as error:
        assert str(file) in str(error) or "chat template" in str(error)


TOKENIZER = json.loads(byte_level_tokenizer().backend.to_str())
TOKENIZER["model"] |= {"merges": TOKENIZER["model"]["merges"][:3]}


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(content=changes({**TOKENIZER, "model": {**TOKENIZER["model"], "vocab": {"a": 0, "b": 1}, "merges": []}}))
@example({**TOKENIZER, "decoder": {"type": "Sequence", "decoders": []}})
def test_any_tokenizer_json(folder, content):
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text("{}")
    try:
        load_tokenizer(str(folder))
    except ValueError as error:
        assert str(file) in str(error)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_a_named_pipe_is_not_waited_for(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    byte_level_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}.*must be a regular file, got a named pipe"):
        load_model_config(tmp_path)
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "generation_config.json", "quantize_config.json", "quant_config.json", "tokenizer.json",
        "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "additional_chat_templates/a.jinja",
    ],
)  # fmt: skip
def test_a_link_to_a_missing_file_is_not_ignored(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    byte_level_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("../blobs/gone")
    with pytest.raises(
        (ValueError, OSError), match=rf"{re.escape(name)}' is a link to a missing file, '../blobs/gone'"
    ):
        load_model_config(tmp_path)
        load_tokenizer(str(tmp_path))

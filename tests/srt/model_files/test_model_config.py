from __future__ import annotations

import json
import math
import subprocess
import sys

import gguf
import numpy as np
import pytest
from tiny_configs import CONFIGS, LLAMA3
from tiny_latent_configs import LATENT_CONFIGS
from transformers import AutoConfig

from tercet.srt.errors import ModelNotSupported
from tercet.srt.model_files.generation_defaults import GenerationDefaults
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.rope_config import FrequencyDivisors, LinearScaling, Llama3Scaling, YarnScaling

IN_OTHER_FILES = (
    "gemma", "olmo3", "glm", "ernie", "exaone", "ministral3", "hunyuan", "dots", "lfm", "qwen3_5", "qwen3_next",
    *LATENT_CONFIGS,
)  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 131,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
}


@pytest.fixture
def load(tmp_path):
    """Loads a config.json of these settings, as a directory with weights would be."""

    def load(config, generation=None):
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return load_model_config(tmp_path)

    return load


def test_an_old_llama_config(load):
    config = load(LLAMA)
    assert config.architecture == "LlamaForCausalLM" and config.model_type == "llama"
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 4, 2, 16)
    assert config.rope.theta == 10000.0 and config.rope.scaling is None
    assert config.sliding_windows == (None, None, None) and config.load_format == "safetensors"
    assert config.dtype == "bfloat16" and config.bos_token_id == 1 and config.eos_token_ids == (2,)
    assert not (config.tie_word_embeddings or config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm)
    # Llama 1 says neither of these
    bare = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "torch_dtype")}
    assert load(bare).num_kv_heads == 4 and load(bare).dtype is None


@pytest.mark.parametrize("model_type", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"])
def test_without_kv_heads_transformers_knows_their_number(model_type, load):
    bare = {key: value for key, value in LLAMA.items() if key not in ("architectures", "num_key_value_heads")}
    bare |= {"model_type": model_type, "num_attention_heads": 64, "hidden_size": 1024}
    assert load(bare).num_kv_heads == AutoConfig.for_model(**bare).num_key_value_heads
    if model_type in ("llama", "qwen2", "qwen3"):  # transformers refuses null in others
        bare["num_key_value_heads"] = None
        assert load(bare).num_kv_heads == AutoConfig.for_model(**bare).num_key_value_heads == 64


@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.startswith(IN_OTHER_FILES)])
def test_what_transformers_writes(name, tmp_path):
    source = CONFIGS[name]()
    source.architectures = [f"{type(source).__name__.removesuffix('Config')}ForCausalLM"]
    source.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    assert config.head_dim == (getattr(source, "head_dim", None) or 16)
    assert config.tie_word_embeddings == source.tie_word_embeddings
    assert config.rope.theta == source.rope_parameters["rope_theta"]
    assert config.rms_norm_eps == source.rms_norm_eps
    norms = {"qwen3": "heads", "qwen3_moe": "heads", "olmo2": "rows", "olmoe": "rows"}
    assert config.qk_norm == norms.get(source.model_type)
    has_bias = getattr(source, "qkv_bias", getattr(source, "attention_bias", False))
    assert config.qkv_bias == (source.model_type == "qwen2" or has_bias)
    assert config.o_bias == getattr(source, f"attention_{'out_' if source.model_type == 'seed_oss' else ''}bias", False)
    some = {"qwen2_upper_window": (None, 9, 9), "qwen3_layer_types": (5, None, 5), "smollm3_window": (5, None, 5)}
    some |= {"gpt_oss": (6, None, 6), "qwen2_moe": (5, None, 5)}
    expected = {"mistral_window": (7,) * 3, "mixtral_window": (7,) * 3, "phi3": (6,) * 3} | some
    assert config.sliding_windows == expected.get(name, (None,) * config.num_layers)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_rope_scaling_in_the_old_and_the_new_place(load, old, type_key):
    def rope(scaling):
        if old:
            return load(LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling}).rope
        return load(LLAMA | {"rope_parameters": scaling | {"rope_theta": 5e5}}).rope

    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    assert rope({type_key: "linear", "factor": 4.0}).scaling == LinearScaling(4.0)
    assert rope({type_key: "llama3"} | llama3).scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)
    assert rope({type_key: "default"}).scaling is None
    assert rope({type_key: "default"}).theta == 5e5
    yarn = rope({type_key: "yarn", "factor": 4.0, "original_max_position_embeddings": 64})
    assert isinstance(yarn.scaling, YarnScaling) and yarn.context_len == 256
    assert yarn.scaling.attention_factor == pytest.approx(0.1 * np.log(4) + 1)


@pytest.mark.parametrize("empty", [{}, None])
def test_an_empty_rope_scaling_does_not_hide_the_parameters(load, empty):
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    rope = load(LLAMA | {"rope_scaling": empty, "rope_parameters": linear}).rope
    assert rope.theta == 5e5 and rope.scaling == LinearScaling(4.0)
    assert load(LLAMA | {"rope_scaling": empty, "rope_theta": 5e5}).rope.theta == 5e5


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (1.5, "at most 1"),
        (0.1, "even number of the 16"),
        (0.2, "even number of the 16"),
        (0, "above 0"),
        ("0.5", "number"),
    ],
)
def test_a_part_of_a_head_that_cannot_be_rotated_is_refused(load, factor, message):
    phi = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    for given in ({"partial_rotary_factor": factor}, {"rope_parameters": {"partial_rotary_factor": factor}}):
        with pytest.raises(ValueError, match=f"partial_rotary_factor must be .*{message}"):
            load(phi | given)
    assert load(phi | {"partial_rotary_factor": 0.5}).rope.rotary_dim == 8


def test_the_context_of_the_server_chooses_the_divisors_of_longrope(load):
    rope = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = load(LLAMA | {"rope_scaling": rope, "original_max_position_embeddings": 32})
    assert config.context_len == 128
    factor = math.sqrt(1 + math.log(4) / math.log(32))
    assert config.rope.for_context(32).scaling == FrequencyDivisors((1.0,) * 8, pytest.approx(factor))
    assert config.rope.for_context(33).scaling == FrequencyDivisors((2.0,) * 8, pytest.approx(factor))


def test_yarn_extends_the_context(load):
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert load(LLAMA | {"rope_scaling": yarn}).context_len == 512


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"model_type": "minicpm"}, "minicpm"),
        ({"hidden_act": "gelu"}, "gelu.*silu"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config.*bitsandbytes"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic.*llama3"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "short_factor must be a list of 8"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "surprise": 3}}, "surprise"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, "factor"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "high_freq_factor must be above low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.5}}, "high_freq_factor must be above low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"is_causal": False}, "is_causal"),
        ({"sliding_window": 64}, "sliding_window"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, "multiple"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_kv_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings"),
        ({"head_dim": "wide"}, "head_dim"),
        ({"num_key_value_heads": 1.5}, "num_key_value_heads"),
        ({"rope_theta": "big"}, "rope_theta"),
    ],
)
def test_refused_by_name(load, change, message):
    with pytest.raises(ValueError, match=message):
        load(LLAMA | change)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("Mistral", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("Mistral", {"attention_bias": True}, "attention_bias"),
        ("Mistral", {"sliding_window": 0}, "sliding_window"),
        ("Qwen2", {"mlp_bias": True}, "mlp_bias"),
        ("Qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("Qwen2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types"),
    ],
)
def test_refused_of_a_family(load, family, change, message):
    with pytest.raises(ValueError, match=message):
        load(LLAMA | {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower()} | change)


def test_windows_of_qwen(load):
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 8}
    assert load(qwen).sliding_windows == (None,) * 3
    assert load(qwen | {"use_sliding_window": True}).sliding_windows == (None,) * 3  # 28 layers come first
    assert load(qwen | {"use_sliding_window": True, "max_window_layers": 0}).sliding_windows == (8,) * 3
    assert load(qwen | {"use_sliding_window": True, "sliding_window": None}).sliding_windows == (None,) * 3


def test_harmless_settings_of_real_configs_pass(load):
    load(
        LLAMA
        | {
            "_name_or_path": "x", "attention_dropout": 0.0, "initializer_range": 0.02, "is_llama_config": True,
            "rope_interleaved": False, "pretraining_tp": 1, "use_cache": True, "transformers_version": "4.42.3",
            "transformers.js_config": {"kv_cache_dtype": {}}, "rope_scaling": None, "partial_rotary_factor": 1.0,
            "sliding_window": None, "unsloth_fixed": True,
        }
    )  # fmt: skip


def test_generation_config(load):
    config = load(
        LLAMA | {"eos_token_id": [2, 5]},
        {"eos_token_id": [7, 2], "temperature": 0.6, "top_p": 0.9, "top_k": 0, "do_sample": True},
    )
    assert config.eos_token_ids == (2, 5, 7)
    assert config.generation == GenerationDefaults(temperature=0.6, top_p=0.9, top_k=-1)
    assert load(LLAMA, {"top_k": 20}).generation == GenerationDefaults(top_k=20)
    with pytest.raises(ValueError, match="temperature"):
        load(LLAMA, {"temperature": "hot"})


def test_paths_and_load_formats(tmp_path, load):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_model_config(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"hf download Qwen/Qwen3-0\.6B --local-dir FOLDER"):
        load_model_config("Qwen/Qwen3-0.6B")
    with pytest.raises(FileNotFoundError, match=r"a config\.json$"):  # a mistyped file is no repository
        load_model_config("models/qwen3.gguf")
    with pytest.raises(FileNotFoundError, match=r"is missing; give a directory with config\.json, or a GGUF file"):
        load_model_config(tmp_path)
    load(LLAMA)
    with pytest.raises(ValueError, match="gguf"):
        load_model_config(tmp_path, "gguf")
    assert load_model_config(tmp_path, "dummy").load_format == "dummy"
    file = tmp_path / "config.json"
    assert load_model_config(file, "dummy").load_format == "dummy"
    with pytest.raises(ValueError, match="dummy"):
        load_model_config(file)
    file.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_model_config(tmp_path)
    file.write_text("{}")
    with pytest.raises(ValueError, match="neither architectures nor model_type"):
        load_model_config(tmp_path)
    file.write_text("[]")
    with pytest.raises(ValueError, match="object"):
        load_model_config(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="GGUF"):
        load_model_config(tmp_path / "model.bin")


def write_gguf(path, *, arch="llama", extra=(), tensors=(), skip=()):
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    for method, *values in extra:
        getattr(writer, method)(*values)
    for name, shape in {"token_embd.weight": (50, 32), "blk.0.attn_q.weight": (32, 32), **dict(tensors)}.items():
        if name not in skip:
            writer.add_tensor(name, np.full(shape, 2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file(tmp_path):
    config = load_model_config(write_gguf(tmp_path / "m.gguf"))
    assert config.architecture == "LlamaForCausalLM" and config.load_format == "gguf" and config.dtype == "float32"
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (4, 2, 8, 50)
    assert config.tie_word_embeddings and config.rope.theta == 1e5 and config.context_len == 64
    assert config.eos_token_ids == (2, 3)
    assert load_model_config(tmp_path / "m.gguf", "dummy").load_format == "dummy"
    with pytest.raises(ValueError, match="safetensors"):
        load_model_config(tmp_path / "m.gguf", "safetensors")


def test_gguf_variants(tmp_path):
    tensors = {
        "output.weight": (50, 32),
        "blk.0.attn_q.bias": (32,),
        "blk.0.attn_q_norm.weight": (16,),
        "rope_freqs.weight": (8,),
    }
    config = load_model_config(
        write_gguf(
            tmp_path / "q.gguf",
            arch="qwen3",
            tensors=tensors,
            extra=[("add_key_length", 16), ("add_value_length", 16), ("add_rope_dimension_count", 16)],
        )
    )
    assert config.architecture == "Qwen3ForCausalLM" and config.head_dim == 16
    assert not config.tie_word_embeddings and config.qkv_bias and config.qk_norm
    assert config.rope.scaling == FrequencyDivisors((2.0,) * 8)
    config = load_model_config(
        write_gguf(
            tmp_path / "y.gguf",
            arch="qwen2",
            extra=[
                ("add_rope_scaling_type", gguf.RopeScalingType.YARN),
                ("add_rope_scaling_factor", 4.0),
                ("add_rope_scaling_orig_ctx_len", 32),
                ("add_sampling_temp", 0.5) if hasattr(gguf.GGUFWriter, "add_sampling_temp") else ("add_name", "x"),
            ],
        )
    )
    assert isinstance(config.rope.scaling, YarnScaling) and config.context_len == 128


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ([("add_rope_scaling_factor", 4.0)], 4.0),
        ([("add_float32", "llama.rope.scale_linear", 2.0)], 2.0),
        ([("add_rope_scaling_factor", 4.0), ("add_rope_scaling_type", gguf.RopeScalingType.LINEAR)], 4.0),
        ([("add_rope_scaling_factor", 4.0), ("add_rope_scaling_type", gguf.RopeScalingType.NONE)], None),
        ([("add_float32", "llama.rope.scale_linear", 2.0), ("add_rope_scaling_type", gguf.RopeScalingType.NONE)], None),
    ],
)
def test_a_gguf_file_without_a_type_of_scaling_scales_linearly(tmp_path, keys, factor):
    """As in llama.cpp, where the type `none` turns all scaling off."""
    scaling = load_model_config(write_gguf(tmp_path / "m.gguf", extra=keys)).rope.scaling
    assert scaling == (None if factor is None else LinearScaling(factor))


@pytest.mark.parametrize("pooling", [gguf.PoolingType.NONE, gguf.PoolingType.LAST])
def test_an_embedding_model_may_name_the_pooling_of_its_last_token(tmp_path, pooling):
    """As Qwen3-Embedding does."""
    options = [("add_pooling_type", pooling)]
    assert load_model_config(write_gguf(tmp_path / "m.gguf", extra=options)).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "gpt2"}, "gpt2.*llama, qwen2, qwen3, phi3"),
        ({"extra": [("add_pooling_type", gguf.PoolingType.MEAN)]}, "pooling_type=1 is not supported"),
        ({"extra": [("add_sliding_window", 16)]}, "attention.sliding_window"),
        ({"extra": [("add_logit_scale", 2.0)]}, "logit_scale"),
        ({"extra": [("add_rope_dimension_count", 4)]}, "rope.dimension_count"),
        ({"extra": [("add_rope_scaling_type", gguf.RopeScalingType.LONGROPE)]}, "longrope"),
        ({"extra": [("add_rope_scaling_attn_factors", 1.2)]}, "attn_factor must be 1 without tensors rope_factors"),
        ({"tensors": {"rope_factors_long.weight": (4,)}}, "rope_factors_short and rope_factors_long is missing"),
        ({"tensors": {"rope_freqs.weight": (3,)}}, "rope_freqs"),
        ({"tensors": {"rope_freqs.weight": (4,)}, "extra": [("add_rope_scaling_factor", 2.0)]}, "linear.*rope_freqs"),
        ({"skip": ("token_embd.weight",)}, "token_embd"),
    ],
)
def test_gguf_refused_by_name(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        load_model_config(write_gguf(tmp_path / "m.gguf", **options))


def test_a_config_made_by_hand():
    sizes = {
        "hidden_size": 8, "intermediate_size": 8, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4,
        "vocab_size": 10, "context_len": 16,
    }  # fmt: skip
    assert ModelConfig(architecture="LlamaForCausalLM", **sizes).sliding_windows == (None, None)
    with pytest.raises(ModelNotSupported, match=r"Other.*Llama"):
        ModelConfig(architecture="Other", **sizes)
    with pytest.raises(ValueError, match="sliding windows"):
        ModelConfig(architecture="LlamaForCausalLM", **sizes, sliding_windows=(3,))


def test_needs_neither_torch_nor_transformers():
    module = "tercet.srt.model_files.load_config"
    code = f"import sys, {module}; assert not {{'torch', 'transformers', 'gguf'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

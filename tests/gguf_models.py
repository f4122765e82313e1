"""Writes GGUF files from small transformers models, and splits files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch

Kind = gguf.GGMLQuantizationType
HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.corrections": "exp_probs_b",
}
LFM2 = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b",
    "feed_forward.experts.gate_proj": "ffn_gate_exps",
    "feed_forward.experts.up_proj": "ffn_up_exps",
    "feed_forward.experts.down_proj": "ffn_down_exps",
}


FACTORS = {
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
    Kind.Q2_K: (40, 41),
    Kind.Q3_K: (54,),
    Kind.Q4_K: (0, 1),
    Kind.Q5_K: (0, 1),
    Kind.Q6_K: (104,),
}
"""Types that the gguf package cannot quantise, and the places of the float16 numbers in their blocks."""


PHI3 = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTPUT_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GLM4 = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
GPT_OSS = {
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.router": "ffn_gate_inp",
}
HUNYUAN = {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}
SEED_OSS = {"post_attention_layernorm": "post_attention_norm"}
OF_ARCH = {
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "olmo2": OUTPUT_NORMS,
    "exaone4": OUTPUT_NORMS,
    "glm4": GLM4,
    "glm4moe": SEED_OSS,
    "seed_oss": SEED_OSS,
    "gpt-oss": GPT_OSS,
    "hunyuan-dense": HUNYUAN,
    "lfm2": LFM2,
    "lfm2moe": LFM2,
}
PERMUTED = ("llama", "smollm3", "granite", "granitemoe", "arcee", "mistral3")
_ALL, _EVEN, _ODD = slice(None), slice(0, None, 2), slice(1, None, 2)
GPT_OSS_EXPERTS = {
    "gate_up_proj": {"gate_proj.weight": _EVEN, "up_proj.weight": _ODD},
    "gate_up_proj_bias": {"gate_proj.bias": _EVEN, "up_proj.bias": _ODD},
    "down_proj": {"down_proj.weight": _ALL},
    "down_proj_bias": {"down_proj.bias": _ALL},
}
"""The tensors of transformers, in which rows of gate and up take turns"""


def gguf_name(name, arch):
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, index, rest = stem.split(".", 3)
        stems = HF_TO_GGUF | PHI3 | OF_ARCH.get(arch, {})
        return f"blk.{index}.{stems[rest]}.{suffix}"
    return f"{HF_TO_GGUF[stem]}.{suffix}"


def with_stacked_experts(state, arch):
    """The tensors of a model, in which those of all experts have the names and parts of a GGUF file."""
    found = {}
    for name, array in state.items():
        stem, is_experts, last = name.partition(".experts.")
        if name.endswith(".sinks"):
            found[f"{name}.weight"] = array
        elif name.endswith("gate.e_score_correction_bias"):
            found[name.replace("gate.e_score_correction_bias", "corrections.bias")] = array
        elif name.endswith("moe_statics.e_score_correction_bias"):
            found[name.replace("gate.moe_statics.e_score_correction_bias", "corrections.bias")] = array[0]
        elif name.endswith("expert_bias"):
            found[f"{name}.bias"] = array
        elif name.endswith("conv.conv.weight"):
            found[name] = array[:, 0]
        elif name.endswith("shared_expert_gate.weight"):
            found[name] = array[0]
        elif ".shared_mlp." in name:
            shared = name.partition(".shared_mlp.")[0] + ".mlp.shared_expert."
            parts = ("gate_proj", "up_proj") if name.endswith("input_linear.weight") else ("down_proj",)
            found |= {
                f"{shared}{part}.weight": rows for part, rows in zip(parts, np.split(array, len(parts)), strict=True)
            }
        elif not is_experts:
            found[name] = array
        elif arch == "gpt-oss":
            rows = array.transpose(0, 2, 1) if array.ndim == 3 else array
            found |= {f"{stem}.experts.{part}": rows[:, which] for part, which in GPT_OSS_EXPERTS[last].items()}
        elif last == "down_proj":
            found[f"{stem}.experts.down_proj.weight"] = array
        else:
            gate, up = np.split(array, 2, 1)
            found |= {f"{stem}.experts.gate_proj.weight": gate, f"{stem}.experts.up_proj.weight": up}
    return found


def interleave_halves(array, num_heads):
    """Permutes rows of q or k as llama.cpp's converter does for Llama: rows i of both halves become neighbours."""
    heads = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return np.stack([heads[:, 0], heads[:, 1]], axis=2).reshape(array.shape)


def random_blocks(shape, kind):
    """Blocks of a type of FACTORS: uint8 [..., bytes]. All bytes are random, except that the factors are small."""
    rng = np.random.default_rng(shape)
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block_len, block_bytes), dtype=np.uint8)
    for at in FACTORS[kind]:
        blocks[..., 2 * at : 2 * at + 2] = (
            rng.normal(0, 1e-4, (*blocks.shape[:-1], 1)).astype(np.float16).view(np.uint8)
        )
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(path, model, arch, *, kind=Kind.F32, kinds=None, drop=(), beside=None, keys=None, tokenizer=None):
    """`kind`: of all matrices. `kinds`: of others, by name. `drop`: names that are left out. `beside`: more tensors.
    `keys`: more values in the metadata of the architecture; None: the key is left out. `tokenizer`: writes a tokenizer
    with the writer."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), arch)
    if tokenizer is not None:
        tokenizer(writer)
    keys = dict(keys or {})
    writer.add_block_count(config.num_hidden_layers + keys.get("nextn_predict_layers", 0))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if arch in ("lfm2", "lfm2moe"):
        dense = model.model.layers[0].feed_forward
        writer.add_feed_forward_length(dense.w1.out_features if arch == "lfm2" else config.intermediate_size)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        kv_heads = [config.num_key_value_heads * (kind != "conv") for kind in config.layer_types]
        keys = {"attention.head_count_kv": kv_heads, "shortconv.l_cache": config.conv_L_cache} | keys
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_head_count_kv(config.num_key_value_heads)
    if arch == "lfm2moe":
        keys = {
            "leading_dense_block_count": config.num_dense_layers, "expert_gating_func": 2,
            "expert_weights_scale": config.routed_scaling_factor,
        } | keys  # fmt: skip
    tensors = {
        name: tensor.numpy()
        for name, tensor in model.state_dict().items()
        if not (name == "lm_head.weight" and config.tie_word_embeddings) and name not in drop
    }
    if arch == "granitemoe":
        names = {name: name.replace(".block_sparse_moe.router", ".mlp.gate") for name in tensors}
        tensors = {names[name].replace(".block_sparse_moe.", ".mlp."): tensor for name, tensor in tensors.items()}
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    alpha = rope.get("alpha", 1.0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_freq_base(rope["rope_theta"] * alpha ** (head_dim / (head_dim - 2)))
    writer.add_key_length(keys.pop("attention.key_length", head_dim))
    writer.add_value_length(keys.pop("attention.value_length", head_dim))
    if hasattr(config, "num_local_experts") or hasattr(config, "num_experts"):
        writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch in ("glm4moe", "dots1"):
        keys = {
            "expert_group_count": config.n_group, "expert_group_used_count": config.topk_group,
            "leading_dense_block_count": config.first_k_dense_replace, "expert_gating_func": 2,
            "expert_weights_norm": config.norm_topk_prob, "expert_weights_scale": config.routed_scaling_factor,
            "expert_shared_count": config.n_shared_experts,
        } | keys  # fmt: skip
    if arch == "ernie4_5-moe":
        shared = config.moe_num_shared_experts
        keys = {
            "leading_dense_block_count": config.moe_layer_start_index,
            "interleave_moe_layer_step": config.moe_layer_interval, "expert_shared_count": shared,
            "expert_shared_feed_forward_length": shared * config.moe_intermediate_size,
        } | keys  # fmt: skip
    if arch in ("olmo2", "exaone4") and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        keys.setdefault(
            "attention.sliding_window_pattern", [kind == "sliding_attention" for kind in config.layer_types]
        )
    if arch in ("granite", "granitemoe"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    for key in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if getattr(config, key, None):
            keys.setdefault("expert_shared_feed_forward_length", getattr(config, key))
    for key, value in keys.items():
        add = {list: writer.add_array, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}.get(
            type(value)
        )
        if add is not None:
            add(f"{arch}.{key}", value)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch in ("phi3", "glm4", "glm4moe"):
        writer.add_rope_dimension_count(int(head_dim * config.rope_parameters["partial_rotary_factor"]))
    if arch == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
    if arch == "gemma2" and config.attn_logit_softcapping is not None:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if arch == "gemma2" and config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch in ("gemma2", "gemma3"):
        if config.sliding_window is not None:
            writer.add_sliding_window(config.sliding_window)
        tensors = {name: tensor + 1 if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}
    if arch == "gpt-oss":
        writer.add_sliding_window(config.sliding_window)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope.get("mscale_all_dim", 0.0))
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "dynamic":
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1.0)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        original = config.rope_parameters["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(model.model.rotary_emb.attention_scaling)
        for length in ("short", "long"):
            factors = np.array(config.rope_parameters[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    if rope["rope_type"] == "llama3":
        plain = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    for name, array in with_stacked_experts(tensors, arch).items():
        if arch in PERMUTED and "q_proj" in name:
            array = interleave_halves(array, config.num_attention_heads)
        if arch in PERMUTED and "k_proj" in name:
            array = interleave_halves(array, config.num_key_value_heads)
        is_plain = array.ndim == 1 or name.endswith(
            ("mlp.gate.weight", "mlp.router.weight", "feed_forward.gate.weight", "conv.conv.weight", ".bias")
        )
        used = Kind.F32 if is_plain else (kinds or {}).get(name, kind)
        raw = random_blocks(array.shape, used) if used in FACTORS else gguf.quantize(np.ascontiguousarray(array), used)
        writer.add_tensor(gguf_name(name, arch), raw, raw_dtype=used)
    for name, array in (beside or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split_gguf(source, *, max_tensors, empty_first=False):
    """Writes the parts of a GGUF file beside it, as gguf-split does. Returns their paths.

    `max_tensors`: of a part, less than the file has. `empty_first`: the first part has only the metadata.
    """
    reader = gguf.GGUFReader(str(source))
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(source, arch, split_max_tensors=max_tensors, small_first_shard=empty_first)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            item = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], item)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(Path(source).parent.glob(f"{Path(source).stem}-*-of-*.gguf"))
    assert len(paths) > 1
    return paths

"""Writes GGUF files of small models with latent attention, as old and new versions of llama.cpp do."""

from __future__ import annotations

from gguf_models import write_gguf


def write_latent_gguf(path, model, *, divided, without=(), **options):
    """`divided`: whether `kv_b_proj` is two tensors, as in newer files. `without`: names of such tensors that are left
    out. `options`: see `write_gguf`."""
    config = model.config
    rope = config.rope_parameters
    latent, query, value = config.kv_lora_rank, config.qk_head_dim, config.v_head_dim
    keys = {"attention.kv_lora_rank": latent, "rope.dimension_count": config.qk_rope_head_dim}
    if config.q_lora_rank is not None:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if getattr(config, "n_routed_experts", None):
        groups = (config.n_group or 1, config.topk_group or 1)
        dense = getattr(config, "first_k_dense_replace", 1)
        sigmoids = any(name.endswith("e_score_correction_bias") for name in model.state_dict())
        keys |= {
            "leading_dense_block_count": dense, "expert_gating_func": 2 if sigmoids else 1,
            "expert_weights_norm": bool(config.norm_topk_prob), "expert_weights_scale": config.routed_scaling_factor,
            "expert_shared_count": config.n_shared_experts,
        }  # fmt: skip
        if groups != (1, 1):
            keys |= {"expert_group_count": groups[0], "expert_group_used_count": groups[1]}
    names = [name for name in model.state_dict() if name.endswith(".kv_b_proj.weight")]
    tensors = {}
    if divided:
        keys |= {"attention.key_length": latent + config.qk_rope_head_dim, "attention.value_length": latent}
        keys |= {"attention.key_length_mla": query, "attention.value_length_mla": value}
        for name in names:
            layer, rows = name.split(".")[2], model.state_dict()[name].unflatten(0, (config.num_attention_heads, -1))
            of_keys, of_values = rows.split((config.qk_nope_head_dim, value), 1)
            tensors[f"blk.{layer}.attn_k_b.weight"] = of_keys.transpose(1, 2).contiguous().numpy()
            tensors[f"blk.{layer}.attn_v_b.weight"] = of_values.contiguous().numpy()
    else:
        keys |= {"attention.key_length": query, "attention.value_length": value}
    drop = (*options.pop("drop", ()), *(names if divided else ()))
    tensors = {name: tensor for name, tensor in tensors.items() if name not in without}
    beside = tensors | options.pop("beside", {})
    keys |= options.pop("keys", {})
    return write_gguf(path, model, "deepseek2", keys=keys, drop=drop, beside=beside, **options)

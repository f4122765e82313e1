"""The content of config.json of tiny models, drawn: what transformers 5 or an older version may write."""

from __future__ import annotations

from hypothesis import strategies as st
from random_choices import fixed, some
from random_delta_nets import OF_DELTA_NETS
from random_gemma4_configs import GEMMA4

ROPES = {
    "default": st.just({}),
    "linear": fixed(factor=[1.0, 2.5, 8]),
    "llama3": fixed(
        factor=[8.0, 32.0], low_freq_factor=[1.0], high_freq_factor=[4.0], original_max_position_embeddings=[16, 64]
    ),
    "yarn": st.builds(
        dict.__or__,
        fixed(factor=[1.5, 4.0]),
        some(
            original_max_position_embeddings=[16, 64],
            attention_factor=[0.8, 1.3],
            beta_fast=[4.0, 32],
            beta_slow=[1, 2.0],
            mscale=[0.7, 1.0],
            mscale_all_dim=[0.5, 1.0],
            truncate=[False, True],
        ),
    ),
}
PHI_PARTS = {"half": (0.5, 4), "three quarters": (0.75, 6), "all": (1.0, 8)}
"""partial_rotary_factor, and the number of frequencies of a head of 16"""

TWO_TYPES = ["sliding_attention", "full_attention"]


@st.composite
def phi_ropes(draw):
    """LongRoPE, or no scaling. transformers has no other one for Phi 3."""
    factor, count = draw(st.sampled_from(list(PHI_PARTS.values())))
    divisors = st.lists(st.sampled_from([1.0, 1.5, 2, 7.25]), min_size=count, max_size=count)
    longrope = st.fixed_dictionaries(
        {"short_factor": divisors, "long_factor": divisors},
        optional={"attention_factor": st.sampled_from([0.8, 1.3]), "factor": st.sampled_from([0.5, 4.0])},
    )
    kind, rope = draw(st.sampled_from([("default", {}), ("longrope", draw(longrope))]))
    return kind, rope | {"partial_rotary_factor": factor}


def ministral_ropes():
    return st.builds(
        dict.__or__,
        fixed(factor=[4.0], original_max_position_embeddings=[8, 16], llama_4_scaling_beta=[0.1, 0.7]),
        some(mscale=[1.0], mscale_all_dim=[1.0], beta_fast=[4.0, 32]),
    )


@st.composite
def gemma_ropes(draw, of_global_layers):
    """The keys for layers without a window (`of_global_layers`) and with one, as old and new files have them."""
    if draw(st.booleans()):
        keys = {"rope_scaling": of_global_layers} if of_global_layers["rope_type"] != "default" else {}
        return keys | draw(some(rope_theta=[500000.0], rope_local_base_freq=[500.0]))
    of_local_layers = {"rope_type": "default"} | draw(some(rope_theta=[500.0]))
    of_global_layers = of_global_layers | draw(some(rope_theta=[500000.0]))
    return {"rope_parameters": {"full_attention": of_global_layers, "sliding_attention": of_local_layers}}


@st.composite
def olmo_ropes(draw, of_global_layers):
    """The same of OLMo 3, whose old files have one base."""
    if draw(st.booleans()):
        scaling = {"rope_scaling": of_global_layers} if of_global_layers["rope_type"] != "default" else {}
        return scaling | draw(some(rope_theta=[500000]))
    of_local_layers = draw(st.sampled_from([{}, {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}]))
    return {"rope_parameters": of_local_layers | {"full_attention": of_global_layers | draw(some(rope_theta=[1000.0]))}}


@st.composite
def proportional_ropes(draw, of_global_layers):
    """The keys of LFM3 and Gemma 4. Half of its layers without a window have the type proportional."""
    if draw(st.booleans()):
        of_global_layers = {"rope_type": "proportional"} | draw(
            some(partial_rotary_factor=[0.3, 0.5, 1.0], factor=[4.0])
        )
    theta = {"rope_theta": draw(st.sampled_from([1000.0, 500000.0]))}
    of_local_layers = {"rope_type": "default", "rope_theta": 500.0}
    return {"rope_parameters": {"full_attention": of_global_layers | theta, "sliding_attention": of_local_layers}}


def latents():
    """The sizes of latent attention."""
    return fixed(
        q_lora_rank=[None, 24],
        kv_lora_rank=[32, 40],
        qk_nope_head_dim=[8, 20],
        qk_rope_head_dim=[8, 12],
        v_head_dim=[8, 20],
        num_key_value_heads=[4],
    )


EXPERTS_IN_GROUPS = st.sampled_from(
    [
        {"n_routed_experts": 11, "num_experts_per_tok": 8},
        {"n_routed_experts": 8, "num_experts_per_tok": 5, "n_group": 4, "topk_group": 3},
        {"n_routed_experts": 15, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 1},
    ]
)
IN_GROUPS = {"topk_method": "group_limited_greedy"}
WIDTH_OF_EXPERTS = fixed(moe_intermediate_size=[8, 48])
OF_FAMILY = {
    **OF_DELTA_NETS,
    "gpt_oss": st.builds(
        dict.__or__,
        some(
            attention_bias=[False, True], swiglu_limit=[0.5, 7.0], swiglu_alpha=[1.0, 1.702], num_experts_per_tok=[1, 3]
        ),
        fixed(sliding_window=[3, 7], num_local_experts=[5, 8]),
    ),
    "llama": some(attention_bias=[False, True], mlp_bias=[False, True]),
    "mistral": some(sliding_window=[None, 3, 7]),
    "mixtral": some(sliding_window=[None, 3, 7], num_local_experts=[2, 3, 9], num_experts_per_tok=[1]),
    "olmoe": some(
        attention_bias=[False, True],
        norm_topk_prob=[False, True],
        num_experts_per_tok=[1, 4],
        num_experts=[8, 11],
    ),
    "olmo2": some(attention_bias=[False, True]),
    "olmo3": st.builds(
        dict.__or__,
        some(attention_bias=[False, True], sliding_window=[1, 5, 9]),
        st.sampled_from([{"num_hidden_layers": 4}, {"layer_types": TWO_TYPES}, {"layer_types": TWO_TYPES[::-1]}]).map(
            lambda layers: {"num_hidden_layers": 2} | layers
        ),
    ),
    "granite": some(
        attention_bias=[False, True],
        mlp_bias=[False, True],
        embedding_multiplier=[0.5, 12],
        residual_multiplier=[0.22, 2.0],
        attention_multiplier=[0.0625, 0.3],
        logits_scaling=[6.0, 16],
    ),
    "glm": some(attention_bias=[False, True], partial_rotary_factor=[0.5, 1]),
    "glm4": some(attention_bias=[False, True], partial_rotary_factor=[0.5, 1]),
    "glm4_moe": st.builds(
        dict.__or__,
        some(
            attention_bias=[False, True],
            partial_rotary_factor=[0.5, 1],
            use_qk_norm=[False, True],
            norm_topk_prob=[False, True],
            routed_scaling_factor=[0.5, 2.5],
            first_k_dense_replace=[0, 1, 2],
            n_shared_experts=[1, 3],
        ),
        st.builds(dict.__or__, fixed(moe_intermediate_size=[16, 48]), EXPERTS_IN_GROUPS),
    ),
    "dots1": st.builds(
        dict.__or__,
        some(
            attention_bias=[False, True],
            norm_topk_prob=[False, True],
            routed_scaling_factor=[0.5, 2.5],
            first_k_dense_replace=[0, 1, 2],
            sliding_window=[None, 3, 7],
            max_window_layers=[0, 1],
        ),
        st.builds(dict.__or__, fixed(moe_intermediate_size=[16, 48], n_shared_experts=[1, 3]), EXPERTS_IN_GROUPS),
    ),
    "granitemoehybrid": st.builds(
        dict.__or__,
        fixed(num_hidden_layers=[2], layer_types=[["attention"] * 2], num_local_experts=[0, 3]),
        some(shared_intermediate_size=[48], position_embedding_type=["rope", None], residual_multiplier=[0.3]),
    ),
    "arcee": some(attention_bias=[False, True], mlp_bias=[False, True]),
    "deepseek_v2": st.builds(
        dict.__or__,
        some(first_k_dense_replace=[0, 1, 2], routed_scaling_factor=[1.0, 2.5], n_shared_experts=[1, 3]),
        st.builds(
            dict.__or__,
            st.builds(dict.__or__, latents(), WIDTH_OF_EXPERTS),
            st.sampled_from(
                [
                    {"n_routed_experts": 11, "num_experts_per_tok": 8},
                    IN_GROUPS | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
                    IN_GROUPS | {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 2, "topk_group": 1},
                ]
            ),
        ),
    ),
    "deepseek_v3": st.builds(
        dict.__or__,
        some(
            first_k_dense_replace=[0, 1, 2],
            routed_scaling_factor=[1.0, 2.5],
            n_shared_experts=[1, 3],
            norm_topk_prob=[False, True],
        ),
        st.builds(dict.__or__, latents(), st.builds(dict.__or__, EXPERTS_IN_GROUPS, WIDTH_OF_EXPERTS)),
    ),
    "glm4_moe_lite": st.builds(
        dict.__or__,
        some(mlp_layer_types=[["sparse", "dense"], ["dense", "sparse"]], num_hidden_layers=[2]),
        st.builds(dict.__or__, latents(), st.builds(dict.__or__, EXPERTS_IN_GROUPS, WIDTH_OF_EXPERTS)),
    ),
    "youtu": latents(),
    "minicpm3": st.builds(
        dict.__or__, latents(), some(scale_emb=[1, 12], scale_depth=[None, 1.4], dim_model_base=[None, 16])
    ),
    "lfm2": st.builds(
        dict.__or__,
        fixed(num_hidden_layers=[2, 3], full_attn_idxs=[[0], [1], [0, 1]], conv_L_cache=[1, 2, 5]),
        some(conv_bias=[False, True], block_multiple_of=[8, 32], block_ff_dim=[50], block_auto_adjust_ff_dim=[False]),
    ),
    "lfm3": st.builds(
        dict.__or__,
        fixed(
            num_hidden_layers=[2],
            layer_types=[["conv", "sliding_attention"], ["full_attention", "conv"], ["conv", "full_attention"]],
            bos_token_id=[1],
        ),
        some(conv_L_cache=[1, 4], use_attention_gate=[False], use_sandwich_norm=[False], sliding_window=[3, 7]),
    ),
    "lfm2_moe": st.builds(
        dict.__or__,
        fixed(num_hidden_layers=[2], layer_types=[["conv", "full_attention"]], num_experts=[8, 11]),
        some(num_dense_layers=[0, 1, 2], norm_topk_prob=[False], routed_scaling_factor=[2.5], norm_eps=[1e-2]),
    ),
    "ministral3": some(sliding_window=[None, 3, 7], head_dim=[8, 24]),
    "hunyuan_v1_dense": some(attention_bias=[False, True]),
    "ernie4_5": some(use_bias=[False, True], head_dim=[8, 24]),
    "ernie4_5_moe": st.builds(
        dict.__or__,
        some(
            head_dim=[8, 24],
            moe_num_shared_experts=[0, 1, 3],
            moe_layer_start_index=[0, 2],
            moe_layer_end_index=[1, -1],
            moe_layer_interval=[1, 2],
            moe_norm_min=[1e-12, 0.5],
        ),
        fixed(moe_intermediate_size=[16, 48], moe_num_experts=[8, 11], moe_k=[3, 5]),
    ),
    "seed_oss": some(attention_bias=[False, True], attention_out_bias=[False, True], mlp_bias=[False, True]),
    "exaone4": st.builds(
        dict.__or__,
        some(sliding_window=[1, 5, 9]),
        st.sampled_from(
            [
                {},
                {"sliding_window_pattern": 1},
                {"sliding_window_pattern": 2},
                {"num_hidden_layers": 2, "layer_types": TWO_TYPES},
                {"num_hidden_layers": 2, "sliding_window": None, "layer_types": TWO_TYPES[1:] * 2},
            ]
        ),
    ),
    "granitemoe": some(
        attention_bias=[False, True],
        embedding_multiplier=[0.5, 12],
        residual_multiplier=[0.22, 2.0],
        attention_multiplier=[0.0625, 0.3],
        logits_scaling=[6.0, 16],
        num_local_experts=[2, 3, 9],
        num_experts_per_tok=[1],
    ),
    "granitemoeshared": some(
        attention_bias=[False, True],
        residual_multiplier=[0.22, 2.0],
        logits_scaling=[6.0, 16],
        num_local_experts=[2, 3, 9],
        num_experts_per_tok=[1],
        shared_intermediate_size=[0, 16, 80],
    ),
    "phi3": some(sliding_window=[None, 3, 7]),
    "smollm3": some(
        no_rope_layers=[[0, 1], [1, 0, 1], [1, 1]],
        no_rope_layer_interval=[1, 2, 4],
        use_sliding_window=[False, True],
        sliding_window=[5, 9],
        attention_bias=[False, True],
        mlp_bias=[False, True],
    ),
    "gemma2": some(
        sliding_window=[1, 5, 9],
        query_pre_attn_scalar=[8, 30],
        attn_logit_softcapping=[None, 1.0, 2.5],
        final_logit_softcapping=[None, 2.0, 4.0],
        attention_bias=[False, True],
        hidden_activation=["silu", "gelu_pytorch_tanh"],
    ),
    "gemma3_text": some(
        sliding_window=[1, 5, 9],
        sliding_window_pattern=[1, 2, 6],
        query_pre_attn_scalar=[8, 30],
        attention_bias=[False, True],
        hidden_activation=["silu", "gelu_pytorch_tanh"],
    ),
    "gemma4_text": GEMMA4,
    "qwen2": some(use_sliding_window=[False, True], sliding_window=[5, 9], max_window_layers=[0, 1, 28]),
    "qwen3": some(
        use_sliding_window=[False, True], sliding_window=[5, 9], max_window_layers=[0, 1], attention_bias=[False, True]
    ),
    "qwen2_moe": st.builds(
        dict.__or__,
        some(
            qkv_bias=[False, True],
            decoder_sparse_step=[1, 2, 3],
            mlp_only_layers=[None, [], [0], [1], [0, 1]],
            norm_topk_prob=[False, True],
            num_experts_per_tok=[1, 4],
        ),
        fixed(moe_intermediate_size=[8, 48], num_experts=[8, 11], shared_expert_intermediate_size=[16, 80]),
    ),
    "qwen3_moe": st.builds(
        dict.__or__,
        some(
            use_sliding_window=[False, True],
            sliding_window=[5, 9],
            attention_bias=[False, True],
            decoder_sparse_step=[1, 2, 3],
            mlp_only_layers=[None, [], [0], [1], [0, 1]],
            norm_topk_prob=[False, True],
            num_experts_per_tok=[1, 4],
        ),
        fixed(moe_intermediate_size=[8, 48], num_experts=[8, 11]),
    ),
}


@st.composite
def configs(draw):
    """The content of a config.json, as transformers 5 or an older version writes it."""
    family = draw(st.sampled_from(sorted(OF_FAMILY)))
    kind = draw(st.sampled_from(sorted(ROPES)))
    rope, theta = draw(ROPES[kind]), draw(st.sampled_from([1000.0, 500000.0]))
    shape = draw(some(rms_norm_eps=[1e-5, 1e-2], head_dim=[8, 12, 32], tie_word_embeddings=[False, True]))
    if family == "phi3":
        kind, rope = draw(phi_ropes())
        shape.pop("head_dim", None)
        shape |= draw(some(original_max_position_embeddings=[16, 64]))
    if family == "olmoe":  # the norms of transformers have hidden_size / num_attention_heads numbers for each head
        shape.pop("head_dim", None)
    if family in ("mixtral", "hunyuan_v1_dense"):  # without it, transformers cannot compute with yarn, or at all
        shape.setdefault("head_dim", 16)
    if "q_lora_rank" in (of_family := draw(OF_FAMILY[family])):
        shape.pop("head_dim", None)
    if family == "ministral3":
        kind, rope = "yarn", draw(ministral_ropes())
    if family == "hunyuan_v1_dense" and draw(st.booleans()):
        kind, rope = "dynamic", draw(fixed(alpha=[1.0, 50.0], factor=[1.0]))
    if family == "gemma4_text":  # scores of wide heads, which have no factor, are too large for sums in float32
        shape["head_dim"] = min(shape.get("head_dim", 16), 16)
    if family == "gemma4_text" and kind == "yarn":  # transformers has no default for one key, and ignores the other
        rope = {"original_max_position_embeddings": 16} | rope
        rope.pop("truncate", None)
    if family == "olmo3":
        rope = draw(olmo_ropes(rope | {"rope_type": kind}))
    elif family in ("lfm3", "gemma4_text"):
        rope = draw(proportional_ropes(rope | {"rope_type": kind}))
    elif family == "gemma3_text":
        rope = draw(gemma_ropes(rope | {"rope_type": kind}))
    elif draw(st.booleans()):
        rope = {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **rope}}
    else:
        rope = {"rope_scaling": {draw(st.sampled_from(["type", "rope_type"])): kind, **rope}}
        rope |= draw(some(rope_theta=[theta]))
    return {
        "model_type": family,
        "vocab_size": 67,
        "hidden_size": 64,
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4])),
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **draw(fixed(num_hidden_layers=[1, 2], intermediate_size=[24, 96])),
        **shape,
        **of_family,
        **rope,
    }

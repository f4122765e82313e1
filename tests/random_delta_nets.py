"""The settings of tiny models with Gated DeltaNets, drawn: OF_FAMILY of random_configs.py."""

from __future__ import annotations

from hypothesis import strategies as st
from random_choices import fixed, some

OF_DELTA_NETS = {
    "qwen3_5_moe_text": st.builds(
        dict.__or__,
        fixed(
            num_hidden_layers=[2],
            head_dim=[8, 16],
            layer_types=[["linear_attention", "full_attention"]],
            linear_num_key_heads=[2],
            linear_num_value_heads=[2, 4],
            linear_key_head_dim=[8],
            linear_value_head_dim=[8],
            num_experts=[8, 11],
            moe_intermediate_size=[8, 48],
            shared_expert_intermediate_size=[16, 80],
        ),
        some(num_experts_per_tok=[1, 4], attention_bias=[True]),
    ),
    "qwen3_next": st.builds(
        dict.__or__,
        fixed(
            num_hidden_layers=[2],
            head_dim=[8, 16],
            layer_types=[["linear_attention", "full_attention"]],
            linear_num_key_heads=[1, 2],
            linear_num_value_heads=[2, 4],
            linear_key_head_dim=[8, 12],
            linear_value_head_dim=[8, 20],
            num_experts=[8, 11],
            moe_intermediate_size=[8, 48],
            shared_expert_intermediate_size=[16, 80],
        ),
        some(
            num_experts_per_tok=[1, 4],
            attention_bias=[True],
            norm_topk_prob=[False, True],
            decoder_sparse_step=[1, 2],
            mlp_only_layers=[None, [], [0]],
        ),
    ),
    "qwen3_5_text": st.builds(
        dict.__or__,
        fixed(
            num_hidden_layers=[2],
            layer_types=[["linear_attention", "full_attention"], ["full_attention", "linear_attention"]],
            head_dim=[8, 16, 32],
            linear_num_key_heads=[1, 2],
            linear_num_value_heads=[2, 4],
            linear_key_head_dim=[8, 12],
            linear_value_head_dim=[8, 12],
        ),
        some(attention_bias=[False, True], linear_conv_kernel_dim=[2, 3], partial_rotary_factor=[0.5, 1.0]),
    ),
}

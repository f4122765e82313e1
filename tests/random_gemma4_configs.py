"""What the config.json of a tiny model of Gemma 4 has beside the keys of all families, drawn."""

from __future__ import annotations

from hypothesis import strategies as st

_TWO = ["sliding_attention", "full_attention"]
# transformers cannot compute with layers that share K and V but have no inputs of their own.
_LAYERS = [
    {"num_hidden_layers": 1, "hidden_size_per_layer_input": 0},
    {"num_hidden_layers": 2, "layer_types": _TWO, "hidden_size_per_layer_input": 0},
    {"num_hidden_layers": 2, "layer_types": _TWO[::-1], "hidden_size_per_layer_input": 12},
    {"num_hidden_layers": 7, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1},
    {"num_hidden_layers": 4, "layer_types": _TWO * 2, "num_kv_shared_layers": 2},
]
_KEYS = {
    "sliding_window": [1, 5, 9],
    "attention_bias": [False, True],
    "attention_k_eq_v": [False, True],
    "num_global_key_value_heads": [None, 1, 2],
    "final_logit_softcapping": [None, 2.0, 4.0],
    "hidden_activation": ["silu", "gelu_pytorch_tanh"],
    "use_double_wide_mlp": [False, True],
}
_SIZES = st.fixed_dictionaries(
    {"vocab_size_per_layer_input": st.sampled_from([67, 80]), "global_head_dim": st.sampled_from([8, 16, 24])}
)
GEMMA4 = st.builds(
    lambda *parts: {key: value for part in parts for key, value in part.items()},
    st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in _KEYS.items()}),
    st.sampled_from(_LAYERS),
    _SIZES,
)

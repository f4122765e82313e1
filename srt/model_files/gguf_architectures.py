"""The names of architectures in config.json, by those that GGUF files have."""

# GGUF files call Mistral and Mixtral "llama", too. They do not have the window of the first Mistral 7B; llama.cpp
# ignores it, too.
# GGUF files call OLMo 3 "olmo2", too.
# GGUF files of SmolLM3 do not name the layers without rotation. llama.cpp takes every fourth, which is the default.
from __future__ import annotations

GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "arcee": "ArceeForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
}
GGUF_ARCHITECTURES_WITH_EXPERTS = {
    "deepseek2": "DeepseekV2ForCausalLM",
    "llama": "MixtralForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
}
"""The architectures of files that have experts."""
GGUF_ARCHITECTURES_WITH_SHARED_EXPERTS = {"granitemoe": "GraniteMoeSharedForCausalLM"}
"""The architectures of files that have a shared expert, where they differ from those of others."""
GGUF_ARCHITECTURES_WITH_WINDOWS = {"olmo2": "Olmo3ForCausalLM"}
"""The architectures of files that have a window, where they differ from those of others."""

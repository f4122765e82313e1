"""Model classes by architecture name."""

from __future__ import annotations

from ...srt.errors import ModelNotSupported
from ...srt.model_files.model_config import ModelConfig
from ..attention.base import AttentionBackend
from ..layers.kinds import layers_for
from .decoder import Decoder, Parameters

MODELS: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
}


def create_model(
    config: ModelConfig, params: Parameters, attention: AttentionBackend, context_len: int, *, quantized: bool = False
) -> Decoder:
    """context_len: positions are below it; quantized: matrices in `params` are QuantizedWeights.

    Raises ModelNotSupported for an architecture without a class.
    """
    if config.architecture not in MODELS:
        raise ModelNotSupported(
            f"architecture {config.architecture!r} is not supported; supported: {', '.join(MODELS)}"
        )
    widths = config.hidden_size, config.intermediate_size  # heads are even, and so are all of them side by side
    layers = layers_for(attention.name, attention.kv_pool.dtype, quantized=quantized, widths=widths)
    return MODELS[config.architecture](config, params, attention, layers, context_len)

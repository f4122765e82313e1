"""What a checkpoint says about its model, from config.json or from a GGUF file's metadata.

A setting that the decoder would silently ignore is refused here by name, so that a model which starts is
computed as it was trained. Knows nothing of torch: the HTTP process reads it too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from .errors import ModelNotSupported
from .gguf_file import GGUFFile
from .rope_config import RopeConfig, rope_from_gguf, rope_from_hf

LoadFormat: TypeAlias = Literal["auto", "safetensors", "gguf", "dummy"]
SlidingWindows: TypeAlias = tuple[int | None, ...]


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling parameters that the model's authors recommend; None where they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """-1: all tokens"""
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only model. `sliding_windows` has an entry per layer, None where a layer sees everything."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_len: int
    sliding_windows: SlidingWindows = ()
    """empty: no layer has a window (filled in below)"""
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """from config and generation config together; a tokenizer may add its own"""
    dtype: str | None = None
    """of the checkpoint: "float32", "float16", "bfloat16"; None: it does not say"""
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    model_path: str = ""
    load_format: Literal["safetensors", "gguf", "dummy"] = "dummy"

    def __post_init__(self) -> None:
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        if self.architecture not in FAMILIES:
            raise ModelNotSupported(
                f"architecture {self.architecture!r} is not supported; supported: {', '.join(FAMILIES)}"
            )
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")
        if self.hidden_act not in ("silu", "swish"):
            raise ModelNotSupported(f"hidden_act {self.hidden_act!r} is not supported; supported: silu")
        if any(window is not None and window < 1 for window in self.sliding_windows):
            raise ValueError(f"a sliding window must be at least 1, got {self.sliding_windows}")
        if len(self.sliding_windows) != self.num_layers:
            raise ValueError(f"{len(self.sliding_windows)} sliding windows given for {self.num_layers} layers")

    @property
    def model_type(self) -> str:
        return FAMILIES[self.architecture].model_type


def _no_window(config: Mapping[str, Any], num_layers: int) -> SlidingWindows:
    if config.get("sliding_window") is not None:
        raise ModelNotSupported("sliding_window in a Llama config is not supported: it is used by some engines only")
    return (None,) * num_layers


def _window_everywhere(config: Mapping[str, Any], num_layers: int) -> SlidingWindows:
    if config.get("layer_types") is not None:
        raise ModelNotSupported("layer_types in a Mistral config is not supported: its window is one for all layers")
    return (_window(config),) * num_layers


def _window(config: Mapping[str, Any]) -> int | None:
    # 4096 is the default of the families that have windows; null means none.
    return None if config.get("sliding_window", 4096) is None else _integer(config, "sliding_window", 4096)


def _window_of_upper_layers(config: Mapping[str, Any], num_layers: int) -> SlidingWindows:
    window = _window(config) if config.get("use_sliding_window", False) else None
    types = config.get("layer_types")
    if types is None:
        first = _integer(config, "max_window_layers", 28, minimum=0)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    known = {"sliding_attention": window, "full_attention": None}
    if len(types) != num_layers or not set(types) <= set(known):
        raise ModelNotSupported(f"layer_types must name {' or '.join(known)} for each of {num_layers} layers: {types}")
    return tuple(known[kind] for kind in types)


@dataclass(frozen=True)
class Family:
    """How an architecture differs from plain Llama. `*_bias`: always there; None: as config.json's key says."""

    model_type: str
    sliding_windows: Callable[[Mapping[str, Any], int], SlidingWindows]
    qkv_bias: bool | None = False
    o_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    default_head_dim: int | None = None
    """None: hidden_size / num_heads"""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", _no_window, qkv_bias=None, o_bias=None, mlp_bias=None),
    "MistralForCausalLM": Family("mistral", _window_everywhere),
    "Qwen2ForCausalLM": Family("qwen2", _window_of_upper_layers, qkv_bias=True),
    "Qwen3ForCausalLM": Family(
        "qwen3", _window_of_upper_layers, qkv_bias=None, o_bias=None, qk_norm=True, default_head_dim=128
    ),
}
# GGUF calls Mistral "llama" too: the window of the first Mistral 7B is not in such a file, as in llama.cpp.
_GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def load_model_config(model_path: str | os.PathLike[str], load_format: LoadFormat = "auto") -> ModelConfig:
    """From a Hugging Face directory, a .gguf file, or a bare config.json (dummy weights only).

    Raises ValueError (ModelNotSupported where the model is the reason) or FileNotFoundError.
    """
    path = os.fspath(model_path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"no model at {path!r}: give a directory with config.json, a .gguf or a .json file")
    is_dir = os.path.isdir(path)
    if not is_dir and not path.endswith((".gguf", ".json")):
        raise ValueError(f"{path!r} must be a directory with config.json, a .gguf file, or a config.json")
    if not is_dir and path.endswith(".gguf"):
        if load_format == "safetensors":
            raise ValueError(f"load format safetensors does not fit the GGUF file {path!r}")
        return _from_gguf(GGUFFile(path), "dummy" if load_format == "dummy" else "gguf")
    if load_format == "gguf":
        raise ValueError(f"load format gguf needs a .gguf file, got {path!r}")
    if not is_dir and load_format != "dummy":
        raise ValueError(f"{path!r} has no weights beside it: use --load-format dummy, or give the directory")
    folder = path if is_dir else os.path.dirname(path)
    config = _read_json(os.path.join(path, "config.json") if is_dir else path)
    generation_path = os.path.join(folder, "generation_config.json")
    generation = _read_json(generation_path) if os.path.exists(generation_path) else {}
    return _from_hf(config, generation, path, "dummy" if load_format == "dummy" else "safetensors")


def _read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path!r} is missing") from None
    except ValueError as error:
        raise ValueError(f"{path!r} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path!r} must hold a JSON object")
    return content


def _from_hf(
    config: dict[str, Any], generation: dict[str, Any], path: str, load_format: Literal["safetensors", "dummy"]
) -> ModelConfig:
    architecture = _hf_architecture(config)
    family = FAMILIES[architecture]
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            method = config[key].get("quant_method", "unnamed") if isinstance(config[key], dict) else config[key]
            raise ModelNotSupported(f"{key} (method {method!r}) is not supported: only unquantized checkpoints are")
    for key in ("rope_interleaved", "use_mrope"):
        if config.get(key):
            raise ModelNotSupported(f"config.json: {key}={config[key]!r} is not supported")

    num_layers, num_heads = _integer(config, "num_hidden_layers"), _integer(config, "num_attention_heads")
    hidden_size = _integer(config, "hidden_size")
    if family.default_head_dim is None and hidden_size % num_heads and config.get("head_dim") is None:
        raise ValueError(f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads})")
    head_dim = _integer(config, "head_dim", family.default_head_dim or hidden_size // num_heads)
    attention_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    for key, given, known in (
        ("attention_bias", attention_bias, family.qkv_bias),
        ("mlp_bias", mlp_bias, family.mlp_bias),
    ):
        if given and known is False:
            raise ModelNotSupported(f"config.json: {key} is not supported for {architecture}")
    context_len = _integer(config, "max_position_embeddings")
    rope = rope_from_hf(config, context_len)
    dtype = config.get("dtype") or config.get("torch_dtype")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_integer(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=_integer(config, "vocab_size"),
        context_len=max(context_len, rope.context_len),
        sliding_windows=family.sliding_windows(config, num_layers),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        hidden_act=config.get("hidden_act", "silu"),
        rope=rope,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        bos_token_id=_first(config.get("bos_token_id")),
        eos_token_ids=_ids(config.get("eos_token_id"), generation.get("eos_token_id")),
        dtype=dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
        generation=_generation_defaults(generation, _HF_GENERATION),
        model_path=path,
        load_format=load_format,
    )


def _hf_architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    model_type = config.get("model_type")
    if not names:
        names = [name for name, family in FAMILIES.items() if family.model_type == model_type]
    name = names[0] if names else str(model_type)
    if name not in FAMILIES:
        raise ModelNotSupported(f"architecture {name!r} is not supported; supported: {', '.join(FAMILIES)}")
    if model_type is not None and model_type != FAMILIES[name].model_type:
        raise ModelNotSupported(f"model_type {model_type!r} with architecture {name!r} is not supported")
    return name


# The only `{architecture}.*` keys that a GGUF file may have: nearly all of them change the computation.
_GGUF_KEYS = (
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "expert_count",
    "expert_used_count",
)


def _from_gguf(file: GGUFFile, load_format: Literal["gguf", "dummy"]) -> ModelConfig:
    metadata: Mapping[str, Any] = file.metadata
    arch = str(metadata.get("general.architecture"))
    if arch not in _GGUF_ARCHITECTURES:
        raise ModelNotSupported(
            f"GGUF architecture {arch!r} is not supported; supported: {', '.join(_GGUF_ARCHITECTURES)}"
        )
    if metadata.get("split.count", 0) > 1:
        raise ModelNotSupported(f"{file.path} is one of {metadata['split.count']} split files: merge them first")
    prefix = arch + "."
    for key in metadata:
        if key.startswith(prefix) and key.removeprefix(prefix) not in _GGUF_KEYS:
            raise ModelNotSupported(f"{file.path}: metadata {key}={metadata[key]!r} is not supported")
    values = {key: metadata[prefix + key] for key in _GGUF_KEYS if prefix + key in metadata}
    if values.get("expert_count", 0) > 0:
        raise ModelNotSupported(f"{file.path}: a mixture of {values['expert_count']} experts is not supported")
    tensors = {tensor.name: tensor for tensor in file.tensors}
    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        if name not in tensors:
            raise ValueError(f"{file.path} has no tensor {name!r}: it holds no whole model")

    num_heads, hidden_size = _integer(values, "attention.head_count"), _integer(values, "embedding_length")
    head_dim = values.get("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.get(key, head_dim) != head_dim:
            raise ModelNotSupported(f"{prefix}{key} must equal the head dimension {head_dim}, got {values[key]}")
    divisors: tuple[float, ...] | None = None
    if "rope_freqs.weight" in tensors:
        tensor = tensors["rope_freqs.weight"]
        if tensor.shape != (head_dim // 2,) or tensor.type != 0:
            raise ModelNotSupported(f"rope_freqs.weight must be F32 [{head_dim // 2}], got {tensor}")
        divisors = tuple(file.tensor_bytes(tensor, 2 * head_dim).view(np.float32).tolist())
    context_len = _integer(values, "context_length")
    rope = rope_from_gguf(metadata, arch, divisors, context_len)
    special = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return ModelConfig(
        architecture=_GGUF_ARCHITECTURES[arch],
        hidden_size=hidden_size,
        intermediate_size=_integer(values, "feed_forward_length"),
        num_layers=_integer(values, "block_count"),
        num_heads=num_heads,
        num_kv_heads=int(values.get("attention.head_count_kv", num_heads)),
        head_dim=int(head_dim),
        vocab_size=tensors["token_embd.weight"].shape[0],
        context_len=max(context_len, rope.context_len),
        rms_norm_eps=float(values.get("attention.layer_norm_rms_epsilon", 1e-6)),
        rope=rope,
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_ids(*special),
        dtype=_gguf_dtype(tensors["blk.0.attn_q.weight"].type),
        generation=_generation_defaults(metadata, _GGUF_GENERATION),
        model_path=file.path,
        load_format=load_format,
    )


def _gguf_dtype(tensor_type: int) -> str:
    # Quantised weights were made from bfloat16 as a rule, and float16 may overflow in such a model.
    return {0: "float32", 1: "float16"}.get(tensor_type, "bfloat16")


# field of GenerationDefaults -> key
_HF_GENERATION = {key: key for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_GGUF_GENERATION = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def _generation_defaults(source: Mapping[str, Any], keys: dict[str, str]) -> GenerationDefaults:
    values = {name: source.get(key) for name, key in keys.items()}
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"generation defaults: {name} must be a number, got {value!r}")
    if values["top_k"] is not None:
        # both formats write "all tokens" as 0
        values["top_k"] = int(values["top_k"]) if values["top_k"] > 0 else -1
    return GenerationDefaults(**values)


def _integer(values: Mapping[str, Any], key: str, default: int | None = None, minimum: int = 1) -> int:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"the model's config must give {key} as an integer of at least {minimum}, got {value!r}")
    return value


def _first(value: int | list[int] | None) -> int | None:
    return value[0] if isinstance(value, list) else value


def _ids(*sources: int | list[int] | None) -> tuple[int, ...]:
    """All token ids of the sources, once each, in order."""
    ids: dict[int, None] = {}
    for source in sources:
        for token in source if isinstance(source, list) else [] if source is None else [source]:
            ids[int(token)] = None
    return tuple(ids)

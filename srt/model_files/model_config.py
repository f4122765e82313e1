"""The config of a model, read from config.json or from the metadata of a GGUF file.

A setting that the decoder would ignore is refused by name, so a model that starts is computed as it was trained. The
file does not import torch, because the HTTP process reads the config too.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from ..errors import ModelNotSupported
from .experts_config import ExpertsConfig, gguf_experts
from .families import (
    FAMILIES,
    GGUF_ARCHITECTURES,
    GGUF_ARCHITECTURES_WITH_EXPERTS,
    Family,
    SlidingWindows,
    not_in_families,
)
from .files import read_json_object
from .generation_defaults import GGUF_KEYS, HF_KEYS, GenerationDefaults, read_generation_defaults
from .gguf_file import GGUFFile, GGUFTensor
from .quantization_config import QuantizationConfig, read_quantization_config
from .rope_config import GGUF_DIVISORS, NO_ROTATION, GGUFDivisors, RopeConfig, rope_from_gguf, rope_from_hf
from .settings import Settings, quote

LoadFormat: TypeAlias = Literal["auto", "safetensors", "gguf", "dummy"]
_SIZES = (
    "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
    "context_len",
)  # fmt: skip
_MAX_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The config of a decoder-only model.

    sliding_windows: one entry per layer; None: the layer attends to all positions.
    """

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
    """An empty tuple is replaced by one None per layer."""
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: RopeConfig = field(default_factory=RopeConfig)
    layer_ropes: tuple[RopeConfig, ...] = ()
    """of each layer; empty: every layer has `rope`"""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertsConfig | None = None
    """of the sparse layers; None: all layers are dense"""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """from the config and the generation config; the tokenizer may add others"""
    dtype: str | None = None
    """dtype of the checkpoint: "float32", "float16" or "bfloat16"; None: not given"""
    quantization: QuantizationConfig | None = None
    """how quantized matrices of a safetensors checkpoint are stored; None: it has none"""
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    model_path: str = ""
    load_format: Literal["safetensors", "gguf", "dummy"] = "dummy"

    def __post_init__(self) -> None:
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        where = f"{self.model_path}: " if self.model_path else ""
        if self.architecture not in FAMILIES:
            raise ModelNotSupported(f"{where}{not_in_families(self.architecture)}")
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{where}{name} must be at least 1, got {getattr(self, name)}")
        if not (math.isfinite(self.rms_norm_eps) and self.rms_norm_eps > 0):
            raise ValueError(f"{where}rms_norm_eps must be a finite number above 0, got {self.rms_norm_eps}")
        experts = self.experts
        if experts is not None and not 1 <= experts.num_experts_per_token <= experts.num_experts:
            raise ValueError(
                f"{where}a token must have from 1 to {experts.num_experts} experts, as many as a layer has, got "
                f"{experts.num_experts_per_token}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{where}num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"{where}head_dim must be even for rotary embedding, got {self.head_dim}")
        if self.hidden_act not in ("silu", "swish"):
            raise ModelNotSupported(f"{where}hidden_act {self.hidden_act!r} is not supported; supported: silu, swish")
        if any(window is not None and window < 1 for window in self.sliding_windows):
            raise ValueError(f"{where}a sliding window must be at least 1, got {self.sliding_windows}")
        if len(self.sliding_windows) != self.num_layers:
            raise ValueError(f"{where}{len(self.sliding_windows)} sliding windows given for {self.num_layers} layers")
        if len(self.ropes) != self.num_layers:
            raise ValueError(f"{where}{len(self.ropes)} rotary embeddings given for {self.num_layers} layers")

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embedding of each layer."""
        return self.layer_ropes or (self.rope,) * self.num_layers

    def is_sparse(self, layer: int) -> bool:
        """Whether the feed-forward layer is a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def has_dense_layers(self) -> bool:
        return self.experts is None or bool(self.experts.dense_layers)

    @property
    def feed_forward_widths(self) -> tuple[int, ...]:
        """The widths of the feed-forward layers that the model has, and of its experts."""
        dense = (self.intermediate_size,) if self.has_dense_layers else ()
        return dense if self.experts is None else (*dense, self.experts.intermediate_size)

    @property
    def model_type(self) -> str:
        return FAMILIES[self.architecture].model_type


def load_model_config(model_path: str | os.PathLike[str], load_format: LoadFormat = "auto") -> ModelConfig:
    """Read the config of a Hugging Face directory, a .gguf file, or a single config.json (dummy weights only).

    Raises FileNotFoundError, ModelNotSupported for a model that Tercet cannot compute, and other ValueErrors.
    """
    path = os.fspath(model_path)
    if not os.path.exists(path):
        is_name = path.count("/") == 1 and not path.startswith((".", "/")) and not path.endswith((".gguf", ".json"))
        hint = f"; to download the model {path}: hf download {path} --local-dir FOLDER" if is_name else ""
        raise FileNotFoundError(
            f"{path!r} does not exist; give a directory with config.json, a .gguf file or a config.json{hint}"
        )
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
        raise ValueError(
            f"{path!r} is a config without weights; use --load-format dummy, or give the model's directory"
        )
    folder = path if is_dir else os.path.dirname(path)
    config_path = os.path.join(path, "config.json") if is_dir else path
    generation_path = os.path.join(folder, "generation_config.json")
    generation = read_json_object(generation_path) if os.path.exists(generation_path) else {}
    gptq_path = os.path.join(folder, "quantize_config.json")
    of_autogptq = Settings(gptq_path, read_json_object(gptq_path)) if os.path.exists(gptq_path) else None
    return _from_hf(
        Settings(config_path, _read_config(config_path)),
        Settings(generation_path, generation),
        of_autogptq,
        path,
        "dummy" if load_format == "dummy" else "safetensors",
    )


def _read_config(path: str) -> dict[str, object]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path!r} is missing; give a directory with config.json, or a .gguf file") from None


def _from_hf(
    config: Settings,
    generation: Settings,
    of_autogptq: Settings | None,
    path: str,
    load_format: Literal["safetensors", "dummy"],
) -> ModelConfig:
    architecture = _hf_architecture(config)
    family = FAMILIES[architecture]
    quantization = read_quantization_config(config, of_autogptq)
    for key in ("rope_interleaved", "use_mrope"):
        if config.flag(key):
            raise config.unsupported(f"{key}={config.get(key)!r} is not supported")
    if not config.flag("is_causal", True):
        raise config.unsupported("is_causal=False is not supported: attention here is always causal")

    num_layers = config.integer("num_hidden_layers", maximum=_MAX_LAYERS)
    num_heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    if family.default_head_dim is None and hidden_size % num_heads and config.get("head_dim") is None:
        raise ValueError(
            f"{config.source}: hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads})"
        )
    head_dim = config.integer("head_dim", family.default_head_dim or hidden_size // num_heads)
    default_num_kv_heads = None if "num_key_value_heads" in config else family.default_num_kv_heads
    attention_bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    for key, is_set, known in (
        ("attention_bias", attention_bias, family.qkv_bias),
        ("mlp_bias", mlp_bias, family.mlp_bias),
    ):
        if is_set and known is False:
            raise config.unsupported(f"{key} is not supported for {architecture}")
    context_len = config.integer("max_position_embeddings")
    rope = rope_from_hf(config, family, context_len, head_dim)
    dtype = config.text("dtype") or config.text("torch_dtype")
    bos_ids = config.token_ids("bos_token_id")
    if not bos_ids and config.get("bos_token_id") is not None:
        raise config.refusal("bos_token_id", "a token id, or null", [])
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", default_num_kv_heads or num_heads),
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        context_len=max(context_len, rope.context_len),
        sliding_windows=family.sliding_windows(config, num_layers),
        # null does not stand for the default here: other libraries cannot compute with it, either.
        rms_norm_eps=config.number("rms_norm_eps", None if "rms_norm_eps" in config else family.default_rms_norm_eps),
        hidden_act=config.text("hidden_act") or "silu",
        rope=rope,
        layer_ropes=_layer_ropes(family, config, rope, num_layers),
        tie_word_embeddings=config.flag("tie_word_embeddings", family.tied_by_default),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        experts=None if family.experts is None else family.experts(config, num_layers),
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=_distinct(*config.token_ids("eos_token_id"), *generation.token_ids("eos_token_id")),
        dtype=None if dtype is None else dtype.removeprefix("torch."),
        quantization=quantization,
        generation=read_generation_defaults(generation, HF_KEYS),
        model_path=path,
        load_format=load_format,
    )


def _layer_ropes(family: Family, config: Settings, rope: RopeConfig, num_layers: int) -> tuple[RopeConfig, ...]:
    if family.rotated_layers is None:
        return ()
    return tuple(rope if rotated else NO_ROTATION for rotated in family.rotated_layers(config, num_layers))


def _hf_architecture(config: Settings) -> str:
    names = config.texts("architectures") or []
    model_type = config.text("model_type")
    if not names:
        names = [name for name, family in FAMILIES.items() if family.model_type == model_type]
    if not names and model_type is None:
        raise config.unsupported("neither architectures nor model_type is given, so it is no config of a model")
    name = names[0] if names else str(model_type)
    if name not in FAMILIES:
        raise config.unsupported(not_in_families(name))
    if model_type is not None and model_type != FAMILIES[name].model_type:
        raise config.unsupported(f"model_type {model_type!r} with architecture {name!r} is not supported")
    return name


# The `{architecture}.*` keys that a GGUF file may have. Others are refused, because nearly all change the computation.
_GGUF_KEYS = (
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.attn_factor", "tensor_data_layout",
    "expert_count", "expert_used_count", "expert_feed_forward_length", "pooling_type", "attention.sliding_window",
)  # fmt: skip
_GGUF_POOLINGS = (0, 3)
"""None, and the last token, which is what /v1/embeddings takes by default. Embedding models name their pooling."""


def _from_gguf(file: GGUFFile, load_format: Literal["gguf", "dummy"]) -> ModelConfig:
    metadata = Settings(file.path, file.metadata)
    arch = metadata.text("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise metadata.unsupported(
            f"GGUF architecture {arch!r} is not supported; supported: {', '.join(GGUF_ARCHITECTURES)}"
        )
    if (parts := metadata.integer("split.count", 0, minimum=0)) > 1:
        raise metadata.unsupported(f"the file is one of {parts} split files; merge them first")
    prefix = f"{arch}."
    for key in file.metadata:
        if key.startswith(prefix) and key.removeprefix(prefix) not in _GGUF_KEYS:
            raise metadata.unsupported(f"metadata {key}={quote(file.metadata[key])} is not supported")
    config = Settings(
        file.path, {key: file.metadata[prefix + key] for key in _GGUF_KEYS if prefix + key in file.metadata}, prefix
    )
    architecture = GGUF_ARCHITECTURES[arch]
    if num_experts := config.integer("expert_count", 0, minimum=0):
        if arch not in GGUF_ARCHITECTURES_WITH_EXPERTS:
            raise metadata.unsupported(f"a mixture of {num_experts} experts is not supported with {arch}")
        architecture = GGUF_ARCHITECTURES_WITH_EXPERTS[arch]
    if (pooling := config.integer("pooling_type", 0, minimum=0)) not in _GGUF_POOLINGS:
        raise metadata.unsupported(f"{prefix}pooling_type={pooling} is not supported; supported: 3, the last token")
    family = FAMILIES[architecture]
    first_projection = "blk.0.attn_qkv" if family.stacked_projections else "blk.0.attn_q"
    tensors = {tensor.name: tensor for tensor in file.tensors}
    for name in ("token_embd.weight", f"{first_projection}.weight"):
        if name not in tensors:
            raise ValueError(f"{file.path} is not a complete model: it has no tensor {name!r}")
    if len(tensors["token_embd.weight"].shape) != 2:
        raise ValueError(
            f"{file.path}: token_embd.weight must have two dimensions, got {tensors['token_embd.weight'].shape}"
        )

    num_heads, hidden_size = config.integer("attention.head_count"), config.integer("embedding_length")
    head_dim = config.integer("attention.key_length", hidden_size // num_heads)
    rotary_dim = config.integer("rope.dimension_count", head_dim)
    if family.partial_rotary and (rotary_dim % 2 or rotary_dim > head_dim):
        raise metadata.unsupported(
            f"{prefix}rope.dimension_count must be even and at most {head_dim}, got {rotary_dim}"
        )
    for key in ("attention.value_length", *(() if family.partial_rotary else ("rope.dimension_count",))):
        if (given := config.integer(key, head_dim)) != head_dim:
            raise metadata.unsupported(f"{prefix}{key} must equal the head dimension {head_dim}, got {given}")
    window = config.integer("attention.sliding_window", 0, minimum=0)
    if window and not family.gguf_window:
        raise metadata.unsupported(f"{prefix}attention.sliding_window={window} is not supported")
    context_len, num_layers = config.integer("context_length"), config.integer("block_count", maximum=_MAX_LAYERS)
    rope = rope_from_gguf(config, _rope_divisors(file, tensors, rotary_dim), context_len)
    if rotary_dim != head_dim:
        rope = dataclasses.replace(rope, rotary_dim=rotary_dim)
    special = [_gguf_token_id(metadata, name) for name in ("eos", "eot", "eom")]
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=config.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=tensors["token_embd.weight"].shape[0],
        context_len=max(context_len, rope.context_len),
        sliding_windows=(window or None,) * num_layers,
        rms_norm_eps=config.number("attention.layer_norm_rms_epsilon", family.default_rms_norm_eps),
        rope=rope,
        layer_ropes=_layer_ropes(family, config, rope, num_layers),
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias=f"{first_projection}.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        experts=None if family.experts is None else gguf_experts(config, tensors),
        bos_token_id=_gguf_token_id(metadata, "bos"),
        eos_token_ids=_distinct(*(token for token in special if token is not None)),
        dtype=_gguf_dtype(tensors[f"{first_projection}.weight"].type),
        generation=read_generation_defaults(metadata, GGUF_KEYS),
        model_path=file.path,
        load_format=load_format,
    )


def _gguf_token_id(metadata: Settings, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    # Some files write -1, signed or unsigned, for "no such token".
    token = metadata.integer(key, minimum=-1, maximum=2**32 - 1) if key in metadata else -1
    return token if token >= 0 else None


def _rope_divisors(file: GGUFFile, tensors: Mapping[str, GGUFTensor], rotary_dim: int) -> GGUFDivisors:
    def values(name: str) -> tuple[float, ...] | None:
        if name not in tensors:
            return None
        tensor = tensors[name]
        if tensor.shape != (rotary_dim // 2,) or tensor.type != 0:
            raise ModelNotSupported(f"{file.path}: {name} must be F32 [{rotary_dim // 2}], got {tensor}")
        divisors = file.tensor_bytes(tensor, 4 * tensor.shape[0]).view(np.float32)
        if not (np.isfinite(divisors) & (divisors > 0)).all():
            raise ValueError(f"{file.path}: {name} must hold positive numbers, got {quote(divisors.tolist())}")
        return tuple(divisors.tolist())

    return GGUFDivisors(*map(values, GGUF_DIVISORS))


def _gguf_dtype(tensor_type: int) -> str:
    # Most quantised weights were made from bfloat16, and such a model may overflow in float16.
    return {0: "float32", 1: "float16"}.get(tensor_type, "bfloat16")


def _distinct(*ids: int) -> tuple[int, ...]:
    """The distinct ids, in order of first appearance."""
    return tuple(dict.fromkeys(ids))

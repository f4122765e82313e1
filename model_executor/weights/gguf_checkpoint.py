"""The Checkpoint of GGUF files: dequantised tensors with Hugging Face's names and order of rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial

import gguf
import torch

from ...srt.model_files.gguf_file import GGUFTensor
from ...srt.model_files.gguf_model import GGUFModel
from ...srt.model_files.gguf_rope import GGUF_DIVISORS
from ...srt.model_files.model_config import ModelConfig
from ..layers.quantized_weight import QuantizedWeight
from ..models.parameter import Region
from . import ggml_types
from .ggml_types import Blocks, Kind

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
_NAMES_OF_OUTPUT_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAMES_OF_LFM2 = {
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
"""Converters have written two names for the last norm."""
_NAMES_OF_GEMMA = _NAMES_OF_OUTPUT_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_NAMES_OF_ARCHITECTURE = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gemma2": _NAMES_OF_GEMMA,
    "gemma3": _NAMES_OF_GEMMA,
    "olmo2": _NAMES_OF_OUTPUT_NORMS,
    "exaone4": _NAMES_OF_OUTPUT_NORMS,
    "glm4": {
        "ffn_up": "mlp.gate_up_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "glm4moe": {"post_attention_norm": "post_attention_layernorm"},
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "hunyuan-dense": {
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
    },
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks": "self_attn.sinks",
    },
    "lfm2": _NAMES_OF_LFM2,
    "lfm2moe": _NAMES_OF_LFM2,
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+|shortconv\.\w+)\.(weight|bias)")
_GLOBAL_NAME = re.compile(r"(\w+)\.(weight|bias)")
_BIASES_OF_EXPERTS = "_exps.bias"
_WITHOUT_ENDING = (("attn_sinks", "weight"), ("exp_probs_b", "bias"))
"""Tensors whose Hugging Face names do not end in `weight` or `bias`."""
_SHARED_GATE = ".ffn_gate_inp_shexp.weight"
# In llama.cpp these architectures rotate neighbouring components together, and reorder rows for that.
_PERMUTED_ARCHITECTURES = ("llama", "smollm3", "granite", "granitemoe", "arcee", "mistral3")


_CPU = torch.device("cpu")


class GGUFCheckpoint:
    """A Checkpoint of a GGUF file, or of the parts of a split one.

    Raises ValueError for a tensor that cannot be dequantised, and for one that is there by two names.
    """

    def __init__(self, config: ModelConfig, device: torch.device = _CPU) -> None:
        """`device`: where tensors are dequantised."""
        self._device = device
        self._file = GGUFModel(config.model_path)
        arch = str(self._file.metadata["general.architecture"])
        stems = _NAMES | _NAMES_OF_ARCHITECTURE.get(arch, {})
        self._tensors: dict[str, GGUFTensor] = {}
        for tensor in self._file.tensors:
            if tensor.name in GGUF_DIVISORS:
                continue
            name = _hf_name(tensor.name, stems)
            if name in self._tensors:
                raise ValueError(f"tensors {self._tensors[name].name!r} and {tensor.name!r} are both {name}")
            self._tensors[name] = _in_shape_of_model(tensor)
        self.names = frozenset(self._tensors)
        permuted = arch in _PERMUTED_ARCHITECTURES
        self._permuted_heads = {".q_proj.": config.num_heads, ".k_proj.": config.num_kv_heads} if permuted else {}

    @property
    def needs_a_cpu(self) -> bool:
        """Whether a CPU dequantises some of the tensors, whatever the device is."""
        return any(ggml_types.needs_a_cpu(info.type) for info in self._tensors.values())

    def dtype(self, name: str) -> torch.dtype | None:
        return ggml_types.PLAIN.get(self._tensors[name].type)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def tensor(self, name: str, region: Region | None = None) -> torch.Tensor:
        """The tensor called `name`, or a region of it, as float32, float16 or bfloat16, on the checkpoint's device.

        The region of a permuted projection consists of whole heads.
        """
        info = self._tensors[name]
        # A vector is one row.
        rows, columns = _all_of(_as_matrix(info.shape)) if region is None else (slice(0, 1), *region)[-2:]
        blocks, within = self._blocks(info, rows, columns)
        try:
            found = ggml_types.dequantized(blocks, self._device)
        except NotImplementedError:
            raise ValueError(
                f"tensor {info.name!r} is quantised as {blocks.kind.name}, which Tercet cannot dequantise"
            ) from None
        found = found[:, within]
        return self._in_order(name)(found if len(info.shape) == 2 else found.reshape(*info.shape[:-1], found.shape[1]))

    def has_form(self, name: str, form: str) -> bool:
        info = self._tensors[name]
        return len(info.shape) == 2 and ggml_types.has_form(info.type, form)

    def quantized(self, name: str, form: str, region: Region | None = None) -> QuantizedWeight | None:
        """The tensor, or a region of it, in `form`, with exactly the file's values. None if that is not possible.

        The columns of the region are whole groups, in the K forms whole super-blocks. The rows of a permuted projection
        are whole heads.
        """
        info = self._tensors[name]
        if not self.has_form(name, form):
            return None
        blocks, within = self._blocks(info, *(region or _all_of(info.shape)))
        found = ggml_types.quantized(blocks, form)
        return None if found is None else found.with_columns(within).with_rows(self._in_order(name))

    def _in_order(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """The function that reorders the rows of whole heads from the file's order to Hugging Face's."""
        for projection, num_heads in self._permuted_heads.items():
            if projection in name:
                return partial(unpermute, head_dim=self._tensors[name].shape[0] // num_heads)
        return lambda tensor: tensor

    def _blocks(self, info: GGUFTensor, rows: slice, columns: slice) -> tuple[Blocks, slice]:
        """The mapped blocks that contain a region of a matrix, and the place of the region in their columns."""
        try:
            kind = Kind(info.type)
            length, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ValueError(f"tensor {info.name!r} has the unknown GGML type {info.type}") from None
        num_rows, row_len = _as_matrix(info.shape)
        if row_len % length:
            raise ValueError(f"tensor {info.name!r} has rows of {row_len}; {kind.name} needs a multiple of {length}")
        raw = self._file.tensor_bytes(info, num_rows * row_len // length * num_bytes)
        first, last = columns.start // length, -(-columns.stop // length)
        begin = first * length
        return (
            Blocks(kind, raw.reshape(num_rows, row_len // length, num_bytes)[rows, first:last]),
            slice(columns.start - begin, columns.stop - begin),
        )


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]


def _in_shape_of_model(tensor: GGUFTensor) -> GGUFTensor:
    """A tensor of the matrices or biases of all experts as one matrix or vector with the rows of all of them, and the
    vector of a shared expert's gate as a matrix. Others stay as they are."""
    if tensor.name.endswith(_SHARED_GATE):
        return tensor._replace(shape=_as_matrix(tensor.shape))
    if tensor.name.endswith(_BIASES_OF_EXPERTS) and len(tensor.shape) == 2:
        return tensor._replace(shape=(math.prod(tensor.shape),))
    return tensor._replace(shape=_as_matrix(tensor.shape)) if len(tensor.shape) == 3 else tensor


def _all_of(shape: tuple[int, ...]) -> Region:
    return tuple(slice(0, length) for length in shape)


def unpermute(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of each head from llama.cpp's order (0, n/2, 1, n/2 + 1, ...) to (0, 1, ..., n - 1)."""
    pairs = tensor.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _hf_name(name: str, stems: Mapping[str, str]) -> str:
    """The Hugging Face name of a tensor. An unknown name is returned unchanged, and later reported as unexpected."""
    if match := _BLOCK_NAME.fullmatch(name):
        block, stem, kind = match.groups()
        if (stem, kind) in _WITHOUT_ENDING and stem in stems:
            return f"model.layers.{block}.{stems[stem]}"
        return f"model.layers.{block}.{stems[stem]}.{kind}" if stem in stems else name
    if match := _GLOBAL_NAME.fullmatch(name):
        stem, kind = match.groups()
        return f"{stems[stem]}.{kind}" if stem in stems else name
    return name

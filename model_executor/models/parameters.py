"""The parameters of a decoder, the checkpoint tensors that each is made from, and the part of it that a rank holds.

With tensor parallelism, several ranks compute one model. Attention heads and feed-forward features are divided equally
among them. Each layer then needs two sums over all ranks: the outputs of `o_proj` and of `down_proj`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

import torch

from ...srt.model_files.experts_config import GGUF_NAMES
from ...srt.model_files.families import FAMILIES
from ...srt.model_files.model_config import ModelConfig

Region: TypeAlias = tuple[slice, ...]
"""A part of a tensor: a slice for each dimension."""


class Split(Enum):
    """How the ranks divide a parameter."""

    REPLICATED = auto()
    """Each rank has all of it."""
    COLUMNS = auto()
    """By output features, the first dimension. The outputs of the ranks are concatenated."""
    ROWS = auto()
    """By input features, the second dimension. The outputs of the ranks are added."""
    FIRST_RANK = auto()
    """The first rank has all of it, the others have zeros: a bias of a linear layer that is split by rows."""


class Part(NamedTuple):
    """A checkpoint tensor, or neighbouring rows of one."""

    name: str
    """the tensor's Hugging Face name"""
    shape: tuple[int, ...]
    """of the part"""
    first_row: int = 0
    """of the tensor"""
    num_rows: int | None = None
    """of the tensor; None: the part is the whole tensor"""
    offset: float = 0.0
    """what is added to each number of the tensor"""
    factor: float = 1.0
    """what the sums are multiplied by"""
    head_order: tuple[int, ...] | None = None
    """the rows of each head in the order of the model, as numbers of the tensor's rows; None: as in the tensor"""
    is_only_row: bool = False
    """whether the part is a vector, and the tensor a matrix that has no other row"""

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        if self.is_only_row:
            return (1, *self.shape)
        return self.shape if self.num_rows is None else (self.num_rows, *self.shape[1:])

    def within_tensor(self, region: Region) -> Region:
        """Where the tensor has a region of the part."""
        if self.is_only_row:
            return (slice(0, 1), *region)
        rows = slice(self.first_row + region[0].start, self.first_row + region[0].stop)
        return (rows, *region[1:])

    def computed(self, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers of the model from those of the tensor; float32 unless they are equal."""
        return (numbers.float() + self.offset) * self.factor if self.is_computed else numbers

    @property
    def is_computed(self) -> bool:
        return (self.offset, self.factor) != (0, 1)

    def in_order(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of whole heads, in the order of the model."""
        if self.head_order is None:
            return rows
        order = torch.tensor(self.head_order, device=rows.device)
        return rows.unflatten(0, (-1, len(order))).index_select(1, order).flatten(0, 1)


class Parameter(NamedTuple):
    """A tensor of the model: checkpoint tensors stacked along the first dimension, so that one product serves all."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    split: Split
    """how ranks divide each of the parts"""


class ParameterDtypes(NamedTuple):
    """The types of the parameters that are not quantized."""

    vectors: torch.dtype
    """Of norms and biases. Attention sinks have float32, because attention computes its scores in it. Corrections have
    float32, because a small error may choose another expert."""
    matrices: torch.dtype
    routers: torch.dtype
    """of mixtures of experts: float32, or that of other matrices"""

    def of(self, parameter: Parameter) -> torch.dtype:
        if parameter.name.endswith(ROUTER_ENDING):
            return self.routers
        if parameter.name.endswith(_FLOAT32_ENDINGS) or any(part.is_computed for part in parameter.parts):
            return torch.float32
        return self.matrices if len(parameter.shape) == 2 else self.vectors


class Shard(NamedTuple):
    """The share of a model that one rank holds."""

    rank: int
    size: int
    """number of ranks"""

    def region(self, shape: tuple[int, ...], split: Split) -> Region:
        """The rank's part of a tensor. `check_shard` has checked that the ranks can divide it."""
        whole = [slice(0, length) for length in shape]
        if split in (Split.COLUMNS, Split.ROWS):
            dim = 0 if split is Split.COLUMNS else 1
            length, rest = divmod(shape[dim], self.size)
            assert not rest, (shape, split, self.size)
            whole[dim] = slice(self.rank * length, (self.rank + 1) * length)
        return tuple(whole)

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """The shape of the rank's part of a parameter."""
        return tuple(part.stop - part.start for part in self.region(parameter.shape, parameter.split))


WHOLE = Shard(0, 1)
"""The shard of an engine without tensor parallelism."""


def check_shard(config: ModelConfig, shard: Shard) -> None:
    """Raise ValueError unless there is such a rank, and the ranks can divide the model equally."""
    if not 0 <= shard.rank < shard.size:
        raise ValueError(f"rank must be in [0, {shard.size}) with {shard.size} ranks, got {shard.rank}")
    if shard.size > 1 and config.qk_norm == "rows":
        raise ValueError(
            f"{shard.size} ranks cannot divide {config.architecture}: its norms of queries and keys need all heads"
        )
    divided = [(name, getattr(config, name)) for name in ("num_heads", "num_kv_heads")]
    divided += [("intermediate_size", width) for width in config.feed_forward_widths]
    if not config.tie_word_embeddings:
        divided.append(("vocab_size", config.vocab_size))
    for name, number in divided:
        if number % shard.size:
            raise ValueError(f"the number of ranks must divide {name}, but {number} is no multiple of {shard.size}")


def rank_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The config of a rank's part: its number of heads and its feed-forward width. Raises ValueError (check_shard).

    The vocabulary stays whole, because each rank embeds all tokens.
    """
    check_shard(config, shard)
    experts = config.experts
    if experts is not None:
        shared = experts.shared
        if shared is not None:
            shared = shared._replace(intermediate_size=shared.intermediate_size // shard.size)
        width = experts.intermediate_size // shard.size
        experts = dataclasses.replace(experts, intermediate_size=width, shared=shared)
    return dataclasses.replace(
        config,
        experts=experts,
        num_heads=config.num_heads // shard.size,
        num_kv_heads=config.num_kv_heads // shard.size,
        intermediate_size=config.intermediate_size // shard.size,
    )


def decoder_parameters(config: ModelConfig) -> list[Parameter]:
    """The parameters of the model that `config` describes, under the names that `Decoder` uses."""
    family, hidden, head_dim = FAMILIES[config.architecture], config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    inter = config.intermediate_size
    # The parts have their rows here, and their columns in `layer`.
    q = Part("self_attn.q_proj", (q_size,))
    k, v = Part("self_attn.k_proj", (kv_size,)), Part("self_attn.v_proj", (kv_size,))
    gate, up = Part("mlp.gate_proj", (inter,)), Part("mlp.up_proj", (inter,))
    if family.stacked_qkv:
        q, k, v = _stacked("self_attn.qkv_proj", q_size, kv_size, kv_size)
    if family.stacked_gate_up:
        gate, up = _stacked("mlp.gate_up_proj", inter, inter)
    if config.rope.rotary_dim is not None or family.interleaved_rotary:
        order = _half_split_order(head_dim, config.rope.rotary_dim, family.interleaved_rotary)
        q, k = q._replace(head_order=order), k._replace(head_order=order)
    # name: (checkpoint rows, columns, whether it has a bias, how it is split)
    linears = {
        "qkv_proj": ((q, k, v), hidden, config.qkv_bias, Split.COLUMNS),
        "o_proj": ((Part("self_attn.o_proj", (hidden,)),), q_size, config.o_bias, Split.ROWS),
    }
    inner = {"gate_up_proj": (gate, up)} if config.has_gates else {"up_proj": (up,)}
    dense = {
        **{name: (parts, hidden, config.mlp_bias, Split.COLUMNS) for name, parts in inner.items()},
        "down_proj": ((Part("mlp.down_proj", (hidden,)),), inter, config.mlp_bias, Split.ROWS),
    }
    norm = Part("", (hidden,), offset=config.norm_offset)
    norms: dict[str, Part] = {}
    if config.input_norms:
        # In most families with norms of outputs, that of attention has the name of this one.
        is_taken = config.output_norms and "post_attention_layernorm" in family.output_norm_names
        before_feed_forward = "pre_feedforward_layernorm" if is_taken else "post_attention_layernorm"
        norms = {
            "input_norm": norm._replace(name="input_layernorm"),
            "post_attention_norm": norm._replace(name=before_feed_forward),
        }
    if config.output_norms:
        output_norm = norm._replace(factor=config.output_norm_factor)
        norms |= {
            "attention_output_norm": output_norm._replace(name=family.output_norm_names[0]),
            "feed_forward_output_norm": output_norm._replace(name=family.output_norm_names[1]),
        }
    has_sinks = family.attention_sinks
    if config.qk_norm is not None:
        sizes = (q_size, kv_size) if config.qk_norm == "rows" else (head_dim, head_dim)
        for name, stored, size in zip(("q_norm", "k_norm"), family.qk_norm_names, sizes, strict=True):
            norms[name] = norm._replace(name=f"self_attn.{stored}", shape=(size,), head_order=q.head_order)

    def layer(index: int) -> Iterator[Parameter]:
        source = f"model.layers.{index}."
        for name, part in norms.items():
            stored = part._replace(name=f"{source}{part.name}.weight")
            yield Parameter(f"layers.{index}.{name}.weight", part.shape, (stored,), Split.REPLICATED)
        if has_sinks:
            sinks = f"{source}self_attn.sinks"
            yield _whole(sinks_name(index), sinks, (config.num_heads,), Split.COLUMNS)
        is_sparse = config.is_sparse(index)
        for name, (parts, columns, bias, split) in (linears if is_sparse else linears | dense).items():
            rows = sum(part.shape[0] for part in parts)
            weights = tuple(_renamed(part, f"{source}{part.name}.weight", columns) for part in parts)
            yield Parameter(f"layers.{index}.{name}.weight", (rows, columns), weights, split)
            if bias:
                biases = tuple(_renamed(part, f"{source}{part.name}.bias") for part in parts)
                bias_split = Split.FIRST_RANK if split is Split.ROWS else split
                yield Parameter(f"layers.{index}.{name}.bias", (rows,), biases, bias_split)
        if is_sparse:
            yield from _experts(config, index)

    parameters = [_whole("embed_tokens.weight", EMBEDDING, (config.vocab_size, hidden))]
    for index in range(config.num_layers):
        parameters.extend(layer(index))
    last_norm = norm._replace(name=NORM, factor=1 / config.logits_divisor)
    parameters.append(Parameter("norm.weight", (hidden,), (last_norm,), Split.REPLICATED))
    if not config.tie_word_embeddings:
        parameters.append(_whole("lm_head.weight", LM_HEAD, (config.vocab_size, hidden), Split.COLUMNS))
    return parameters


def sinks_name(layer: int) -> str:
    """The name of the attention sinks of a layer, float32 [num_heads]."""
    return f"layers.{layer}{_SINKS_ENDING}"


def router_name(layer: int) -> str:
    """The name of the router's weight, [num_experts, hidden]."""
    return f"layers.{layer}{ROUTER_ENDING}"


def corrections_name(layer: int) -> str:
    """The name of what is added to the weights of a router for the choice, float32 [num_experts]."""
    return f"layers.{layer}{_CORRECTIONS_ENDING}"


def expert_names(layer: int, expert: int) -> tuple[str, str]:
    """The names of an expert's two weights: gate and up [2 * inter, hidden], down [hidden, inter]."""
    prefix = f"layers.{layer}.experts.{expert}."
    return f"{prefix}gate_up_proj.weight", f"{prefix}down_proj.weight"


def shared_expert_names(layer: int) -> tuple[str, str]:
    """The names of the two weights of the shared expert, as those of an expert."""
    prefix = f"layers.{layer}.shared_expert."
    return f"{prefix}gate_up_proj.weight", f"{prefix}down_proj.weight"


def shared_gate_name(layer: int) -> str:
    """The name of the weight of the shared expert's gate, [1, hidden]."""
    return f"layers.{layer}{SHARED_GATE_ENDING}"


def bias_name(weight_name: str) -> str:
    """The name of the bias beside a weight."""
    return f"{weight_name.removesuffix('weight')}bias"


def is_expert(name: str) -> bool:
    """Whether a parameter is a weight or a bias of an expert that the router may choose."""
    return ".experts." in name


def _experts(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    """The parameters of a sparse layer."""
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    count, shared = experts.num_experts, experts.shared
    names = GGUF_NAMES if config.load_format == "gguf" else FAMILIES[config.architecture].expert_names
    source = f"model.layers.{layer}."

    def matrices(of: tuple[str, str], prefix: str, inter: int, expert: int = 0, in_tensor: int = 1) -> list[Parameter]:
        """The weights of an expert. `in_tensor`: how many experts have their rows in a tensor; `expert`: its place."""
        gate_up = _expert_parts(source + prefix, (names.gate, names.up), (inter, hidden), expert, in_tensor)
        down = _expert_parts(source + prefix, (names.down,), (hidden, inter), expert, in_tensor)
        return [
            Parameter(of[0], (2 * inter, hidden), gate_up, Split.COLUMNS),
            Parameter(of[1], (hidden, inter), down, Split.ROWS),
        ]

    def with_bias(weight: Parameter, split: Split) -> Iterator[Parameter]:
        yield weight
        if experts is not None and experts.has_biases:
            biases = tuple(part._replace(name=bias_name(part.name), shape=part.shape[:1]) for part in weight.parts)
            yield Parameter(bias_name(weight.name), weight.shape[:1], biases, split)

    router = _whole(router_name(layer), f"{source}{names.router}.weight", (count, hidden))
    yield from with_bias(router, Split.REPLICATED)
    if experts.has_corrections:
        part = Part(source + names.corrections, (count,), is_only_row=names.corrections_in_row)
        yield Parameter(corrections_name(layer), part.shape, (part,), Split.REPLICATED)
    for expert in range(count):
        prefix, place = f"{names.experts}{expert}.", (0, 1)
        if names.has_rows_of_all:
            prefix, place = names.experts, (expert, count)
        gate_up, down = matrices(expert_names(layer, expert), prefix, experts.intermediate_size, *place)
        yield from with_bias(gate_up, Split.COLUMNS)
        yield from with_bias(down, Split.FIRST_RANK)
    if shared is not None:
        yield from matrices(shared_expert_names(layer), names.shared, shared.intermediate_size)
        if shared.has_gate:
            yield _whole(shared_gate_name(layer), f"{source}{names.shared_gate}.weight", (1, hidden))


def _expert_parts(
    prefix: str, modules: tuple[str, ...], shape: tuple[int, int], expert: int, num_experts: int
) -> tuple[Part, ...]:
    """The parts of the `expert`-th of `num_experts` experts whose rows are in tensors named after `modules`."""
    of_expert = len(modules) // len(set(modules))  # its matrices in a tensor
    firsts = (expert * of_expert + place % of_expert for place in range(len(modules)))
    return tuple(
        Part(f"{prefix}{module}.weight", shape, first * shape[0], num_experts * of_expert * shape[0])
        for module, first in zip(modules, firsts, strict=True)
    )


def _renamed(part: Part, name: str, *columns: int) -> Part:
    return part._replace(name=name, shape=(*part.shape, *columns))


def _stacked(name: str, *sizes: int) -> Iterator[Part]:
    """The parts of a checkpoint tensor whose rows are stacked already."""
    firsts = itertools.accumulate(sizes, initial=0)
    return (Part(name, (size,), first, sum(sizes)) for size, first in zip(sizes, firsts, strict=False))


def _half_split_order(head_dim: int, rotary_dim: int | None, interleaved: bool) -> tuple[int, ...]:
    """The order of a head's rows so that its components rotate with those that are head_dim / 2 later.

    A checkpoint whose first rotary_dim components are rotated has their partners rotary_dim / 2 later, or, if
    `interleaved`, beside them. Scores are sums over all components, so they do not depend on the order, if queries and
    keys have the same one.
    """
    rotated, unrotated = range(head_dim)[:rotary_dim], range(head_dim)[rotary_dim or head_dim :]
    half, middle = len(rotated) // 2, len(unrotated) // 2
    firsts, partners = (rotated[::2], rotated[1::2]) if interleaved else (rotated[:half], rotated[half:])
    return (*firsts, *unrotated[:middle], *partners, *unrotated[middle:])


ROUTER_ENDING = ".router.weight"
SHARED_GATE_ENDING = ".shared_expert_gate.weight"
_SINKS_ENDING = ".sinks"
_CORRECTIONS_ENDING = ".router.corrections"
_FLOAT32_ENDINGS = (_SINKS_ENDING, _CORRECTIONS_ENDING)
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


def _whole(name: str, checkpoint_name: str, shape: tuple[int, ...], split: Split = Split.REPLICATED) -> Parameter:
    return Parameter(name, shape, (Part(checkpoint_name, shape),), split)

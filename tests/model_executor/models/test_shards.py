"""Two or four ranks of a model in one process: each layer's shards together compute what the whole layer does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf_models import Kind, write_gguf
from tiny_models import make_model, make_wide_experts, save
from toy_runner import TOY

from tercet.mem_cache.token_to_kv_pool import TokenToKVPool
from tercet.model_executor import cpu_extension
from tercet.model_executor.attention.registry import create_attention_backend
from tercet.model_executor.forward_batch import ForwardBatch
from tercet.model_executor.layers.kinds import layers_for
from tercet.model_executor.layers.layernorm import RMSNorm
from tercet.model_executor.models.decoder import Decoder
from tercet.model_executor.models.family import family_of
from tercet.model_executor.models.parameter import WHOLE, Shard, Split
from tercet.model_executor.models.parameters import decoder_parameters, rank_config
from tercet.model_executor.runner.kv_pool import stored_convolutions
from tercet.model_executor.step import ForwardMode
from tercet.model_executor.weights import loader
from tercet.model_executor.weights.gguf_checkpoint import GGUFCheckpoint
from tercet.model_executor.weights.loader import load_parameters
from tercet.model_executor.weights.quantization import quantized_forms
from tercet.srt.model_files.experts_config import ExpertsConfig
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig

CPU = torch.device("cpu")
EXPERTS = ExpertsConfig(num_experts=3, num_experts_per_token=2, intermediate_size=15, normalized=True)
NUM_TOKENS = 12
TOLERANCE = 1e-5
"""Relative to the largest magnitude. The ranks add the same float32 products, in another order."""


class Rank:
    """One rank: its part of the weights, its heads, and its KV pool."""

    def __init__(self, config: ModelConfig, shard: Shard, backend: str, quantization: str | None) -> None:
        own = rank_config(config, shard)
        family = family_of(config)
        forms = quantized_forms(config, quantization, shard)
        parameters = load_parameters(config, torch.float32, CPU, forms=forms, shard=shard)
        sizes = len(own.attention_layers), own.num_kv_heads, own.head_dim
        stored = stored_convolutions(own, torch.float32)
        pool = TokenToKVPool(64, 1, *sizes, torch.float32, CPU, convolutions=stored)
        self.attention = create_attention_backend(backend, family.attention(own), pool)
        layers = layers_for(backend, torch.float32, quantized=quantization is not None)
        self.model = family.build(own, parameters, self.attention, layers, config.context_len, ())
        assert isinstance(self.model, Decoder)


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((actual - expected).abs().max() <= TOLERANCE * expected.abs().max())


def prefill(num_tokens: int) -> ForwardBatch:
    positions = torch.arange(num_tokens)
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        rows=torch.tensor([0]),
        seq_lens=torch.tensor([num_tokens]),
        input_ids=torch.arange(num_tokens) * 5 % 97,
        positions=positions,
        out_cache_loc=positions + 1,
        req_to_token=torch.arange(1, 65, dtype=torch.int32)[None],
        logits_indices=None,
        extend_start_loc=torch.tensor([0, num_tokens]),
        prefix_lens=torch.tensor([0]),
        seq_lens_host=torch.tensor([num_tokens], dtype=torch.int32).numpy(),
        extend_lens_host=torch.tensor([num_tokens], dtype=torch.int32).numpy(),
    )


def input_of(norm: RMSNorm | None, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """What a layer gets. Without a norm that would be the sum, but x shows as much."""
    return x if norm is None else norm(x, residual)


def compare(config: ModelConfig, size: int, backend: str = "torch", quantization: str | None = None) -> None:
    """Run every layer whole and in shards, on the same inputs."""
    whole = Rank(config, WHOLE, backend, quantization)
    ranks = [Rank(config, Shard(rank, size), backend, quantization) for rank in range(size)]
    batch = prefill(NUM_TOKENS)
    for one in (whole, *ranks):
        one.attention.plan(batch)
        one.model.rotary.cover(NUM_TOKENS)
    x, residual = whole.model.embed_tokens(batch.input_ids, batch), None
    for one in ranks:
        assert torch.equal(one.model.embed_tokens(batch.input_ids, batch), x), "each rank embeds all tokens"
    for index, layer in enumerate(whole.model.layers):
        parts = [rank.model.layers[index] for rank in ranks]
        normed = input_of(layer.input_norm, x, residual)
        residual = x if residual is None else residual
        attended = layer.mixer(
            layer.qkv_proj(normed, batch), whole.model.rotary(batch.positions)[layer.rope_index], batch
        )
        by_rank = [
            part.mixer(part.qkv_proj(normed, batch), rank.model.rotary(batch.positions)[layer.rope_index], batch)
            for part, rank in zip(parts, ranks, strict=True)
        ]
        assert close(torch.cat(by_rank, 1), attended), "heads are concatenated"
        projected = layer.o_proj(attended, batch)
        summed = sum(part.o_proj(own, batch) for part, own in zip(parts, by_rank, strict=True))
        assert close(summed, projected), "outputs of a row split are added, the bias once"
        normed = input_of(layer.post_attention_norm, projected, residual)
        if config.is_sparse(index):
            x = layer.experts(normed, batch)
            assert close(sum(part.experts(normed, batch) for part in parts), x), "each rank has a part of each expert"
            continue
        inner = layer.inner_proj(normed, batch)
        by_rank = [part.inner_proj(normed, batch) for part in parts]
        assert close(torch.cat(by_rank, 1), inner), "features are concatenated"
        x = layer.down_proj(inner, batch)
        assert close(sum(part.down_proj(own, batch) for part, own in zip(parts, by_rank, strict=True)), x)
    hidden = whole.model.norm(x, residual)
    logits = whole.model.head.of_hidden(hidden)
    by_rank = [rank.model.head.of_hidden(hidden) for rank in ranks]
    if config.tie_word_embeddings:
        assert all(close(one, logits) for one in by_rank), "the head is the embedding, which every rank has"
    else:
        assert close(torch.cat(by_rank, 1), logits)


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[str], ModelConfig]:
    """Saves a tiny model, and returns the config of its checkpoint."""
    return lambda name: load_model_config(save(make_model(name), tmp_path / name))


@pytest.mark.parametrize(
    "name",
    [
        "llama_31_tied",
        "qwen2_tied",
        "phi3_partial",
        "qwen3_moe_sparse",
        "gpt_oss_full",
        "granite",
        "gemma2",
        "glm_whole",
        "seed_oss_out",
        "ernie4_5",
        "arcee_biases",
        "ministral3_window",
        "hunyuan_v1_dense_tied",
        "granitemoe",
        "granitemoeshared",
        "qwen2_moe_all",
        "glm4_moe_sparse",
        "dots1_window",
        "ernie4_5_moe",
        "granitemoehybrid_experts",
        "lfm2",
        "lfm2_moe",
        "lfm3",
    ],
)
def test_a_checkpoint_in_two_shards(stored: Callable[[str], ModelConfig], name: str) -> None:
    compare(stored(name), 2)


@pytest.mark.parametrize(
    "name",
    [
        "llama_biases",
        "qwen3",
        "mistral_window",
        "phi3",
        "qwen2_moe",
        "qwen3_moe",
        "mixtral",
        "smollm3_window",
        "gemma3_scaled",
        "gpt_oss",
        "glm4",
        "glm4_moe",
        "dots1",
        "ernie4_5_moe_sparse",
        "seed_oss",
        "ernie4_5_biases",
        "exaone4",
        "arcee",
        "ministral3",
        "hunyuan_v1_dense",
        "lfm2_bias",
        "lfm3_plain",
        "qwen3_5_attention",
        "granitemoehybrid",
    ],
)
def test_biases_norms_and_windows_in_two_shards(tmp_path: Path, name: str) -> None:
    model = make_model(name)
    with pytest.raises(ValueError, match="must divide vocab_size, but 131 is no multiple of 2"):
        rank_config(load_model_config(save(model, tmp_path / "odd")), Shard(0, 2))
    model.resize_token_embeddings(132)
    compare(load_model_config(save(model, tmp_path / "even")), 2)


def test_latent_attention_is_not_divided(stored: Callable[[str], ModelConfig]) -> None:
    with pytest.raises(ValueError, match="2 ranks cannot divide YoutuForCausalLM: its heads share their keys"):
        rank_config(stored("youtu"), Shard(0, 2))


def test_recurrent_layers_are_not_divided(stored: Callable[[str], ModelConfig]) -> None:
    with pytest.raises(ValueError, match="2 ranks cannot divide Qwen3_5ForCausalLM: it has recurrent layers"):
        rank_config(stored("qwen3_5"), Shard(0, 2))


def test_layers_with_different_heads_are_not_divided(stored: Callable[[str], ModelConfig]) -> None:
    with pytest.raises(ValueError, match="2 ranks cannot divide Gemma4ForCausalLM: its layers differ in their heads"):
        rank_config(stored("gemma4_heads"), Shard(0, 2))


@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_in_shards(tied: bool) -> None:
    config = dataclasses.replace(
        TOY, num_kv_heads=4, vocab_size=100, tie_word_embeddings=tied, o_bias=True, mlp_bias=True, qkv_bias=True
    )
    compare(config, 2)
    compare(config, 4)


@pytest.mark.skipif(cpu_extension.load() is None, reason="quantized layers need csrc/cpu")
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_shards_on_compiled_operations(quantization: str | None) -> None:
    wide = dataclasses.replace(TOY, hidden_size=64, intermediate_size=128, head_dim=16)
    compare(wide, 2, "cpu", quantization)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_1])
def test_a_gguf_file_in_two_shards(tmp_path: Path, kind: Kind) -> None:
    """Rows of permuted projections, whole blocks of 32 and parts of them: down_proj has 48 columns on each rank."""
    config = load_model_config(write_gguf(tmp_path / "m.gguf", make_model("llama_31_tied"), "llama", kind=kind))
    compare(config, 2)


def test_experts_of_4_bits_in_a_gguf_file_in_two_shards(tmp_path: Path) -> None:
    """Rows and biases of each expert, and parts of blocks of 32: down_proj has 48 columns on each rank."""
    model = make_model("gpt_oss")
    model.resize_token_embeddings(132)
    kinds = {f"model.layers.1.mlp.experts.{name}_proj.weight": Kind.MXFP4 for name in ("gate", "up", "down")}
    compare(load_model_config(write_gguf(tmp_path / "m.gguf", model, "gpt-oss", kinds=kinds)), 2)


def test_experts_of_a_gguf_file_in_two_shards(tmp_path: Path) -> None:
    model = make_wide_experts()
    model.resize_token_embeddings(132)
    compare(load_model_config(write_gguf(tmp_path / "m.gguf", model, "qwen3moe", kind=Kind.Q8_0)), 2)


@pytest.mark.parametrize(("name", "arch"), [("lfm2", "lfm2"), ("lfm2_moe", "lfm2moe")])
def test_convolutions_of_a_gguf_file_in_two_shards(name: str, arch: str, tmp_path: Path) -> None:
    """A matrix of a file has the weights of a convolution, which has three dimensions."""
    compare(load_model_config(write_gguf(tmp_path / "m.gguf", make_model(name), arch, kind=Kind.Q8_0)), 2)


def test_quantized_weights_of_a_file_are_cut_at_groups(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("llama_31_tied"), "llama", kind=Kind.Q4_1)
    config = load_model_config(path)
    with pytest.raises(ValueError, match=r"rows of layers\.0\.down_proj\.weight have 48 on each of 2 ranks"):
        quantized_forms(config, "int4", Shard(0, 2))
    checkpoint = GGUFCheckpoint(config)
    for name, region in (
        ("mlp.down_proj", (slice(0, 64), slice(32, 64))),
        ("self_attn.q_proj", (slice(32, 64), slice(0, 64))),
    ):
        tensor = f"model.layers.0.{name}.weight"
        whole, part = checkpoint.quantized(tensor, "int4"), checkpoint.quantized(tensor, "int4", region)
        assert whole is not None and part is not None
        assert torch.equal(part.dequantize(), whole.dequantize()[region])


@pytest.mark.parametrize(
    ("changes", "shard", "message"),
    [
        ({}, Shard(0, 4), "the number of ranks must divide num_kv_heads, but 2 is no multiple of 4"),
        ({"num_heads": 6}, Shard(0, 4), "must divide num_heads, but 6 is no multiple of 4"),
        ({"intermediate_size": 47}, Shard(1, 2), "must divide intermediate_size, but 47 is no multiple of 2"),
        ({"experts": EXPERTS}, Shard(1, 2), "must divide intermediate_size, but 15 is no multiple of 2"),
        ({"qk_norm": "rows"}, Shard(0, 2), "2 ranks cannot divide .*its norms of queries and keys need all heads"),
        ({}, Shard(2, 2), r"rank must be in \[0, 2\) with 2 ranks, got 2"),
    ],
)
def test_a_model_that_the_ranks_cannot_divide(changes: dict[str, int], shard: Shard, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_parameters(dataclasses.replace(TOY, **changes), torch.float32, CPU, shard=shard)


def test_every_matrix_of_a_layer_is_split() -> None:
    config = dataclasses.replace(TOY, tie_word_embeddings=False, o_bias=True, qkv_bias=True, mlp_bias=True)
    splits = {parameter.name.removeprefix("layers.1."): parameter.split for parameter in decoder_parameters(config)}
    assert {name for name, split in splits.items() if split is Split.ROWS} >= {"o_proj.weight", "down_proj.weight"}
    columns = {f"{name}.{kind}" for name in ("qkv_proj", "gate_up_proj") for kind in ("weight", "bias")}
    assert {name for name, split in splits.items() if split is Split.COLUMNS} >= {*columns, "lm_head.weight"}
    assert {name for name, split in splits.items() if split is Split.FIRST_RANK} >= {"o_proj.bias", "down_proj.bias"}
    sizes = {p.name: Shard(1, 2).shape(p) for p in decoder_parameters(dataclasses.replace(config, vocab_size=100))}
    assert sizes["layers.0.qkv_proj.weight"] == (32, 32) and sizes["layers.0.o_proj.weight"] == (32, 16)


def test_a_rank_reads_only_its_part(stored: Callable[[str], ModelConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    config = stored("llama_31_tied")
    read: dict[str, int] = {}
    tensor = loader.SafetensorsCheckpoint.tensor

    def counted(checkpoint, name, region=None):
        found = tensor(checkpoint, name, region)
        read[name] = found.numel()
        return found

    monkeypatch.setattr(loader.SafetensorsCheckpoint, "tensor", counted)
    totals = []
    for shard in (WHOLE, Shard(0, 2), Shard(1, 2)):
        parameters = load_parameters(config, torch.float32, CPU, shard=shard)
        for parameter in decoder_parameters(config):
            assert parameters[parameter.name].shape == shard.shape(parameter)
        totals.append({name: count for name, count in read.items() if "proj" in name})
    assert all(2 * totals[1][name] == 2 * totals[2][name] == count for name, count in totals[0].items())

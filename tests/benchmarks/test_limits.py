from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tercet.benchmarks.limits import Ceilings, ModelCost, causal_pairs, decode_step_s, prefill_s, workload_s
from tercet.benchmarks.presets import load_shape
from tercet.mem_cache.token_to_kv_pool import TokenToKVPool
from tercet.srt.model_files.experts_config import ExpertsConfig
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.short_convolutions import ShortConvolutions

H200 = Ceilings(bytes_per_s=4.3e12, flops_per_s=790e12)
TOY = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=8,
    intermediate_size=12,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    vocab_size=50,
    context_len=100,
)


def cost_of(config: ModelConfig, kv_dtype_bytes: int = 2) -> ModelCost:
    """Of weights in bfloat16."""
    kv_dtype = {1: torch.float8_e4m3fn, 2: torch.bfloat16}[kv_dtype_bytes]
    kv_bytes = TokenToKVPool.bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, kv_dtype)
    return ModelCost.of(config, 2, kv_bytes_per_token=kv_bytes, matrix_bytes=2, forms={})


def test_a_toy_model_counted_by_hand() -> None:
    q, kv = 4 * 6, 2 * 6
    in_a_layer = 8 * (q + 2 * kv) + q * 8 + 8 * 2 * 12 + 12 * 8
    cost = cost_of(TOY)
    assert cost.layer_flops_per_token == 2 * 3 * in_a_layer
    assert cost.head_flops_per_token == 2 * 50 * 8
    assert cost.weight_bytes == 2 * (3 * (in_a_layer + 2 * 8) + 8 + 50 * 8)  # norms, and the head but no embedding
    assert cost.kv_bytes_per_token == 3 * 2 * kv * 2
    assert cost_of(TOY, kv_dtype_bytes=1).kv_bytes_per_token == 3 * 2 * kv
    assert cost.attention_flops_per_pair == 3 * 4 * q  # a multiplication and an addition for each of q k and p v


def test_pairs_are_what_a_causal_mask_shows() -> None:
    for end in range(6):
        for start in range(end + 1):
            assert causal_pairs(end, start) == sum(position + 1 for position in range(start, end))


@pytest.mark.parametrize(("model", "tokens_per_s"), [("llama-3.2-1b", 1740), ("llama-3.1-8b", 286)])
def test_single_stream_decode_of_the_published_shapes(model: str, tokens_per_s: float) -> None:
    seconds = decode_step_s(cost_of(load_shape(model)), [1], H200)
    assert 1 / seconds == pytest.approx(tokens_per_s, rel=0.005)


def test_prefill_of_the_published_shape() -> None:
    cost = cost_of(load_shape("llama-3.1-8b"))
    assert 4096 / prefill_s(cost, [4096], H200) == pytest.approx(52_600, rel=0.005)
    assert prefill_s(cost, [1], H200) == cost.weight_bytes / H200.bytes_per_s


def test_a_step_reads_only_chosen_experts() -> None:
    experts = ExpertsConfig(
        num_experts=4, num_experts_per_token=1, intermediate_size=10, normalized=True, dense_layers=(1,)
    )
    config = replace(TOY, architecture="Qwen3MoeForCausalLM", experts=experts)
    cost = cost_of(config)
    expert, router, dense = 3 * 8 * 10, 4 * 8, 3 * 8 * 12
    assert cost.expert_bytes == 2 * 2 * 4 * expert
    assert cost.weight_bytes == cost_of(TOY).weight_bytes + 2 * 2 * (router - dense)
    assert cost.read_bytes(1) == cost.weight_bytes + 2 * 2 * expert
    assert cost.read_bytes(2) == cost.weight_bytes + 2 * 2 * 4 * expert * 7 // 16
    assert cost.read_bytes(1000) == cost.weight_bytes + cost.expert_bytes
    flops = cost_of(TOY).layer_flops_per_token + 2 * 2 * (expert + router - dense)
    assert cost.layer_flops_per_token == flops
    biased = cost_of(replace(config, experts=replace(experts, has_biases=True)))
    assert biased.layer_flops_per_token == flops
    assert biased.expert_bytes == cost.expert_bytes + 2 * 2 * 4 * (2 * 10 + 8)
    assert cost.decode_bytes([5, 6]) == cost.read_bytes(2) + cost.kv_bytes_per_token * 11
    prompts, outputs = [5, 9], [3, 2]
    steps = [decode_step_s(cost, lens, H200) for lens in ([6, 10], [7])]
    assert workload_s(cost, prompts, outputs, H200) == pytest.approx(prefill_s(cost, prompts, H200) + sum(steps))


def test_a_convolution_has_weights_and_no_pairs() -> None:
    config = replace(TOY, architecture="Lfm2ForCausalLM", convolutions=ShortConvolutions((0, 2), 8, width=3))
    of_attention, of_convolution = 8 * (24 + 2 * 12) + 24 * 8, 8 * 3 * 8 + 8 * 8 + 8 * 3
    cost, attention = cost_of(config), cost_of(TOY)
    assert cost.attention_flops_per_pair == attention.attention_flops_per_pair / 3
    assert attention.layer_flops_per_token - cost.layer_flops_per_token == 2 * 2 * (of_attention - of_convolution)
    assert attention.weight_bytes - cost.weight_bytes == 2 * 2 * (of_attention - of_convolution)


def test_a_workload_is_its_prefill_and_its_steps() -> None:
    cost = cost_of(TOY)
    prompts, outputs = [5, 9, 2], [4, 1, 3]
    expected = prefill_s(cost, prompts, H200)
    for step in range(1, max(outputs)):
        lens = [prompt + step for prompt, output in zip(prompts, outputs, strict=True) if step < output]
        expected += decode_step_s(cost, lens, H200)
    assert workload_s(cost, prompts, outputs, H200) == pytest.approx(expected)


def test_the_long_batch_of_the_table() -> None:
    cost = cost_of(load_shape("llama-3.1-8b"))
    assert workload_s(cost, [1] * 32, [8192] * 32, H200) == pytest.approx(61.3, rel=0.005)

"""The attention backend of layers with several kinds of heads. test_models_of_gemma4.py compares what it computes."""

from __future__ import annotations

import torch

from tercet.mem_cache.joined_kv_pool import JoinedKVPool
from tercet.mem_cache.token_to_kv_pool import TokenToKVPool
from tercet.model_executor.attention.base import AttentionSpec
from tercet.model_executor.attention.joined_backend import JoinedAttentionBackend
from tercet.model_executor.attention.registry import create_attention_backend
from tercet.model_executor.attention.torch_backend import TorchAttentionBackend
from tercet.srt.model_files.rope_config import RopeConfig

HEADS = [(2, 8), (1, 16)]
PLACES = [(0, 0), (1, 0), (0, 1)]
WINDOWS = [5, None, 7]


def make_pool() -> JoinedKVPool:
    pools = [TokenToKVPool(8, 1, layers, *HEADS[pool], torch.float32, "cpu") for pool, layers in enumerate((2, 1))]
    return JoinedKVPool(pools, PLACES)


def make_specs() -> list[AttentionSpec]:
    return [
        AttentionSpec(
            num_heads=4,
            num_kv_heads=HEADS[pool][0],
            head_dim=HEADS[pool][1],
            scale=1.0 + layer,
            rope=RopeConfig(),
            window=WINDOWS[layer],
        )
        for layer, (pool, _) in enumerate(PLACES)
    ]


def test_each_layer_has_the_backend_of_its_pool() -> None:
    pool = make_pool()
    joined = create_attention_backend("torch", make_specs(), pool)
    assert joined.name == "torch" and joined.kv_pool is pool
    for layer, (of_pool, number) in enumerate(PLACES):
        backend, found = joined.of_layer(layer)
        assert found == number and backend.kv_pool is pool.pools[of_pool]
        assert (backend.num_heads, backend.num_kv_heads, backend.head_dim) == (4, *HEADS[of_pool])
        assert backend.sliding_windows[found] == WINDOWS[layer] and backend.scales[found] == 1.0 + layer


def test_other_backends_compute_all_of_their_layers() -> None:
    pool = make_pool().pools[0]
    backend = create_attention_backend("torch", make_specs()[::2], pool)
    assert backend.of_layer(1) == (backend, 1)


class SizedBackend(TorchAttentionBackend):
    """A backend with fixed sizes of partial results."""

    sizes = 0, 0

    def max_part_bytes(self, context_len: int) -> int:
        return self.sizes[0]

    def decode_part_bytes(self, num_rows: int, context_len: int, pool_tokens: int) -> int:
        return self.sizes[1]


def test_partial_results_of_one_layer_exist_at_once() -> None:
    pool, specs = make_pool(), make_specs()
    backends = [SizedBackend(specs[::2], pool.pools[0]), SizedBackend(specs[1:2], pool.pools[1])]
    backends[0].sizes, backends[1].sizes = (3, 8), (5, 2)
    joined = JoinedAttentionBackend(backends, pool)
    assert joined.max_part_bytes(9) == 5 and joined.decode_part_bytes(1, 9, 8) == 8

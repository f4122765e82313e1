from __future__ import annotations

from dataclasses import replace

import pytest

from tercet.srt.model_files.delta_net_config import DeltaNetConfig
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.recurrence_limits import with_model_limits
from tercet.srt.server_args import ServerArgs

CONFIG = ModelConfig(
    architecture="Qwen3_5ForCausalLM",
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=100,
    context_len=128,
)
RECURRENT = replace(CONFIG, delta_net=DeltaNetConfig((0,), 2, 4, 16, 16, 4))


def test_a_model_without_states_keeps_the_settings() -> None:
    args = ServerArgs(model_path="A", enable_hierarchical_cache=True, hicache_size=1)
    assert with_model_limits(args, CONFIG) is args


def test_requests_with_states_share_no_prefixes() -> None:
    args = with_model_limits(ServerArgs(model_path="A"), RECURRENT)
    assert args.disable_radix_cache and not args.honours_retention
    assert with_model_limits(args, RECURRENT) is args


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--enable-hierarchical-cache", {"enable_hierarchical_cache": True, "hicache_size": 1}),
        ("--radix-eviction-policy", {"radix_eviction_policy": "lfu"}),
        ("--tool-call-retention-s", {"tool_call_retention_s": 3.0}),
        ("--kv-events-config", {"kv_events_config": '{"publisher": "zmq"}'}),
    ],
)
def test_what_needs_shared_prefixes_is_refused(flag: str, settings: dict[str, object]) -> None:
    args = ServerArgs.from_dict({"model_path": "A", **settings})
    with pytest.raises(ValueError, match=f"recurrent layers, so its requests share no prefixes.*{flag}"):
        with_model_limits(args, RECURRENT)

from __future__ import annotations

from dataclasses import replace

import pytest

from tercet.srt.model_files.delta_net_config import DeltaNetConfig
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.recurrence_limits import check_recurrence
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


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--enable-hierarchical-cache", {"enable_hierarchical_cache": True, "hicache_size": 1}),
        ("--kv-events-config", {"kv_events_config": '{"publisher": "zmq"}'}),
        ("--speculative-algorithm", {"speculative_algorithm": "NGRAM"}),
        ("--fuse-small-steps", {"fuse_small_steps": True}),
    ],
)
def test_what_recurrent_layers_do_not_have_is_refused(flag: str, settings: dict[str, object]) -> None:
    args = ServerArgs.from_dict({"model_path": "A", **settings})
    check_recurrence(args, CONFIG)
    with pytest.raises(ValueError, match=f"{flag} is not supported for a model with recurrent layers: "):
        check_recurrence(args, RECURRENT)


def test_saved_states_are_only_for_recurrent_layers() -> None:
    args = ServerArgs(model_path="A", max_saved_states=3)
    check_recurrence(args, RECURRENT)
    with pytest.raises(ValueError, match="--max-saved-states is for models with recurrent layers"):
        check_recurrence(args, CONFIG)


def test_saved_states_need_a_prefix_cache() -> None:
    with pytest.raises(ValueError, match="--max-saved-states has no effect with --disable-radix-cache"):
        ServerArgs(model_path="A", max_saved_states=3, disable_radix_cache=True)

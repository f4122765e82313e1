"""Hidden states of requests on the Triton backend are those of the torch backend."""

from __future__ import annotations

import dataclasses

import numpy as np
from runners import make_runner
from scheduler_rig import Rig

from tercet.srt.model_files.model_config import ModelConfig

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=32,
    intermediate_size=40,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    vocab_size=67,
    context_len=64,
    tie_word_embeddings=True,
    load_format="dummy",
)


def run(backend: str) -> dict[str, tuple[list[int], np.ndarray]]:
    """A prompt in chunks, one beside it, and decode steps of both together with a request that wants no states."""
    runner = make_runner(
        dataclasses.replace(CONFIG),
        dtype="float32",
        attention_backend=backend,
        max_running_requests=4,
        max_total_tokens=160,
        max_prefill_tokens=4,
    )
    rig = Rig(
        make_runner=lambda: runner,
        vocab_size=CONFIG.vocab_size,
        pool_size=160,
        context_len=64,
        max_running=4,
        max_prefill_tokens=4,
        chunked_prefill_size=4,
    )
    rig.add("long", list(range(6)), hidden=True, temperature=0.0, max_new_tokens=2)
    rig.add("short", [5], hidden=True, temperature=0.0, max_new_tokens=2)
    rig.add("plain", [9], temperature=0.0, max_new_tokens=2)
    rig.run()
    assert not rig.heard["plain"].hidden
    return {
        name: (rig.heard[name].ids, np.frombuffer(rig.heard[name].hidden, np.float32).reshape(-1, 32))
        for name in ("long", "short")
    }


def test_states_equal_the_torch_backends(monkeypatch) -> None:
    monkeypatch.setattr("tercet.model_executor.weights.loader._DUMMY_STD", 0.3)
    expected, found = run("torch"), run("triton")
    for name, length in (("long", 7), ("short", 2)):
        assert found[name][0] == expected[name][0] and len(found[name][1]) == length
        np.testing.assert_allclose(found[name][1], expected[name][1], atol=1e-4)

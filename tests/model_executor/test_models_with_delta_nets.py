"""Models with Gated DeltaNets: the logits of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_delta_net_configs import DELTA_NET_CONFIGS
from transformers_parity import assert_computes_as_transformers


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", DELTA_NET_CONFIGS)
def test_logits_and_greedy_tokens_equal_transformers(name: str, backend: str, tmp_path: Path) -> None:
    assert_computes_as_transformers(name, backend, tmp_path)

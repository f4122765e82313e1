from __future__ import annotations

import pytest

from tercet.srt.errors import InvalidRequest
from tercet.srt.sampling_params import SamplingParams


@pytest.mark.parametrize("key", ["", "-1", "+5", " 5", "1_0", "\u0665", "5.0", str(2**31), "9" * 20, "9" * 5000])
def test_a_key_of_logit_bias_that_is_no_token_id_is_named(key: str) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias must be token ids as keys") as refused:
        SamplingParams(logit_bias={key: 1.0})
    assert refused.value.param == "logit_bias"


@pytest.mark.parametrize("key", ["05", "00"])
def test_a_token_has_only_one_key_in_logit_bias(key: str) -> None:
    """Two biases for one token would leave it open which one counts."""
    with pytest.raises(InvalidRequest, match="logit_bias must be token ids as keys"):
        SamplingParams(logit_bias={"5": 100.0, key: -100.0})


@pytest.mark.parametrize("key", ["0", "5", str(2**31 - 1)])
def test_token_ids_are_keys_of_logit_bias(key: str) -> None:
    assert SamplingParams(logit_bias={key: 1.0}).logit_bias == {key: 1.0}

from __future__ import annotations

from typing import Any

import pytest

from tercet.srt.errors import InvalidRequest
from tercet.srt.sampling_params import SamplingParams


@pytest.mark.parametrize("key", ["", "-1", "+5", " 5", "1_0", "\u0665", "5.0", str(2**31), "9" * 20, "9" * 5000])
def test_a_key_of_logit_bias_that_is_no_token_id_is_named(key: str) -> None:
    with pytest.raises(InvalidRequest, match="the keys of logit_bias must be token ids") as refused:
        SamplingParams(logit_bias={key: 1.0})
    assert refused.value.param == "logit_bias"


@pytest.mark.parametrize("key", ["05", "00"])
def test_a_token_has_only_one_key_in_logit_bias(key: str) -> None:
    """Two biases for one token would leave it open which one counts."""
    with pytest.raises(InvalidRequest, match="the keys of logit_bias must be token ids"):
        SamplingParams(logit_bias={"5": 100.0, key: -100.0})


@pytest.mark.parametrize("key", ["0", "5", str(2**31 - 1)])
def test_token_ids_are_keys_of_logit_bias(key: str) -> None:
    assert SamplingParams(logit_bias={key: 1.0}).logit_bias == {key: 1.0}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", "0.5", "temperature: Expected float, got str"),
        ("temperature", 10**400, "temperature: Number out of range"),
        ("max_new_tokens", "5", "max_new_tokens: Expected int | null, got str"),
        ("stop", 5, "stop: Expected str | array | null, got int"),
        ("stop", [5], "stop[0]: Expected str, got int"),
        ("stop_token_ids", 5, "stop_token_ids: Expected array | null, got int"),
        ("logit_bias", [5], "logit_bias: Expected object | null, got array"),
        ("logit_bias", {5: 1.0}, "the keys of logit_bias must be text, such as '5', got 5"),
        ("logit_bias", {"5": "1"}, "logit_bias[...]: Expected float, got str"),
        ("json_schema", {"type": "object"}, "json_schema: Expected str | null, got object"),
    ],
)
def test_a_value_of_another_type_is_named(field: str, value: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{field: value})
    assert refused.value.message == says


@pytest.mark.parametrize("token", [-1, 2**31])
def test_a_stop_token_out_of_range_is_named(token: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"stop_token_ids must be token ids in \[0, 2\*\*31\), got {token}"):
        SamplingParams(stop_token_ids=[token])

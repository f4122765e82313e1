"""Who is the tenant of a request, and what the server counts and shows of it."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from fake_http import Site
from prometheus_client.parser import text_string_to_metric_families

from tercet.managers.request_metrics import MAX_TENANTS
from tercet.srt.entrypoints.tenants import MAX_NAME_CHARS

BODY: dict[str, Any] = {"prompt": "abc", "max_tokens": 4}
KEYS = ["sesame", "pomegranate"]


def tenant(site: Site, user: str | None = None, *, path: str = "/v1/completions", **headers: str) -> str:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1}} if path == "/generate" else {**BODY, "user": user}
    sent = {name.replace("_", "-"): value.encode() for name, value in headers.items()}
    assert site.post(path, body, headers=sent).status_code == 200
    return site.scheduler.received[-1].options.tenant


@pytest.mark.parametrize("settings", [{}, {"api_key": KEYS[0]}], ids=["no key", "one key"])
def test_without_several_keys_the_header_goes_before_the_field(settings: dict[str, Any]) -> None:
    site = Site(**settings)
    key = {"authorization": f"Bearer {KEYS[0]}"}
    assert tenant(site, **key) == ""
    assert tenant(site, "ann", **key) == "ann"
    assert tenant(site, "ann", x_tenant=" bob ", **key) == "bob"
    assert tenant(site, "ann", x_tenant=" ", **key) == "ann"
    assert tenant(site, path="/generate", x_tenant="bob", **key) == "bob"
    site.close()


def test_with_several_keys_no_client_can_pose_as_another() -> None:
    site = Site(api_key=KEYS)
    for number, key in enumerate(KEYS, 1):
        for posing in ({}, {"x_tenant": "key-1"}, {"x_tenant": "key-2"}):
            for user in (None, "key-1", "key-2", "ann"):
                assert tenant(site, user, authorization=f"Bearer {key}", **posing) == f"key-{number}"
    site.close()


@pytest.mark.parametrize("name", ["x" * (MAX_NAME_CHARS + 1), "a\nb", "\u2028"])
def test_a_name_that_no_label_could_have_is_a_digest(name: str) -> None:
    site = Site()
    assert tenant(site, name) == hashlib.sha256(name.encode()).hexdigest()[:16]
    assert tenant(site, "x" * MAX_NAME_CHARS) == "x" * MAX_NAME_CHARS
    site.close()


def test_all_prompts_of_a_request_have_its_tenant() -> None:
    site = Site()
    site.good("/v1/completions", {**BODY, "prompt": ["a", "b"], "n": 2, "user": "ann"})
    assert [one.options.tenant for one in site.scheduler.received] == ["ann"] * 4
    site.close()


def served(site: Site, headers: dict[str, str] | None = None) -> dict[str, dict[str, float]]:
    """The tokens of each tenant, by the kind of tokens."""
    text = site.get("/metrics", headers=headers).text
    assert not any(key in text for key in KEYS)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return {
        kind: {
            one.labels["tenant"]: one.value
            for one in families[f"tercet:tenant_{kind}_tokens"].samples
            if one.name.endswith("_total")
        }
        for kind in ("prefill", "generation")
    }


def test_the_metrics_have_the_tokens_of_each_tenant() -> None:
    site = Site(enable_metrics=True, api_key=KEYS)
    keys = [{"authorization": f"Bearer {key}"} for key in KEYS]
    for key in (keys[0], keys[1], keys[1]):
        assert site.post("/v1/completions", BODY, headers=key).status_code == 200
    # The fake engine has all of a prompt but its last token in the cache.
    assert served(site, keys[0]) == {"prefill": {"key-1": 1, "key-2": 2}, "generation": {"key-1": 4, "key-2": 8}}
    site.close()


def test_the_number_of_labels_is_bounded() -> None:
    site = Site(enable_metrics=True)
    for number in range(MAX_TENANTS + 5):
        tenant(site, f"t{number}")
    tokens = served(site)["generation"]
    assert len(tokens) == MAX_TENANTS + 1 and tokens["other"] == 5 * 4
    assert sum(tokens.values()) == 4 * (MAX_TENANTS + 5)
    site.close()

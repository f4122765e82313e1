"""Who is the tenant of a request, and what the server counts and shows of it."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from fake_http import Site
from prometheus_client.parser import text_string_to_metric_families

from tercet.managers.request_metrics import MAX_TENANTS
from tercet.srt.entrypoints.tenants import tenant_of
from tercet.srt.errors import WaitingTimeout
from tercet.srt.io_struct import AbortFinish
from tercet.srt.tenant_names import MAX_NAME_CHARS, OTHER_TENANTS, tenant_name
from tercet.srt.tenant_weights import parse_weights

BODY: dict[str, Any] = {"prompt": "abc", "max_tokens": 4}
NATIVE: dict[str, Any] = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
PATHS = ("/v1/completions", "/generate")
KEYS = ["sesame", "pomegranate"]


def tenant(site: Site, user: str | None = None, *, path: str = "/v1/completions", **headers: str) -> str:
    """`user`: what the field of the body says."""
    body = {**NATIVE, "tenant": user} if path == "/generate" else {**BODY, "user": user}
    sent = {name.replace("_", "-"): value.encode() for name, value in headers.items()}
    assert site.post(path, body, headers=sent).status_code == 200
    return site.scheduler.received[-1].options.tenant


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("settings", [{}, {"api_key": KEYS[0]}], ids=["no key", "one key"])
def test_without_several_keys_the_header_goes_before_the_field(settings: dict[str, Any], path: str) -> None:
    site = Site(**settings)
    given = {"authorization": f"Bearer {KEYS[0]}", "path": path}
    assert tenant(site, **given) == ""
    assert tenant(site, "ann", **given) == "ann"
    assert tenant(site, "ann", x_tenant=" bob ", **given) == "bob"
    assert tenant(site, "ann", x_tenant=" ", **given) == "ann"
    assert tenant(site, x_tenant="bob", **given) == "bob"
    site.close()


@pytest.mark.parametrize("path", PATHS)
def test_with_several_keys_no_client_can_pose_as_another(path: str) -> None:
    site = Site(api_key=KEYS)
    for number, key in enumerate(KEYS, 1):
        given = {"authorization": f"Bearer {key}", "path": path}
        for posing in ({}, {"x_tenant": "key-1"}, {"x_tenant": "key-2"}):
            for user in (None, "key-1", "key-2", "ann"):
                assert tenant(site, user, **given, **posing) == f"key-{number}"
    site.close()


def test_each_prompt_of_a_list_may_have_a_tenant() -> None:
    site = Site(api_key=KEYS[0])
    body = {**NATIVE, "text": ["a", "b", "c"], "tenant": ["ann", "", "bob"]}
    key = {"authorization": f"Bearer {KEYS[0]}"}
    for headers, expected in ((key, ["ann", "", "bob"]), ({**key, "x-tenant": "eve"}, ["eve"] * 3)):
        site.scheduler.received.clear()
        assert site.post("/generate", body, headers=headers).status_code == 200
        assert [one.options.tenant for one in site.scheduler.received] == expected
    site.close()


@pytest.mark.parametrize(("header", "name"), [("é".encode(), "é"), ("東京".encode(), "東京"), (b"caf\xe9", "café")])
def test_a_name_is_the_same_in_the_header_and_in_a_body(header: bytes, name: str) -> None:
    assert tenant_of({"type": "http", "headers": [(b"x-tenant", header)]}) == name


@pytest.mark.parametrize("name", ["x" * (MAX_NAME_CHARS + 1), "a\nb", "\u2028", OTHER_TENANTS])
def test_a_name_that_no_label_could_have_is_a_digest(name: str) -> None:
    site = Site()
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    assert tenant(site, name) == tenant(site, name, path="/generate") == digest
    assert tenant(site, "x" * MAX_NAME_CHARS) == "x" * MAX_NAME_CHARS
    site.close()


def test_a_weight_belongs_to_the_digest_of_a_long_name() -> None:
    name = "x" * (MAX_NAME_CHARS + 1)
    assert parse_weights(f"{name}=2, ann=3") == {tenant_name(name): 2.0, "ann": 3.0}


def test_all_prompts_of_a_request_have_its_tenant() -> None:
    site = Site()
    site.good("/v1/completions", {**BODY, "prompt": ["a", "b"], "n": 2, "user": "ann"})
    assert [one.options.tenant for one in site.scheduler.received] == ["ann"] * 4
    site.close()


def served(site: Site, headers: dict[str, str] | None = None) -> dict[str, dict[str, float]]:
    """The counts of each tenant, by the kind of count. Of a histogram, the number of values."""
    text = site.get("/metrics", headers=headers).text
    assert not any(key in text for key in KEYS)
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        kind = family.name.removeprefix("tercet:tenant_")
        for one in family.samples:
            if kind != family.name and one.name.endswith(("_total", "_count")):
                found.setdefault(kind, {})[one.labels["tenant"]] = one.value
    return found


def test_the_metrics_have_what_each_tenant_got() -> None:
    site = Site(enable_metrics=True, api_key=KEYS)
    keys = [{"authorization": f"Bearer {key}"} for key in KEYS]
    for key in (keys[0], keys[1], keys[1]):
        assert site.post("/v1/completions", BODY, headers=key).status_code == 200
    site.scheduler.fail = (0, AbortFinish.of(WaitingTimeout("it has waited for 5 s")))
    assert site.post("/v1/completions", BODY, headers=keys[1]).status_code == 503
    # A prompt that is too long never reaches the engine.
    assert site.post("/v1/completions", {**BODY, "prompt": "a" * 300}, headers=keys[0]).status_code == 400
    # The fake engine has all of a prompt but its last token in the cache.
    assert served(site, keys[0]) == {
        "num_requests": {"key-1": 2, "key-2": 3},
        "num_aborted_requests": {"key-1": 1, "key-2": 1},
        "prefill_tokens": {"key-1": 1, "key-2": 3},
        "generation_tokens": {"key-1": 4, "key-2": 8},
        "time_to_first_token_seconds": {"key-1": 1, "key-2": 2},
        "queue_time_seconds": {"key-1": 1, "key-2": 3},
    }
    site.close()


def test_the_number_of_labels_is_bounded() -> None:
    site = Site(enable_metrics=True)
    named = tenant(site, OTHER_TENANTS)
    for number in range(1, MAX_TENANTS + 5):
        tenant(site, f"t{number}")
    found = served(site)
    assert len(found) == 6
    for counts in found.values():
        assert len(counts) == MAX_TENANTS + 1
    tokens = found["generation_tokens"]
    assert tokens[named] == 4, "it is no part of the others"
    assert tokens["other"] == 5 * 4 and sum(tokens.values()) == 4 * (MAX_TENANTS + 5)
    assert found["time_to_first_token_seconds"]["other"] == found["queue_time_seconds"]["other"] == 5
    site.close()

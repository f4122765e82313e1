"""LoRA adapters in the API: what requests name; loads and unloads as clients of SGLang and vLLM send them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_adapters import PIRATE, WITH_PIRATE, FakeLoads
from fake_http import Site

from tercet.srt.adapters import AdapterRef, LoadAdapterReq, UnloadAdapterReq
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams

LOAD, UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"
HI = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {**HI, "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [1]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
}
"""A request of each endpoint that runs the model."""


class LoraSite(Site):
    """With the adapter `pirate`, and a folder of others."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(**{"lora_dir": str(folder), **WITH_PIRATE, **settings})
        self.folder = folder
        self.loads = FakeLoads(self.scheduler)

    def adapter_of(self, path: str, **fields: Any) -> AdapterRef | None:
        """The adapter of a request of this endpoint."""
        self.scheduler.received.clear()
        answer = self.good(path, {**BODIES[path], **fields})
        found = {req.options.adapter for req in self.scheduler.received}
        assert len(found) == 1
        if path != "/generate":
            assert answer["model"] == ("tiny" if found == {None} else "pirate")
        return found.pop()


@pytest.fixture
def lora(tmp_path: Path) -> Iterator[LoraSite]:
    site = LoraSite(tmp_path)
    yield site
    site.close()


@pytest.mark.parametrize("path", BODIES)
def test_each_endpoint_takes_an_adapter_in_each_form(lora: LoraSite, path: str) -> None:
    assert lora.adapter_of(path) is None
    assert lora.adapter_of(path, model="tiny", lora_path="") is None
    for fields in (
        {"lora_path": "pirate"},
        {"model": "pirate"},
        {"model": "tiny:pirate"},
        {"model": "default:pirate"},
        {"model": "tiny", "lora_path": "pirate"},
        {"model": "pirate", "lora_path": "pirate"},
    ):
        assert lora.adapter_of(path, **fields) == PIRATE.ref


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_adapter_is_refused_with_a_list_of_the_others(lora: LoraSite, path: str) -> None:
    error = lora.refused(path, {**BODIES[path], "lora_path": "ninja"})
    assert error["param"] == "lora_path"
    assert error["message"] == "the LoRA adapter 'ninja' is not loaded; the loaded adapters are 'pirate'"
    for model in ("ninja", "tiny:ninja", "other:pirate", "tiny:"):
        error = lora.refused(path, {**BODIES[path], "model": model}, 404)
        assert error["param"] == "model" and error["code"] == "model_not_found"
        assert error["message"].endswith("the served model is 'tiny'; the loaded adapters are 'pirate'")
    assert not lora.scheduler.received


def test_an_adapter_may_have_the_name_that_a_router_writes_for_any_model(lora: LoraSite) -> None:
    assert lora.adapter_of("/generate", model="unknown") is None
    lora.good(LOAD, {"lora_name": "unknown", "lora_path": "n"})
    assert lora.adapter_of("/generate", model="unknown") == AdapterRef("unknown", "f2")


def test_two_names_for_an_adapter_must_agree(lora: LoraSite) -> None:
    lora.good(LOAD, {"lora_name": "ninja", "lora_path": "n"})
    body = {**BODIES["/v1/completions"], "model": "tiny:ninja", "lora_path": "pirate"}
    error = lora.refused("/v1/completions", body)
    assert error["param"] == "lora_path" and "must name the same adapter" in error["message"]


def test_a_list_of_prompts_has_a_list_of_adapters(lora: LoraSite) -> None:
    body = {"text": ["a", "b", "c"], "sampling_params": {"max_new_tokens": 1}}
    lora.good("/generate", {**body, "lora_path": ["pirate", None, ""]})
    assert [req.options.adapter for req in lora.scheduler.received] == [PIRATE.ref, None, None]
    lora.scheduler.received.clear()
    lora.good("/generate", {**body, "lora_path": "pirate"})
    assert [req.options.adapter for req in lora.scheduler.received] == [PIRATE.ref] * 3
    assert lora.refused("/generate", {**body, "lora_path": ["pirate"]})["param"] == "lora_path"
    assert lora.refused("/generate", {**body, "lora_path": [None, None, "ninja"]})["param"] == "lora_path"


def test_a_server_without_adapters_names_the_flag(site: Site) -> None:
    for path, body in BODIES.items():
        error = site.refused(path, {**body, "lora_path": "pirate"})
        assert error["param"] == "lora_path" and "--enable-lora" in error["message"]
        error = site.refused(path, {**body, "model": "pirate"}, 404)
        assert error["message"] == "the model 'pirate' does not exist; the served model is 'tiny'"
    off = "loading adapters is off; start the server with"
    load = {"lora_name": "a", "lora_path": "a"}
    assert site.refused(LOAD, load, 403)["message"] == f"{off} --enable-lora and --lora-dir"
    with_adapters = Site(**WITH_PIRATE)
    assert with_adapters.refused(LOAD, load, 403)["message"] == f"{off} --lora-dir"
    with_adapters.close()
    assert "--enable-lora" in site.refused(UNLOAD, {"lora_name": "a"})["message"]


def test_adapters_are_in_the_list_of_models(lora: LoraSite) -> None:
    base, card = lora.get("/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == ("tiny", None)
    assert card == {**base, "id": "pirate", "display_name": "pirate", "parent": "tiny", "root": "pirate-7"}
    assert lora.get("/v1/models/pirate").json() == card and lora.get("/v1/models/tiny").json() == base
    assert lora.get("/v1/models/ninja").status_code == 404
    assert lora.get("/server_info").json()["loaded_lora_adapters"] == {"pirate": PIRATE.path}


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_an_adapter_is_loaded_and_unloaded(lora: LoraSite, prefix: str) -> None:
    body = {"lora_name": "ninja", "lora_path": "n/1", "pinned": False, "load_inplace": False}
    path = str(lora.folder / "n" / "1")
    answer = lora.good(prefix + LOAD, body)
    assert answer["success"] and answer["loaded_adapters"] == {"pirate": PIRATE.path, "ninja": path}
    assert lora.loads.asked == [LoadAdapterReq(1, "ninja", path)]
    assert lora.good("/generate", {**BODIES["/generate"], "lora_path": "ninja"})
    assert lora.scheduler.received[0].options.adapter == AdapterRef("ninja", "f2")
    assert [one["id"] for one in lora.get("/v1/models").json()["data"]] == ["tiny", "pirate", "ninja"]
    answer = lora.good(prefix + UNLOAD, {"lora_name": "pirate", "lora_int_id": None})
    assert answer["success"] and answer["loaded_adapters"] == {"ninja": path}
    assert lora.loads.asked[1:] == [UnloadAdapterReq(2, "pirate")]
    assert lora.refused("/v1/completions", {"prompt": "a", "model": "pirate"}, 404)["param"] == "model"


@pytest.mark.parametrize("path", ["..", "/etc", "a/../..", "link"])
def test_a_client_loads_nothing_outside(lora: LoraSite, path: str, tmp_path_factory: Any) -> None:
    (lora.folder / "link").symlink_to(tmp_path_factory.mktemp("outside"))
    error = lora.refused(LOAD, {"lora_name": "x", "lora_path": path}, 403)
    assert "--lora-dir" in error["message"] and str(lora.folder.parent) not in error["message"]
    assert not lora.loads.asked


def test_a_link_to_a_name_that_is_not_utf_8_is_refused(lora: LoraSite) -> None:
    (lora.folder / "link").symlink_to(lora.folder / "\udcff")
    assert "UTF-8" in lora.refused(LOAD, {"lora_name": "x", "lora_path": "link"})["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "pirate", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "tiny", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "x" * 257, "lora_path": "a"}, "lora_name"),
        ({"lora_name": "a\n", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "a\0"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "a/" * 10_000}, "lora_path"),
        ({"lora_name": 5, "lora_path": "a"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "a", "load_inplace": True}, "load_inplace"),
        ({"lora_name": "x", "lora_path": "a", "other": 1}, "other"),
    ],
)
def test_bad_loads(lora: LoraSite, body: dict[str, Any], param: str) -> None:
    assert lora.refused(LOAD, body)["param"] == param
    assert not lora.loads.asked


def test_what_the_engine_refuses_is_an_error_of_the_client(lora: LoraSite) -> None:
    lora.loads.refusal = "rank 64 is above --max-lora-rank 16"
    error = lora.refused(LOAD, {"lora_name": "x", "lora_path": "a"})
    assert (error["message"], error["param"]) == (lora.loads.refusal, "lora_path")
    lora.loads.refusal, lora.loads.failure = None, "the adapter could not be loaded"
    assert lora.refused(LOAD, {"lora_name": "x", "lora_path": "a"}, 500)["message"] == lora.loads.failure
    assert [one["id"] for one in lora.get("/v1/models").json()["data"]] == ["tiny", "pirate"]


def test_a_stream_ends_before_its_adapter_is_unloaded(lora: LoraSite) -> None:
    async def work() -> None:
        manager = lora.manager
        lora.scheduler.gate = True
        options = RequestOptions(sampling=SamplingParams(max_new_tokens=4), stream=True, adapter=PIRATE.ref)
        (running,) = await manager.submit("hi", options)
        unloading = asyncio.create_task(manager.adapters.unload("pirate"))
        await asyncio.sleep(0.1)
        assert not unloading.done() and not lora.loads.asked and manager.adapters.find("pirate") is None
        lora.scheduler.gate = False
        for held in lora.scheduler.held:
            lora.scheduler._write(*held)
        await running.result()
        await unloading
        assert lora.loads.asked == [UnloadAdapterReq(1, "pirate")]

    lora.run(work())


def test_the_request_log_names_the_adapter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = LoraSite(tmp_path, log_requests=True)
    with caplog.at_level("INFO", "tercet.requests"):
        site.adapter_of("/generate", lora_path="pirate")
        site.adapter_of("/generate")
    site.close()
    received = [one.getMessage() for one in caplog.records if "Receive" in one.getMessage()]
    assert ["lora_name" in line for line in received] == [True, False] and "pirate" in received[0]


@pytest.mark.parametrize("query", ["", "?include=all", "?include=core,lora"])
def test_the_load_names_the_adapters(tmp_path: Path, query: str) -> None:
    site = LoraSite(tmp_path, max_loras=4)
    (load,) = site.get(f"/v1/loads{query}").json()["loads"]
    assert load["lora"] == {"slots_used": 1, "slots_total": 4, "utilization": 0.25, "adapters": ["pirate"]}
    assert "lora" not in site.get("/v1/loads?include=core,memory").json()["loads"][0]
    site.close()


def test_an_adapter_that_is_being_unloaded_has_its_slot(tmp_path: Path) -> None:
    """No other adapter gets the slot, so routers must not count it as free."""
    site = LoraSite(tmp_path, max_loras=1, enable_metrics=True)
    site.scheduler.gate = True

    async def begin() -> asyncio.Task[None]:
        options = RequestOptions(sampling=SamplingParams(max_new_tokens=4), adapter=PIRATE.ref)
        await site.manager.submit("hi", options)
        unloading = asyncio.create_task(site.manager.adapters.unload("pirate"))
        await site.manager.scheduler_state(1.0)
        return unloading

    unloading = site.run(begin())
    (load,) = site.get("/v1/loads").json()["loads"]
    page = site.get("/metrics").text
    assert not unloading.done()
    unloading.cancel()
    site.close()
    assert load["lora"] == {"slots_used": 1, "slots_total": 1, "utilization": 1.0, "adapters": []}
    assert 'lora_pool_slots_used{model_name="tiny"} 1.0' in page


def test_the_metrics_count_adapters(tmp_path: Path) -> None:
    site = LoraSite(tmp_path, enable_metrics=True, max_loras=4)
    site.run(site.manager.scheduler_state(1.0))
    page = site.get("/metrics").text
    site.close()
    assert 'lora_pool_slots_used{model_name="tiny"} 1.0' in page
    assert 'lora_pool_slots_total{model_name="tiny"} 4.0' in page

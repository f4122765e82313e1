from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_http import Site, error_of

from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.weight_messages import UpdateWeightsReply, UpdateWeightsReq, WeightFacts

PATH = "/update_weights_from_disk"


class WeightSite(Site):
    def __init__(self, folder: Path) -> None:
        super().__init__(update_weights_dir=str(folder))
        self.folder = folder
        self.updates: list[UpdateWeightsReq] = []
        self.refusal: str | None = None
        self.scheduler.answers = {UpdateWeightsReq: self._answer}

    def _answer(self, message: UpdateWeightsReq) -> UpdateWeightsReply:
        self.updates.append(message)
        return UpdateWeightsReply(message.call_id, 3, self.refusal, facts=WeightFacts("bfloat16", 7))


@pytest.fixture
def updatable(tmp_path: Path) -> Iterator[WeightSite]:
    site = WeightSite(tmp_path)
    yield site
    site.close()


def test_without_the_flag_no_weights_are_loaded(site: Site) -> None:
    error = site.refused(PATH, {"model_path": "/w"}, 403)
    assert error["code"] == "not_allowed" and "--update-weights-dir" in error["message"]


def test_every_field_arrives(updatable: WeightSite) -> None:
    """The fields that SGLang's clients send."""
    body = {
        "model_path": "run/7",
        "load_format": "safetensors",
        "abort_all_requests": True,
        "weight_version": "step-7",
        "is_async": False,
        "torch_empty_cache": False,
        "keep_pause": False,
        "recapture_cuda_graph": False,
        "token_step": 0,
        "flush_cache": True,
    }
    answer = updatable.good(PATH, body)
    assert answer == {
        "success": True,
        "message": "the new weights are in use",
        "num_paused_requests": 3,
        "weight_version": "step-7",
    }
    (message,) = updatable.updates
    assert message.model_path == str(updatable.folder / "run" / "7")
    assert (message.load_format, message.weight_version) == ("safetensors", "step-7")
    updatable.good(PATH, {"model_path": str(updatable.folder)})
    assert updatable.updates[-1].load_format == "auto" and updatable.updates[-1].weight_version.startswith("update-")


def test_answers_tell_the_version_and_the_served_name_stays(updatable: WeightSite) -> None:
    name = updatable.get("/v1/models").json()["data"][0]["id"]
    updatable.good(PATH, {"model_path": "a", "weight_version": "v2"})
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    assert updatable.good("/generate", body)["meta_info"]["weight_version"] == "v2"
    info = updatable.get("/model_info").json()
    assert info["weight_version"] == "v2" and info["model_path"] == str(updatable.folder / "a")
    assert info["tokenizer_path"] == "/models/tiny-1"
    info = updatable.get("/server_info").json()
    assert (info["weight_version"], info["weight_dtype"]) == ("v2", "bfloat16")
    assert info["internal_states"][0]["weight_bytes"] == 7
    assert updatable.get("/v1/models").json()["data"][0]["id"] == name


def test_the_old_path_names_the_model_no_more(tmp_path: Path) -> None:
    """The name that clients use stays. A path is accepted as a name only while its weights are in use."""
    with contextlib.closing(WeightSite(tmp_path)) as site:
        old = site.get("/model_info").json()["model_path"]
        name = site.get("/v1/models").json()["data"][0]["id"]
        assert name != old
        new = str(tmp_path / "a")
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        site.good(PATH, {"model_path": "a"})
        for model in (name, new):
            site.good("/v1/chat/completions", {**chat, "model": model})
        assert site.refused("/v1/chat/completions", {**chat, "model": old}, 404)["param"] == "model"
        assert site.get("/v1/models").json()["data"][0]["root"] == "a"


def test_an_update_over_its_drain_timeout_is_refused(updatable: WeightSite) -> None:
    updatable.scheduler.mute = True
    updatable.run(updatable.manager.submit("hi", RequestOptions(sampling=SamplingParams())))
    error = updatable.refused(PATH, {"model_path": "a", "drain_timeout": 0})
    assert error["type"] == "engine_busy" and "drain_timeout" in error["message"] and not updatable.updates


@pytest.mark.parametrize("path", ["..", "/etc", "a/../..", "link"])
def test_a_client_loads_nothing_outside(updatable: WeightSite, path: str, tmp_path_factory: Any) -> None:
    (updatable.folder / "link").symlink_to(tmp_path_factory.mktemp("outside"))
    error = updatable.refused(PATH, {"model_path": path}, 403)
    assert "--update-weights-dir" in error["message"]
    assert error["param"] == "model_path" and str(updatable.folder.parent) not in error["message"]
    assert not updatable.updates


def test_a_link_to_a_file_keeps_its_name(updatable: WeightSite) -> None:
    """In Hugging Face's cache, the other parts of a split GGUF file are beside the link."""
    blob, snapshot = updatable.folder / "blobs" / "d1", updatable.folder / "snapshots" / "main"
    for folder in (blob.parent, snapshot):
        folder.mkdir(parents=True)
    blob.write_bytes(b"")
    link = snapshot / "m-00001-of-00002.gguf"
    link.symlink_to(blob)
    for given in ("snapshots/main/m-00001-of-00002.gguf", str(link)):
        updatable.good(PATH, {"model_path": given})
        assert updatable.updates[-1].model_path == str(link)


def test_a_link_outside_to_a_file_inside_is_refused(updatable: WeightSite, tmp_path_factory: Any) -> None:
    """Its folder may have other files of the model."""
    (updatable.folder / "m.gguf").write_bytes(b"")
    link = tmp_path_factory.mktemp("outside") / "m.gguf"
    link.symlink_to(updatable.folder / "m.gguf")
    updatable.refused(PATH, {"model_path": str(link)}, 403)


@pytest.mark.parametrize("path", ["x" * 300, "x/" * 2000])
def test_a_path_that_no_file_can_have_is_no_fault_of_the_server(updatable: WeightSite, path: str) -> None:
    """The engine looks for it, and says that it does not exist."""
    updatable.good(PATH, {"model_path": path})
    assert updatable.updates[-1].model_path == str(updatable.folder / path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_path", None),
        ("model_path", 5),
        ("load_format", "dummy"),
        ("weight_version", ""),
        ("weight_version", "x" * 129),
        ("weight_version", "a\nb"),
        ("drain_timeout", -1),
        ("drain_timeout", "soon"),
        ("flush_cache", False),
        ("is_async", True),
        ("keep_pause", True),
        ("manifest", {}),
    ],
)
def test_other_values_are_refused(updatable: WeightSite, field: str, value: Any) -> None:
    assert updatable.refused(PATH, {"model_path": "a", field: value})["param"] == field
    assert not updatable.updates


@pytest.mark.parametrize("version", ["x", "x" * 128])
def test_the_shortest_and_the_longest_version(updatable: WeightSite, version: str) -> None:
    assert updatable.good(PATH, {"model_path": "a", "weight_version": version})["weight_version"] == version


def test_what_the_engine_refuses_is_a_400(updatable: WeightSite) -> None:
    updatable.refusal = "the new weights are of another model"
    error = updatable.refused(PATH, {"model_path": "a"})
    assert error["param"] == "model_path" and "another model" in error["message"]
    assert updatable.get("/model_info").json()["weight_version"] == "default"
    assert error_of(updatable.post(PATH, {}))["param"] == "model_path"

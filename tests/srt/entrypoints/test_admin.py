from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from fake_http import CONTEXT_LEN, Site, error_of

import tercet
from tercet.srt.io_struct import AbortFinish, Heartbeat

SECRET = "sesame-4711"
LOAD = {"dp_rank": 0, "num_reqs": 2, "num_waiting_reqs": 2, "num_tokens": 270, "age_s": 0.0}


@pytest.fixture
def hasty() -> Iterator[Site]:
    site = Site(app={"health_timeout_s": 0.05, "state_timeout_s": 0.05, "flush_timeout_s": 0.05})
    yield site
    site.close()


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/health_generate"])
def test_probes(site: Site, path: str) -> None:
    assert site.get(path).status_code == 200
    site.manager.draining = True
    answer = site.get(path)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert error_of(answer)["code"] == "engine_dead"
    site.manager.draining = False
    site.manager.fail("the scheduler process is gone")
    assert "the scheduler process is gone" in error_of(site.get(path))["message"]
    assert site.get(path).status_code == 503


def test_health_runs_nothing_and_health_generate_runs_one_token(site: Site) -> None:
    site.get("/health")
    assert site.scheduler.received == []
    site.get("/health_generate")
    (request,) = site.scheduler.received
    assert request.options.sampling.max_new_tokens == 1
    assert site.idle()


def test_health_sees_a_silent_scheduler(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(site.manager.heartbeats), "longest_silence_s", 301.0)
    assert site.get("/health").status_code == site.get("/ready").status_code == 503


def test_ready_refuses_while_a_request_would_wait(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = site.manager
    for obj, name, code in (
        (type(manager.recovery), "is_isolating", "engine_restarting"),
        (manager.weights, "is_holding", "engine_paused"),
        (type(manager.heartbeats), "is_late", "engine_dead"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(obj, name, True)
            answer = site.get("/ready")
            assert answer.status_code == 503 and error_of(answer)["code"] == code
            assert site.get("/health").status_code == 200
        assert site.get("/ready").json() == {"status": "ready"}


def test_health_generate_gives_up_in_time(hasty: Site) -> None:
    hasty.scheduler.mute = True
    answer = hasty.get("/health_generate")
    assert answer.status_code == 503 and "no token within 0.05 s" in answer.text
    assert hasty.idle()


@pytest.mark.parametrize(
    ("finish", "code"),
    [
        (AbortFinish("not a number", 500, "InvalidLogits"), "engine_dead"),
        (AbortFinish("the queue is full", 503, "QueueFull", retry_after_s=7), "queue_full"),
    ],
)
def test_health_generate_wants_a_token_and_says_why_there_is_none(site: Site, finish: AbortFinish, code: str) -> None:
    site.scheduler.fail = (0, finish)
    answer = site.get("/health_generate")
    assert answer.status_code == 503 and finish.message in answer.text and error_of(answer)["code"] == code
    assert answer.headers["retry-after"] == ("7" if code == "queue_full" else "1")


def test_an_abort_of_all_requests_does_not_fail_health_generate(site: Site) -> None:
    async def scenario() -> int:
        site.scheduler.mute = True
        probe = asyncio.create_task(site.client.get("/health_generate"))
        while not site.scheduler.received:
            await asyncio.sleep(0)
        site.scheduler.mute = False
        await site.client.post("/abort_request", json={"abort_all": True})
        return (await probe).status_code

    assert site.run(scenario()) == 200
    assert len(site.scheduler.received) == 2 and site.idle()


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info(site: Site, path: str) -> None:
    assert site.get(path).json() == {
        "model_path": "/models/tiny-1",
        "tokenizer_path": "/models/tiny-1",
        "served_model_name": "tiny",
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "load_format": "auto",
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_tells_no_secret(path: str) -> None:
    site = Site(api_key=SECRET)
    answer = site.get(path, headers={"authorization": f"Bearer {SECRET}"})
    info = answer.json()
    assert SECRET not in answer.text and "api_key" not in info
    assert info["model_path"] == "/models/tiny-1"
    assert (info["dtype"], info["device"], info["attention_backend"]) == ("float32", "cpu", "torch")
    assert info["weight_dtype"] == "int4, int8"
    kernels = info["cpu_kernels"]
    assert (kernels["build"], kernels["block_kib"], kernels["chunk"]) == ("avx2", 256, 1024)
    assert (kernels["bfloat16"], kernels["linears"]) == ("widened", "tercet")
    assert (kernels["weights"], kernels["source"]) == ("plain", "measured")
    assert (info["status"], info["max_total_num_tokens"], info["max_req_input_len"]) == ("ready", 1000, 255)
    (state,) = info["internal_states"]
    assert state["last_gen_throughput"] == 12.5
    assert state["memory_usage"] == {"weight": 1.0, "kvcache": 0.5, "token_capacity": 1000, "graph": 0.25}
    assert state["effective_max_running_requests_per_dp"] == 16
    bytes_of = [state[name] for name in ("weight_bytes", "kv_bytes", "graph_bytes", "avg_spec_accept_length")]
    assert bytes_of == [1 << 30, 1 << 29, 1 << 28, None]
    resolved = ("page_size", "context_length", "chunked_prefill_size", "max_prefill_tokens", "served_model_name")
    assert [info[name] for name in resolved] == [1, CONTEXT_LEN, 64, 128, "tiny"]
    counts = ("num_engine_restarts", "num_resumed_samples", "num_fatal_samples")
    assert [info[name] for name in counts] == [0, 0, 0] and info["version"] == tercet.__version__
    site.close()


def test_the_probes_tell_of_a_pause(site: Site) -> None:
    def states() -> list[Any]:
        return [site.get("/health").json()["status"], site.get("/server_info").json()["status"]]

    assert states() == ["ok", "ready"]
    site.good("/pause_generation", {"mode": "retract"})
    assert states() == ["paused", "paused"]
    for path in ("/ready", "/health_generate"):
        answer = site.get(path)
        assert answer.status_code == 503 and error_of(answer)["code"] == "engine_paused"
    site.good("/continue_generation", {})
    assert states() == ["ok", "ready"] and site.get("/ready").json() == {"status": "ready"}
    assert site.get("/health_generate").json() == {"status": "ok"}
    site.manager.draining = True
    assert site.get("/server_info").json()["status"] == "not ready"


def test_a_restart_is_no_reason_to_end_the_server(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(site.manager), "is_restarting", True)
    monkeypatch.setattr(type(site.manager), "is_healthy", False)
    assert site.get("/health").json() == {"status": "restarting"}
    assert site.get("/server_info").json()["status"] == "restarting"


@pytest.mark.parametrize("path", ["/server_info", "/get_load", "/v1/loads", "/flush_cache"])
def test_a_scheduler_that_does_not_answer_is_a_503(hasty: Site, path: str) -> None:
    hasty.scheduler.dead = True
    answer = hasty.get(path)
    assert answer.status_code == 503 and "did not answer" in answer.text


@pytest.mark.parametrize("beat", [True, False])
def test_in_a_long_step_the_last_known_state_is_the_answer(hasty: Site, beat: bool) -> None:
    if beat:
        hasty.manager.on_message(Heartbeat(hasty.scheduler.state()))
    else:
        assert hasty.get("/get_load").json() == [LOAD]
    hasty.scheduler.dead = True
    (load,) = hasty.get("/get_load").json()
    assert load.pop("age_s") > 0
    assert load == {key: value for key, value in LOAD.items() if key != "age_s"}
    (detail,) = hasty.get("/v1/loads").json()["loads"]
    assert detail["num_used_tokens"] == 200 and detail["age_s"] > 0
    info = hasty.get("/server_info").json()
    assert info["status"] == "ready" and info["internal_states"][0]["age_s"] > 0
    assert "did not answer" in hasty.get("/flush_cache").text


@pytest.mark.parametrize("path", ["/server_info", "/get_load", "/v1/loads"])
def test_a_hung_scheduler_is_a_503(hasty: Site, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    hasty.manager.on_message(Heartbeat(hasty.scheduler.state()))
    hasty.scheduler.dead = True
    monkeypatch.setattr(type(hasty.manager.heartbeats), "longest_silence_s", 301.0)
    answer = hasty.get(path)
    assert answer.status_code == 503 and "did not answer" in answer.text


@pytest.mark.parametrize("path", ["/server_info", "/get_load", "/v1/loads", "/flush_cache"])
def test_a_dead_engine_is_a_503(site: Site, path: str) -> None:
    site.manager.fail("gone")
    assert site.get(path).status_code == 503


def test_models(site: Site) -> None:
    card = {
        "id": "tiny",
        "object": "model",
        "owned_by": "tercet",
        "root": "tiny-1",
        "parent": None,
        "max_model_len": CONTEXT_LEN,
        "type": "model",
        "display_name": "tiny",
        "lifecycle": "active",
    }
    listed = site.get("/v1/models").json()
    assert listed["object"] == "list"
    (only,) = listed["data"]
    assert only.pop("created") > 1_600_000_000 and only.pop("created_at")
    assert only == card
    assert site.get("/v1/models/tiny").json()["id"] == "tiny"
    assert site.get("/v1/models//models/tiny-1").json()["id"] == "tiny"
    unnamed = Site(served_model_name=None)
    assert unnamed.get("/v1/models").json()["data"][0]["id"] == "tiny-1"
    for model in ("tiny-1", "/models/tiny-1", "default"):
        body = {"model": model, "prompt": "a", "max_tokens": 1}
        assert unnamed.good("/v1/completions", body)["model"] == "tiny-1"
    assert "/models" not in unnamed.request("POST", "/v1/completions", {"model": "x", "prompt": "a"}).text
    unnamed.close()
    answer = site.get("/v1/models/some/other")
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "model_not_found" and "'tiny'" in answer.text


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flush_cache(site: Site, method: str) -> None:
    assert site.request(method, "/flush_cache").json()["success"] is True
    assert site.request(method, "/flush_cache?timeout=1.5").status_code == 200
    assert site.request(method, "/flush_cache?timeout=3600").status_code == 200


@pytest.mark.parametrize("timeout", ["-1", "-0.5", "nan", "inf", "x", "", "1e9"])
def test_flush_cache_wants_seconds(site: Site, timeout: str) -> None:
    answer = site.get(f"/flush_cache?timeout={timeout}")
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "timeout" and "[0, 3600]" in answer.text


def test_flush_cache_waits_for_running_requests_only_as_long_as_told(site: Site) -> None:
    site.scheduler.mute = True

    async def flush_while_running() -> list[Any]:
        task = asyncio.create_task(site.client.post("/generate", json={"text": "a", "rid": "r"}))
        while not site.scheduler.running:
            await asyncio.sleep(0)
        at_once = await site.client.get("/flush_cache")
        waiting = asyncio.create_task(site.client.get("/flush_cache?timeout=30"))
        await asyncio.sleep(0.01)
        await site.client.post("/abort_request", json={"rid": "r"})
        await task
        return [at_once, await waiting]

    at_once, waited = site.run(flush_while_running())
    assert at_once.status_code == 400
    assert error_of(at_once)["type"] == "engine_busy" and "1 requests are running or waiting" in at_once.text
    assert waited.status_code == 200


def test_abort_takes_the_exact_name(site: Site) -> None:
    site.scheduler.mute = True

    async def abort() -> list[Any]:
        tasks = [
            asyncio.create_task(site.client.post("/generate", json={"text": "a", "rid": rid})) for rid in ("r1", "r12")
        ]
        while len(site.scheduler.running) < 2:
            await asyncio.sleep(0)
        answers = []
        for body in ({"rid": "r"}, {"rid": "r1"}, {"rid": "r1"}):
            answers.append((await site.client.post("/abort_request", json=body)).json())
            if answers[-1]["aborted"]:
                await tasks[0]  # until then the name is in use
        assert len(site.scheduler.running) == 1
        answers.append((await site.client.post("/abort_request", json={"abort_all": True})).json())
        answers += [(await task).json()["meta_info"]["finish_reason"]["type"] for task in tasks]
        return answers

    no, yes = {"aborted": False}, {"aborted": True}
    assert site.run(abort()) == [no, yes, no, yes, "abort", "abort"]
    assert site.good("/abort_request", {"abort_all": True}) == no


@pytest.mark.parametrize("body", [{}, {"abort_all": False}, {"rid": "a", "abort_all": True}, {"rid": None}])
def test_abort_wants_one_of_the_two(site: Site, body: dict[str, Any]) -> None:
    assert "one of rid and abort_all" in site.refused("/abort_request", body)["message"]


def test_endpoints_without_a_body_take_none(site: Site) -> None:
    assert site.post("/flush_cache", b"{}").status_code == 200
    assert "accepts no body" in site.refused("/flush_cache", {"timeout": 5})["message"]

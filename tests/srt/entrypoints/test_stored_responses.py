"""Stored responses: they are continued, read, listed and deleted, by their own client only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_http import Site, error_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.srt.entrypoints import routing
from tercet.srt.entrypoints.response_store import ResponseStore
from tercet.srt.entrypoints.routing import SMALL_BODY_BYTES
from tercet.srt.io_struct import AbortFinish
from tercet.srt.server_args import ServerArgs

PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site(response_store_mib=1)
    site.scheduler.say("Hi", " there")
    yield site
    site.close()


def store_of(site: Site) -> ResponseStore:
    assert site.server.responses is not None
    return site.server.responses


def ask(site: Site, text: Any = "hi", previous: str | None = None, **fields: Any) -> Any:
    return site.good(PATH, {"input": text, "previous_response_id": previous, **fields})


def items_of(site: Site, response_id: str, query: str = "?order=asc&limit=100") -> Any:
    answer = site.get(f"{PATH}/{response_id}/input_items{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def last_prompt(site: Site) -> str:
    return site.scheduler.prompt_texts()[-1]


# Continue


def test_a_response_is_continued(site: Site) -> None:
    first = ask(site, "one", instructions="be")
    second = ask(site, [{"role": "user", "content": "two"}], first["id"], instructions="do")
    assert last_prompt(site) == "<system>do\n<user>one\n<assistant>Hi there\n<user>two\n<assistant>"
    third = ask(site, "three", second["id"])
    assert last_prompt(site) == (
        "<user>one\n<assistant>Hi there\n<user>two\n<assistant>Hi there\n<user>three\n<assistant>"
    ), "instructions are of one response"
    assert [one["previous_response_id"] for one in (first, second, third)] == [None, first["id"], second["id"]]
    assert (third["store"], third["instructions"]) == (True, None)
    ask(site, "other", first["id"])
    assert last_prompt(site).endswith("<user>one\n<assistant>Hi there\n<user>other\n<assistant>"), "a second branch"


def test_the_result_of_a_call(site: Site) -> None:
    site.scheduler.say(CALL)
    first = ask(site, tools=TOOLS)
    (call,) = first["output"]
    site.scheduler.say("done")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
    second = ask(site, [result], first["id"])
    expected = f"<user>hi\n<assistant><tool_call>{call['call_id']} f{{}}\n<tool>42(f)({call['call_id']})\n<assistant>"
    assert last_prompt(site) == expected
    assert [item["type"] for item in items_of(site, second["id"])["data"]] == [
        "message",
        "function_call",
        "function_call_output",
    ]


TEXTS = st.text("ab", min_size=1, max_size=2)
ITEMS = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, TEXTS),
    st.builds(lambda text: {"role": "user", "content": [{"type": "input_text", "text": text}] * 2}, TEXTS),
    st.builds(lambda text: {"role": "assistant", "content": [{"type": "output_text", "text": text}]}, TEXTS),
    st.builds(lambda text: {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}, TEXTS),
    st.builds(
        lambda text: {"type": "reasoning", "id": "rs", "content": [{"type": "reasoning_text", "text": text}]}, TEXTS
    ),
    st.just({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}),
    st.builds(lambda text: {"type": "function_call_output", "call_id": "c", "output": text}, TEXTS),
    st.builds(
        lambda text: {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": text}, {"type": "input_text", "text": "b"}],
        },
        TEXTS,
    ),
)
TURNS = st.lists(st.tuples(st.one_of(TEXTS, st.lists(ITEMS, min_size=1, max_size=3)), TEXTS), min_size=1, max_size=3)


@settings(max_examples=60)
@given(turns=TURNS)
def test_the_model_reads_what_it_would_read_from_a_client_that_sends_everything(turns: list[tuple[Any, str]]) -> None:
    site = Site(response_store_mib=1, reasoning_parser="qwen3", allow_auto_truncate=True)
    previous, everything = None, []
    for text, reply in turns:
        site.scheduler.say(f"<think>{reply}</think>", reply)
        response = ask(site, text, previous)
        chained = site.scheduler.prompts()[-1]
        everything += [{"role": "user", "content": text}] if isinstance(text, str) else text
        ask(site, everything, store=False)
        assert site.scheduler.prompts()[-1] == chained
        everything += response["output"]
        previous = response["id"]
    assert len(store_of(site)) == len(turns)
    site.close()


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_client_gets_is_what_is_stored(site: Site, stream: bool) -> None:
    body = {"input": "hi", "instructions": "be", "tools": TOOLS, "metadata": {"a": "b"}, "max_output_tokens": 9}
    answer = site.stream(PATH, body)[-1]["response"] if stream else site.good(PATH, body)
    assert answer["output"] and answer["status"] == "completed"
    again = site.get(f"{PATH}/{answer['id']}")
    assert again.json() == answer and list(again.json()) == list(answer)
    assert site.get(f"{PATH}/{answer['id']}?stream=false").json() == answer


def test_an_answer_that_was_cut_is_stored(site: Site) -> None:
    answer = ask(site, max_output_tokens=1)
    assert answer["status"] == "incomplete"
    assert site.get(f"{PATH}/{answer['id']}").json() == answer
    ask(site, "go on", answer["id"])
    assert "<assistant>Hi\n<user>go on" in last_prompt(site)


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_answer_is_not_stored(site: Site, stream: bool) -> None:
    site.scheduler.fail = (1, AbortFinish("aborted by the client"))
    answer = site.stream(PATH, {"input": "hi"})[-1]["response"] if stream else ask(site)
    assert answer["status"] == "cancelled" and len(store_of(site)) == store_of(site).num_bytes == 0


def test_a_stream_that_fails_is_not_stored(site: Site) -> None:
    site.scheduler.fail = (2, AbortFinish("no", "InvalidLogits"))
    assert site.stream(PATH, {"input": "hi"})[-1]["type"] == "response.failed"
    assert not len(store_of(site))


def test_the_client_says_what_is_stored(site: Site) -> None:
    first = ask(site)
    second = ask(site, "more", first["id"], store=False)
    assert (second["store"], second["previous_response_id"]) == (False, first["id"])
    assert len(store_of(site)) == 1 and ask(site, store=True)["store"] and len(store_of(site)) == 2
    error = site.refused(PATH, {"input": "hi", "previous_response_id": second["id"]})
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
    assert site.get(f"{PATH}/{second['id']}").status_code == 404


def test_without_the_setting_nothing_is_stored() -> None:
    site = Site()
    answer = ask(site, max_output_tokens=1)
    assert answer["store"] is False and site.server.responses is None
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        missing = site.request(method, f"{PATH}/{answer['id']}{path}")
        assert missing.status_code == 404 and error_of(missing)["code"] == "response_store_off"
        assert "--response-store-mib" in error_of(missing)["message"]
    site.close()


@pytest.mark.parametrize("size", [-1, 2**20])
def test_the_size_has_bounds(size: int) -> None:
    with pytest.raises(ValueError, match=f"--response-store-mib must be in .*, got {size}"):
        ServerArgs(model_path="m", response_store_mib=size)


# Delete and drop


def test_a_deleted_response(site: Site) -> None:
    first = ask(site, "one")
    second = ask(site, "two", first["id"])
    deleted = site.request("DELETE", f"{PATH}/{first['id']}")
    assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        missing = site.request(method, f"{PATH}/{first['id']}{path}")
        assert missing.status_code == 404 and error_of(missing)["code"] == "response_not_found"
    site.refused(PATH, {"input": "hi", "previous_response_id": first["id"]})
    ask(site, "three", second["id"])
    assert last_prompt(site).startswith("<user>one\n<assistant>Hi there\n<user>two"), "the later response has it all"


def test_a_response_may_be_deleted_while_it_is_continued(site: Site) -> None:
    first = ask(site, "one")
    store = store_of(site)
    take = site.scheduler.send

    def deleting(message: Any) -> None:
        site.scheduler.send = take  # type: ignore[method-assign]
        assert store.remove(first["id"], "/")
        assert store.num_bytes == 0
        take(message)

    site.scheduler.send = deleting  # type: ignore[method-assign]
    second = ask(site, "two", first["id"])
    assert len(store) == 1
    ask(site, "three", second["id"])
    assert last_prompt(site).startswith("<user>one\n<assistant>Hi there\n<user>two")


def test_the_oldest_response_is_dropped(site: Site) -> None:
    names = [ask(site, metadata={"a": "x" * 200_000})["id"] for _ in range(7)]
    assert [site.get(f"{PATH}/{name}").status_code for name in names] == [404] * 2 + [200] * 5
    assert store_of(site).num_bytes <= 1 << 20


def test_a_conversation_that_cannot_be_stored_is_refused(site: Site) -> None:
    items = [{"role": "user", "content": "a"}, {"role": "user", "id": "x" * (1 << 20), "content": "b"}]
    error = site.refused(PATH, {"input": items})
    assert error["param"] == "store" and "--response-store-mib" in error["message"]
    assert ask(site, items, store=False)["status"] == "completed"


# Limits of a request


def test_a_conversation_counts_as_a_part_of_the_body(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ask(site)
    monkeypatch.setattr(routing, "MAX_BODY_BYTES", store_of(site).num_bytes - 1)
    error = site.refused(PATH, {"input": "hi", "previous_response_id": first["id"], "metadata": {"a": "x" * 2000}}, 413)
    assert "previous_response_id" in error["message"] and site.server.held.num_bytes == 0
    monkeypatch.setattr(routing, "MAX_HELD_BYTES", 1000)
    error = site.refused(PATH, {"input": "hi", "previous_response_id": first["id"]}, 503)
    assert error["code"] == "queue_full" and site.server.held.num_bytes == 0
    assert site.idle()


def test_a_large_conversation_is_read_in_a_thread(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    async def to_thread(work: Any, *args: Any, **kwargs: Any) -> Any:
        threads.append(getattr(work, "__name__", ""))
        return work(*args, **kwargs)

    monkeypatch.setattr("asyncio.to_thread", to_thread)
    small = ask(site)
    ask(site, "more", small["id"])
    items_of(site, small["id"])
    assert not threads
    large = ask(site, [{"role": "user", "id": "x" * SMALL_BODY_BYTES, "content": "a"}], store=True)
    threads.clear()
    ask(site, "more", large["id"])
    assert "_chat" in threads
    threads.clear()
    items_of(site, large["id"])
    assert threads == ["items_read"]


# Whose response it is


def test_keys_and_tenants_have_responses_of_their_own() -> None:
    site = Site(response_store_mib=1, api_key=["sesame", "pomegranate"])
    own, other = {"authorization": "Bearer sesame"}, {"authorization": "Bearer pomegranate"}
    check_owners(site, own, [other], [{**own, "x-tenant": "b"}])
    site = Site(response_store_mib=1, api_key="sesame")
    check_owners(site, {**own, "x-tenant": "a"}, [own, {**own, "x-tenant": "b"}], [])
    site = Site(response_store_mib=1)
    check_owners(site, {}, [{"x-tenant": "a"}], [own])


def check_owners(site: Site, own: dict[str, str], others: list[dict[str, str]], same: list[dict[str, str]]) -> None:
    body = {"input": "hi", "max_output_tokens": 1}
    name = site.post(PATH, body, headers=own).json()["id"]
    for headers in others:
        assert site.get(f"{PATH}/{name}", headers=headers).status_code == 404
        assert site.get(f"{PATH}/{name}/input_items", headers=headers).status_code == 404
        assert site.request("DELETE", f"{PATH}/{name}", headers=headers).status_code == 404
        error = error_of(site.post(PATH, {**body, "previous_response_id": name}, headers=headers))
        assert error["code"] == "previous_response_not_found"
    for headers in (own, *same):
        assert site.post(PATH, {**body, "previous_response_id": name}, headers=headers).status_code == 200
        assert site.get(f"{PATH}/{name}", headers=headers).json()["id"] == name
    assert site.request("DELETE", f"{PATH}/{name}", headers=own).status_code == 200
    site.close()


# Cancel, and look


def test_only_what_is_in_the_background_can_be_cancelled(site: Site) -> None:
    assert site.post(f"{PATH}/{ask(site)['id']}/cancel").status_code == 404


def test_operators_see_what_is_stored() -> None:
    site = Site(response_store_mib=3, enable_metrics=True)
    for _ in range(2):
        ask(site, max_output_tokens=1)
    num_bytes = store_of(site).num_bytes
    info = site.get("/server_info").json()
    assert (info["response_store_mib"], info["num_stored_responses"], info["stored_responses_bytes"]) == (
        3,
        2,
        num_bytes,
    )
    values = dict(line.rsplit(" ", 1) for line in site.get("/metrics").text.splitlines() if line[0] != "#")
    for name, value in (("", 2), ("_bytes", num_bytes), ("_max_bytes", 3 << 20)):
        assert float(values[f'tercet:stored_responses{name}{{model_name="tiny"}}']) == value
    site.close()
    site = Site(enable_metrics=True)
    assert "stored_responses" not in site.get("/metrics").text
    assert "num_stored_responses" not in site.get("/server_info").json()
    site.close()

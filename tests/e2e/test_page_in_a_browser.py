"""The page for people in a real browser. It needs the extra `browser` and an installed Chromium.

pip install -e '.[browser]' && apt-get install chromium
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from patience import PATIENCE_S
from toy_engine import REAL_SERVER, ServerProcess

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
sync_api = pytest.importorskip("playwright.sync_api", reason="the extra `browser` is not installed")

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]

CONTRAST = """() => {
  const luminance = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map((c) => c / 255)
      .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!colour.endsWith(", 0)")) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const faint = [];
  for (const node of document.querySelectorAll("p, dt, dd, th, td, h1, h2, h3, button, label, a, code, .text")) {
    if (!node.textContent.trim() || !node.offsetParent) continue;
    const [a, b] = [luminance(getComputedStyle(node).color), luminance(behind(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) faint.push(`${node.textContent.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return faint;
}"""
"""The texts with a contrast below 4.5 (WCAG 2.2, level AA)."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ["--port", "0", "--max-total-tokens", "16384"]
    with ServerProcess(tmp_path_factory.mktemp("r"), flags, module=REAL_SERVER) as server:
        yield server.ready()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=quiet)
        yield browser
        browser.close()


class Visit:
    """One visit to the page. It records console errors and requests."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.problems: list[str] = []
        self.hosts: set[str] = set()
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(1000 * PATIENCE_S)
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.problems.append(said.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        self.page.goto(url)
        self.page.wait_for_selector("#health.ok")

    def ask(self, text: str) -> None:
        self.page.fill("#input", text)
        self.page.keyboard.press("Enter")

    def wait(self, condition: str) -> None:
        """Waits until a JavaScript expression is true. The page's security policy forbids Playwright's own wait."""
        self.until(lambda: self.page.evaluate(condition), condition)

    def until(self, condition: Callable[[], bool], name: str = "") -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, name
            self.page.wait_for_timeout(50)

    def finished(self) -> str:
        """The last answer, once it has ended."""
        self.page.wait_for_selector("#stop", state="hidden")
        return self.page.locator(".message.assistant .text").last.inner_text()


def test_a_chat_streams_to_its_end(server: ServerProcess, browser: Any) -> None:
    visit = Visit(browser, server.url)
    page = visit.page
    page.click("summary")
    page.fill("#temperature", "0")
    page.fill("#max-tokens", "24")
    visit.ask("What is the capital of France?")
    assert "Paris" in visit.finished()
    assert "prompt tokens from the cache" in page.locator(".facts").last.inner_text()
    visit.ask("And of Italy?")
    visit.finished()
    assert page.locator(".message").count() == 4
    page.click("#clear")
    assert page.locator(".message").count() == 0
    assert visit.problems == [] and visit.hosts == {server.url.split("/")[2]}
    page.close()


def test_a_new_chat_during_an_answer_begins_empty(server: ServerProcess, browser: Any) -> None:
    visit = Visit(browser, server.url)
    bodies: list[Any] = []
    visit.page.on("request", lambda request: request.post_data and bodies.append(json.loads(request.post_data)))
    visit.ask("Write a long story about a lighthouse.")
    visit.wait("document.querySelector('.message.assistant .text')?.textContent.length > 20")
    visit.page.click("#clear")
    visit.page.wait_for_selector("#stop", state="hidden")
    visit.page.click("summary")
    visit.page.fill("#max-tokens", "4")
    visit.ask("Hello")
    visit.finished()
    assert bodies[1]["messages"] == [{"role": "user", "content": "Hello"}]
    assert visit.page.locator(".message").count() == 2 and visit.problems == []
    visit.page.close()


def test_tokens_have_colours_and_alternatives(server: ServerProcess, browser: Any) -> None:
    visit = Visit(browser, server.url)
    page = visit.page
    page.click("summary")
    page.fill("#temperature", "0")
    page.check("#colours")
    visit.ask("What is the capital of France?")
    text = visit.finished()
    assert "Paris" in text
    tokens = page.locator(".message.assistant .token")
    assert "".join(tokens.all_text_contents()) == text
    assert page.locator("#legend").is_visible()
    tokens.first.focus()
    rows = page.locator(".tip tr")
    assert rows.count() >= 5 and page.locator(".tip .chosen").count() == 1
    assert visit.problems == []
    page.close()


EVENTS = [
    ({}, ["<think>"]),
    ({"reasoning_content": "Let me"}, ["\nLet", " me"]),
    ({"reasoning_content": " see."}, [" see", ".\n"]),
    ({}, ["</think>", "\n\n"]),
    ({"content": "Paris"}, ["Paris"]),
    ({"content": "!"}, ["! END"]),
    ({}, ["X"]),
]
"""The deltas of an answer of a model that thinks, and the tokens of each."""


@pytest.mark.parametrize("colours", [False, True])
def test_reasoning_is_shown_apart_from_the_answer(server: ServerProcess, browser: Any, colours: bool) -> None:
    def chunk(delta: dict[str, str], tokens: list[str]) -> str:
        listed = [{"token": one, "bytes": [*one.encode()], "logprob": -1.0, "top_logprobs": []} for one in tokens]
        choice = {"index": 0, "delta": delta, "logprobs": {"content": listed} if colours else None}
        return f"data: {json.dumps({'choices': [choice]})}\n\n"

    visit = Visit(browser, server.url)
    page = visit.page
    page.set_checked("#colours", colours)
    body = "".join(chunk(*event) for event in EVENTS) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    visit.ask("What is the capital of France?")
    assert visit.finished() == "Paris!"
    assert page.locator(".thoughts").text_content() == "Let me see."
    assert page.locator(".token").count() == (6 if colours else 0)
    assert page.evaluate(CONTRAST) == []
    page.close()


def test_a_failure_is_shown_in_the_chat(server: ServerProcess, browser: Any) -> None:
    visit = Visit(browser, server.url)
    visit.page.click("summary")
    visit.page.fill("#temperature", "-1")
    visit.ask("Hello")
    assert "temperature must be" in visit.finished()
    assert visit.page.locator(".message.failed").count() == 1
    visit.page.close()


def test_escape_stops_an_answer(server: ServerProcess, browser: Any) -> None:
    visit = Visit(browser, server.url)
    visit.ask("Write a long story about a lighthouse.")
    visit.wait("document.querySelector('.message.assistant .text')?.textContent.length > 20")
    visit.page.keyboard.press("Escape")
    visit.finished()
    assert "stopped" in visit.page.locator(".facts").last.inner_text()
    assert visit.problems == []
    visit.page.close()


def test_the_live_view_updates_under_16_streams(server: ServerProcess, browser: Any) -> None:
    visit = Visit(browser, server.url)
    body = {"text": "Once upon a time " * 20, "sampling_params": {"max_new_tokens": 150, "ignore_eos": True}}
    clients = [
        threading.Thread(target=httpx.post, args=[f"{server.url}/generate"], kwargs={"json": body, "timeout": 120})
        for _ in range(16)
    ]
    for client in clients:
        client.start()
    visit.wait("Number(document.querySelector('#running').textContent) === 16")
    visit.wait("Number(document.querySelector('#throughput').textContent) > 0")
    assert visit.page.locator("#requests tr").count() == 16
    assert visit.page.locator("#prefixes code").first.inner_text().startswith("Once upon")
    for client in clients:
        client.join()
    visit.wait("document.querySelector('#running').textContent === '0'")
    assert visit.problems == []
    visit.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(server: ServerProcess, browser: Any, scheme: str) -> None:
    visit = Visit(browser, server.url, color_scheme=scheme)
    visit.page.click("summary")
    visit.page.fill("#max-tokens", "8")
    visit.ask("Hello")
    visit.finished()
    assert visit.page.evaluate(CONTRAST) == []
    visit.page.close()


def test_a_narrow_screen_needs_no_sideways_scrolling(server: ServerProcess, browser: Any) -> None:
    visit = Visit(browser, server.url, viewport={"width": 360, "height": 740})
    visit.ask("Hello")
    visit.finished()
    assert visit.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    visit.page.close()


def test_the_keyboard_reaches_every_control(server: ServerProcess, browser: Any) -> None:
    visit = Visit(browser, server.url)
    visit.page.click("summary")
    wanted = set(
        visit.page.evaluate(
            "[...document.querySelectorAll('input, textarea, button')].filter((e) => e.offsetParent).map((e) => e.id)"
        )
    )
    reached: set[str] = set()
    for _ in range(60):
        visit.page.keyboard.press("Tab")
        reached.add(visit.page.evaluate("document.activeElement.id"))
    assert wanted <= reached
    unlabelled = "[...document.querySelectorAll('input, textarea')].filter((e) => !e.labels.length).length"
    assert visit.page.evaluate(unlabelled) == 0
    visit.page.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ["--port", "0", "--max-total-tokens", "4096", "--api-key", "one", "--api-key", "two"]
    with ServerProcess(tmp_path_factory.mktemp("r"), flags, module=REAL_SERVER) as server:
        yield server.ready()


def test_with_a_key_the_page_works_and_shows_no_texts_of_other_keys(guarded: ServerProcess, browser: Any) -> None:
    body = {"text": "A secret of the first key. " * 9, "sampling_params": {"max_new_tokens": 1}}
    for _ in range(3):
        httpx.post(f"{guarded.url}/generate", json=body, headers={"authorization": "Bearer one"}, timeout=PATIENCE_S)
    visit = Visit(browser, guarded.url, http_credentials={"username": "me", "password": "two"})
    visit.page.click("summary")
    visit.page.fill("#max-tokens", "4")
    visit.ask("Hello")
    assert visit.finished()
    visit.page.wait_for_selector("#prefixes code")
    assert set(visit.page.locator("#prefixes code").all_text_contents()) == {"The text is not shown."}
    assert visit.problems == []
    visit.page.close()


def test_the_live_view_goes_on_after_a_restart_of_the_engine(guarded: ServerProcess, browser: Any) -> None:
    visit = Visit(browser, guarded.url, http_credentials={"username": "me", "password": "one"})
    page = visit.page
    polls: list[Any] = []
    page.on("response", lambda answer: "after_step=" in answer.url and polls.append(answer))

    def last_known() -> int:
        return int(polls[-1].url.partition("after_step=")[2]) if polls else 0

    page.click("summary")
    page.fill("#max-tokens", "40")
    visit.ask("Tell me about the sea.")
    visit.finished()
    visit.until(lambda: last_known() >= 10)
    old = last_known()
    os.kill(guarded.children["scheduler"], signal.SIGKILL)
    assert guarded.logged("The engine runs again")
    page.fill("#max-tokens", "4")
    visit.ask("And again")
    visit.finished()
    visit.until(lambda: 0 < last_known() < old)  # it has got steps of the new engine, whose numbers begin again
    page.wait_for_selector("#health.ok")
    page.close()

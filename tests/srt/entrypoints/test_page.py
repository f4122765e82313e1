"""The page for people, and the endpoint that it polls."""

from __future__ import annotations

import re
from importlib import resources

import pytest
from fake_http import Site, error_of

from tercet.srt.entrypoints import page

WEB = resources.files("tercet.srt.entrypoints").joinpath("web")


def test_the_page_and_its_files_are_served(site: Site) -> None:
    for path in ("/", "/web/style.css", *page.SCRIPT_PATHS):
        answer = site.get(path)
        assert answer.status_code == 200
        assert answer.content == WEB.joinpath(path.rpartition("/")[2] or "index.html").read_bytes()
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert site.get("/").headers["content-type"] == "text/html; charset=utf-8"


def test_every_file_is_served() -> None:
    assert {f"/web/{file.name}" for file in WEB.iterdir()} == {*page.SCRIPT_PATHS, "/web/style.css", "/web/index.html"}


@pytest.mark.parametrize("path", ["/web/index.html", "/web/../page.py", "/web/nothing.js", "/web/"])
def test_nothing_else_is_served(site: Site, path: str) -> None:
    assert site.get(path).status_code == 404


def test_the_files_name_no_other_host() -> None:
    for file in WEB.iterdir():
        urls = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s'\"]*", file.read_text(encoding="utf-8"))
        assert all("www.w3.org/2000/svg" in url for url in urls), (file.name, urls)


def test_the_page_has_neither_inline_scripts_nor_inline_styles() -> None:
    """The content security policy would block them."""
    text = WEB.joinpath("index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", text)


def test_every_id_that_a_script_uses_is_in_the_page() -> None:
    text = WEB.joinpath("index.html").read_text(encoding="utf-8")
    for file in WEB.iterdir():
        for name in re.findall(r"\$\(\"([\w-]+)\"\)", file.read_text(encoding="utf-8")):
            assert f'id="{name}"' in text, f"{file.name} uses #{name}"


def test_the_view_has_texts_for_prefixes(site: Site) -> None:
    view = site.get("/engine_view").json()
    assert view["model"] == "tiny" and view["context_len"] == 256
    assert view["state"]["num_waiting"] == 2
    (prefix,) = view["prefixes"]
    assert prefix["text"] == "hot" and prefix["num_uses"] == 9


@pytest.mark.parametrize(("keys", "text"), [(["a"], "hot"), (["a", "b"], "")])
def test_no_key_reads_the_prompts_of_another_one(keys: list[str], text: str) -> None:
    site = Site(api_key=keys)
    (prefix,) = site.get("/engine_view", headers={"authorization": f"Bearer {keys[-1]}"}).json()["prefixes"]
    assert prefix["text"] == text and prefix["num_tokens"] == 3
    site.close()


def test_the_view_after_a_step(site: Site) -> None:
    assert [step["number"] for step in site.get("/engine_view").json()["steps"]] == [1, 2, 3]
    assert [step["number"] for step in site.get("/engine_view?after_step=2").json()["steps"]] == [3]


@pytest.mark.parametrize("given", ["", "-1", "x", "1.5", "9" * 30, "%C2%B2"])
def test_an_invalid_step(site: Site, given: str) -> None:
    answer = site.get(f"/engine_view?after_step={given}")
    assert answer.status_code == 400 and error_of(answer)["param"] == "after_step"


def test_a_silent_scheduler() -> None:
    site = Site(app={"state_timeout_s": 0.05})
    site.scheduler.dead = True
    assert site.get("/engine_view").status_code == 503
    assert site.get("/").status_code == 200
    site.close()

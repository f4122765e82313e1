from __future__ import annotations

import asyncio

from fake_http import CONTEXT_LEN, EOS, TEMPLATE, Site, error_of

import tercet


def test_version(site: Site) -> None:
    assert site.get("/version").json() == {"version": tercet.__version__}


def test_ping_is_health(site: Site) -> None:
    assert site.get("/ping").json() == {"status": "ok"}
    site.manager.draining = True
    assert site.get("/ping").status_code == 503


def test_load_counts_samples_without_asking_the_scheduler(site: Site) -> None:
    site.scheduler.dead = True
    site.scheduler.mute = True
    assert site.get("/load").json() == {"server_load": 0}

    async def load_of_two() -> int:
        task = asyncio.create_task(site.client.post("/generate", json={"text": "a", "sampling_params": {"n": 2}}))
        while len(site.scheduler.running) < 2:
            await asyncio.sleep(0)
        answer = await site.client.get("/load")
        site.manager.fail("over")
        await task
        return int(answer.json()["server_load"])

    assert site.run(load_of_two()) == 2


def test_tokenizer_info_is_enough_to_render_a_chat_elsewhere(site: Site) -> None:
    assert site.get("/tokenizer_info").json() == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": 258,
        "model_max_length": CONTEXT_LEN,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": None,
        "pad_token": None,
        "eos_token_ids": [EOS],
        "chat_template": TEMPLATE,
    }


def test_without_a_tokenizer_there_is_no_information() -> None:
    site = Site(skip_tokenizer_init=True)
    answer = site.get("/tokenizer_info")
    assert answer.status_code == 400 and "--skip-tokenizer-init" in error_of(answer)["message"]
    site.close()

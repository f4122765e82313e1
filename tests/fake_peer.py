"""A fake of a compared server: `python fake_peer.py PORT TROUBLE`. TROUBLE chooses how it misbehaves."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress

from scripted_http import Exchange, ScriptedServer

TROUBLES = (
    "breaks at once",
    "never ready",
    "short answers",
    "no text",
    "no counts",
    "other prompts",
    "dies under load",
    "hangs under load",
    "has many processes",
    "warns",
)
LOAD = 4
"""Minimum output tokens of a measured request. Start-up checks ask for fewer tokens."""


class Peer:
    def __init__(self, trouble: str) -> None:
        self.trouble = trouble

    async def answer(self, exchange: Exchange) -> None:
        if exchange.path == "/health":
            await exchange.answer({}, "503 Busy" if self.trouble == "never ready" else "200 OK")
            return
        assert exchange.path == "/v1/completions"
        key = os.environ.get("TERCET_API_KEY")
        if key and exchange.headers.get("authorization") != f"Bearer {key}":
            await exchange.answer({"error": "no key"}, "401 Unauthorized")
            return
        asked = exchange.json["max_tokens"]
        if asked >= LOAD and len(exchange.json["prompt"]) != SAMPLE_LEN:
            if self.trouble == "dies under load":
                sys.stderr.write("no more memory\n")
                sys.stderr.flush()
                os._exit(3)
            if self.trouble == "hangs under load":
                await asyncio.sleep(60)
        count = asked - 1 if self.trouble == "short answers" and asked >= LOAD else asked
        text = "" if self.trouble == "no text" else "word "
        read = len(exchange.json["prompt"]) + (self.trouble == "other prompts")
        usage = None if self.trouble == "no counts" else {"prompt_tokens": read, "completion_tokens": count}
        chunks = [{"choices": [{"text": text}]} for _ in range(count - 1)]
        last = {"choices": [{"text": text, "finish_reason": "length"}]}
        await exchange.stream([*chunks, last, {"choices": [], "usage": usage}])


SAMPLE_LEN = len("The capital of France is")
"""Length of the sample prompt in tokens. A token is a byte."""


async def serve(port: int, trouble: str) -> None:
    server = ScriptedServer(Peer(trouble).answer)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", port)
    async with listener:
        await listener.serve_forever()


def start_others() -> None:
    """Starts a child process and a grandchild that ignore SIGTERM. The grandchild has its own session."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    starter = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleeper!r}], start_new_session=True)"
    subprocess.Popen([sys.executable, "-c", f"{starter}; {sleeper}"])


if __name__ == "__main__":
    port, trouble = int(sys.argv[1]), sys.argv[2]
    assert trouble == "none" or trouble in TROUBLES
    if trouble == "breaks at once":
        sys.exit("cannot load the model")
    if trouble == "has many processes":
        start_others()
    if trouble == "warns":
        sys.stdout.write("WARNING It is slow.\n" * 2)
    sys.stdout.write("KV pool 1.5 GiB\n")
    sys.stdout.flush()
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(port, trouble))

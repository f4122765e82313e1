"""`tercet chat` with text that its terminal or pipe cannot represent. Its other tests are in test_cli.py."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from toy_engine import environment


def test_text_outside_the_encoding_of_the_terminal_is_replaced(tmp_path: Path) -> None:
    """In the question and in the answer."""

    class Echo(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(b'{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            delta = {"content": "\u00e9" + body["messages"][0]["content"]}
            self._send(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps({"choices": [{"delta": delta}]}).encode())

        def _send(self, data: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Echo) as echo:
        thread = threading.Thread(target=echo.serve_forever)
        thread.start()
        ran = subprocess.run(
            [sys.executable, "-m", "tercet", "chat", "--base-url", f"http://127.0.0.1:{echo.server_port}"],
            env=environment(tmp_path, PYTHONIOENCODING="ascii"),
            input=b"caf\xe9\n",
            capture_output=True,
            timeout=60,
        )
        echo.shutdown()
        thread.join()
    assert (ran.stdout, ran.stderr, ran.returncode) == (b"?caf?\n", b"", 0)

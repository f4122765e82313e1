# requires: schemathesis==4.32.5 pytest==9.2.0
"""schemathesis: requests made from /openapi.json. No status 5xx, and every answer is as documented."""

from __future__ import annotations

import os
import subprocess

URL = os.environ["TERCET_URL"]
WITHOUT = "/health_generate|/abort_request|/flush_cache|/pause_generation|/continue_generation|/v1/responses"
"""Paths that change the server or pause it, and one that generates to the end of the context for many random bodies."""


def test_no_request_breaks_the_server() -> None:
    command = ["st", "run", f"{URL}/openapi.json", "--phases=examples,fuzzing", "--max-examples=10", "--seed=1"]
    command += ["--checks=not_a_server_error,response_schema_conformance,content_type_conformance"]
    command += [f"--exclude-path-regex={WITHOUT}", "--request-timeout=60", "--no-color"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stdout[-9000:]

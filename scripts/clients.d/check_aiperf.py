# requires: aiperf==0.13.0 pytest==9.2.0
"""aiperf: every request completes, streamed as chat, and it reads the server's /metrics."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

REQUESTS, OUTPUT_TOKENS = 6, 8


def test_profile_of_chats(tmp_path: Path) -> None:
    command = ["aiperf", "profile", "--endpoint-type", "chat", "--streaming", "--ui", "none"]
    command += ["-m", os.environ["TERCET_MODEL"], "-u", os.environ["TERCET_URL"], "--concurrency", "2"]
    command += ["--tokenizer", os.environ["TERCET_TOKENIZER"], "--use-server-token-count", "--num-prompts", "4"]
    command += ["--isl", "16", "--osl", str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true"]
    command += ["--request-count", str(REQUESTS), "--output-artifact-dir", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:]
    result = json.loads((tmp_path / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    assert result["request_count"]["avg"] == REQUESTS, result["request_count"]
    assert result["output_sequence_length"]["avg"] == OUTPUT_TOKENS, result["output_sequence_length"]
    metrics = (tmp_path / "server_metrics_export.json").read_text(encoding="utf-8")
    assert "sglang:num_running_reqs" in metrics, metrics[:2000]

# requires: guidellm==0.8.1 torch==2.13.0 pytest==9.2.0
"""guidellm: no request fails, and each has as many tokens as it asked for, streamed as chat.

On a busy machine, guidellm's report can lack the request that ends last, although it was answered.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

REQUESTS, OUTPUT_TOKENS = 6, 8


def test_concurrent_chats(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    target = f"target={os.environ['TERCET_URL']},model={os.environ['TERCET_MODEL']}"
    command = ["guidellm", "run", "--disable-progress", "--backend", f"kind=openai_http,{target}"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", f"kind=hf_auto,model={os.environ['TERCET_TOKENIZER']}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={OUTPUT_TOKENS}"]
    command += ["--output", f"kind=json,path={output}"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    (result,) = json.loads(output.read_text(encoding="utf-8"))["benchmarks"]
    totals = result["metrics"]["request_totals"]
    assert totals["errored"] == totals["incomplete"] == 0, totals
    assert REQUESTS - 1 <= totals["successful"] <= REQUESTS, totals
    tokens = [request["output_metrics"]["text_tokens"] for request in result["requests"]["successful"]]
    assert set(tokens) == {OUTPUT_TOKENS}, tokens

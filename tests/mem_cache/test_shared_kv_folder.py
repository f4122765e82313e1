"""Several servers use one folder of KV files at once: no wrong bytes, no errors, and a bounded size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import kv_folder_user
from kv_folder_user import FILE_BYTES, LOOK_INTERVAL, MAX_FILES

NUM_STEPS = 400
NUM_SERVERS = 2


def test_servers_that_share_a_folder_read_right_bytes_and_keep_the_bound(tmp_path: Path) -> None:
    """Each server knows what the others had written when it looked last. So of any two of them, the one that has looked
    last misses at most what the other one has written since its own last look."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    servers = [
        subprocess.Popen(
            [sys.executable, kv_folder_user.__file__, str(tmp_path), str(seed), str(NUM_STEPS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for seed in range(NUM_SERVERS)
    ]
    for server in servers:
        assert server.stdout is not None
        server.stdout.readline()
    for server in servers:
        assert server.stdin is not None
        server.stdin.write("\n")
        server.stdin.flush()
    ended = [server.communicate() for server in servers]
    assert [server.returncode for server in servers] == [0] * NUM_SERVERS, ended
    assert [errors for _, errors in ended] == [""] * NUM_SERVERS, "nothing is worth a line in the log"
    for text, _ in ended:
        counts = json.loads(text)
        assert counts["damaged"] == 0
        assert min(counts["written"], counts["read"], counts["removed"]) > 30
        # Each of them may be writing one more file.
        assert counts["most bytes"] <= (MAX_FILES + LOOK_INTERVAL + NUM_SERVERS) * FILE_BYTES
    assert {path.suffix for path in tmp_path.iterdir()} == {".kv"}
    assert any(json.loads(text)["read of others"] for text, _ in ended)

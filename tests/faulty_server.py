"""`python -m faulty_server FLAGS`: the server of `tercet serve` on the default model, with faulty_child's processes."""

from __future__ import annotations

import sys

import faulty_child
from server_flags import parse_flags

from tercet.srt.entrypoints.server import serve
from tercet.srt.model_files.default_model import require_default_model

if __name__ == "__main__":
    flags = ["--model-path", str(require_default_model()), *sys.argv[1:]]
    sys.exit(serve(parse_flags(flags), child_module=faulty_child.MODULE))

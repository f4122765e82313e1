"""Compiles csrc/cpu for arm64 with a cross compiler. Python for arm64 runs it in the checkout (scripts/arm64).

Flags, file name and stamp are those that setup.py would use there. Arguments: the folder of torch, and the compiler.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path


def main(torch: Path, compiler: str) -> int:
    facts = runpy.run_path("model_executor/cpu_build.py")
    version = runpy.run_path(str(torch / "version.py"))["__version__"]
    stamp = facts["BuildStamp"](version, facts["sources_digest"](Path()))
    ((variant, build),) = facts["builds"]().items()
    built = Path("model_executor", facts["file_name"](variant))
    if built.exists() and facts["read_stamp"](built) == stamp:
        return 0
    sys.stderr.write(f"scripts/arm64: compiling {built}\n")
    built.unlink(missing_ok=True)
    command = [compiler, *facts["COMMON_FLAGS"], *build.flags, "-D" + "=".join(stamp.macro()), "-fPIC", "-shared"]
    for folder in ("include", "include/torch/csrc/api/include"):
        command += ["-isystem", str(torch / folder)]
    command += ["csrc/cpu/ops.cpp", "-o", str(built), f"-L{torch / 'lib'}"]
    command += ["-Wl,--allow-shlib-undefined", "-lc10", "-ltorch_cpu", "-ltorch"]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))

"""Builds csrc/cpu, once for each kind of processor. Everything else about the package is in setup.cfg.

A build in place (a checkout, an editable installation) is for this machine alone, so it compiles only what this
machine can use. TERCET_BUILDS names the builds to compile instead, for example "avx512 avx2".

A build that fails, or a machine without a compiler, leaves a package that works: it runs on torch's operations there.
What failed, and how to try again, is printed here (pip shows it with -v) and logged at every start. torch has to be
installed already (`pip install --no-build-isolation`), since the build needs its headers.

The environment variable TERCET_SKIP_BUILD=1 installs the package without building: scripts/setup does both at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Extension, setup
from setuptools.errors import BaseError, CCompilerError

ROOT = Path(__file__).resolve().parent
CONSEQUENCE = "Tercet works without them, but a CPU then runs on torch's operations, which are slower."


def load_build_facts() -> ModuleType:
    """model_executor/cpu_build.py, without the package around it."""
    spec = spec_from_file_location("cpu_build", ROOT / "model_executor/cpu_build.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tell(text: str) -> None:
    print(f"tercet: {text}", file=sys.stderr)  # noqa: T201 - the only way a build has


def build_arguments() -> dict[str, object]:
    if os.environ.get("TERCET_SKIP_BUILD") == "1":
        return {}
    facts = load_build_facts()
    try:  # inside: the package can be installed before torch, without these operations
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        tell(f"torch is not installed here, so the operations of csrc/cpu are not built. {CONSEQUENCE}")
        return {}
    compiler = facts.find_compiler(os.environ.get("CXX"))
    stamp = facts.BuildStamp(torch.__version__, facts.sources_digest(ROOT))

    class BuildOperations(BuildExtension):
        """Builds what was not built from these sources for this torch; says it when a build fails."""

        def run(self) -> None:
            if named := os.environ.get("TERCET_BUILDS", "").split():
                for name in set(named) - set(facts.builds()):
                    tell(f"TERCET_BUILDS: there is no build {name}; the builds are {', '.join(facts.builds())}")
                self.keep(set(named))
            elif self.inplace or getattr(self, "editable_mode", False):
                self.keep(facts.local_builds(torch.cpu.get_capabilities()))
            if compiler is None:
                tell(f"there is no C++ compiler, so the operations of csrc/cpu are not built. {CONSEQUENCE}")
                self.extensions = []
            super().run()

        def keep(self, names: set[str]) -> None:
            self.extensions = [ext for ext in self.extensions if ext.name.rpartition("_cpu_")[2] in names]

        def build_extensions(self) -> None:
            self.children: list[int] = []
            try:
                super().build_extensions()
                for child in self.children:
                    os.waitpid(child, 0)
            except (subprocess.CalledProcessError, OSError) as error:  # torch asks the compiler for its version
                tell(f"{compiler} cannot be used ({error}). {CONSEQUENCE} {facts.build_hint(ROOT)}")

        def build_extension(self, ext: Extension) -> None:
            built = Path(self.get_ext_fullpath(ext.name))
            if built.exists() and facts.read_stamp(built) != stamp:
                built.unlink()
            if not hasattr(os, "fork"):
                self.build_here(ext)
                return
            # A process for each kind of processor: the compiler takes most of a minute for one, on one core.
            if len(self.children) >= (os.cpu_count() or 1):
                os.waitpid(self.children.pop(0), 0)
            child = os.fork()
            if child:
                self.children.append(child)
                return
            try:
                self.build_temp = str(Path(self.build_temp, ext.name))
                self.build_here(ext)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)

        def build_here(self, ext: Extension) -> None:
            try:
                super().build_extension(ext)
            except (BaseError, CCompilerError, OSError):
                tell(f"building {ext.name} failed: see the compiler's errors. {CONSEQUENCE} {facts.build_hint(ROOT)}")

    extensions = [
        CppExtension(
            f"tercet.model_executor._cpu_{name}",
            ["csrc/cpu/ops.cpp"],
            define_macros=[stamp.macro()],
            extra_compile_args=[*facts.COMMON_FLAGS, *build.flags],
            optional=True,
        )
        for name, build in facts.builds().items()
    ]
    command: Any = BuildOperations.with_options(use_ninja=False)
    return {"ext_modules": extensions, "cmdclass": {"build_ext": command}}


setup(**build_arguments())

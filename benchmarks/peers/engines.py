"""How each server is started beside Tercet, on the same model files and all cores; README.md says how to install them.

Every server gets what it was found to be fastest with on a machine of few cores, and room for the workload.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...srt.machine.cores import usable_cores
from ...srt.model_files.model_config import load_model_config
from ..provenance import hardware
from .model_files import ModelFiles, quantized_file
from .server import run_to_end

HOST = "127.0.0.1"
_VLLM_KV_GIB = 4
_CONTEXT_LEN = 4096
_LLAMA_KV_NUMBER_BYTES = 2
"""Its keys and values are float16 by default."""
_MALLOC_PLACES = ("/usr/lib/*/libtcmalloc_minimal.so.4", "/usr/lib*/libtcmalloc_minimal.so.4")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
_SHIM = Path(__file__).with_name("transformers_shim.py")


@dataclass(frozen=True)
class Room:
    """What a workload needs at once."""

    requests: int
    tokens: int
    """of one request, prompt and answer"""


@dataclass(frozen=True)
class Launch:
    argv: list[str]
    model: str
    """its name in requests"""
    env: Mapping[str, str] = field(default_factory=dict)
    """in addition to the caller's"""
    kv_bytes: int | None = None
    """Of its KV memory, where that is asked for; None: its log may tell."""


@dataclass(frozen=True)
class Engine:
    """A kind of server."""

    program: str
    """The file that is looked for: in a folder that is named, in its bin/, or on PATH."""
    launch: Callable[[Path, ModelFiles, Room, int], Launch | None]
    """(program, model, room, port) -> how to start it; None: it cannot read this model."""
    kv_size: re.Pattern[str] | None = None
    """Where its log tells the size of its KV memory: a number and its unit, or several that are added up."""
    packages: Sequence[str] = ()
    """Python packages that it may come as, whose metadata have its version; else the program is asked."""
    on_path: bool = False
    """The program's name alone says what it is."""

    def version(self, program: Path) -> str:
        """ "-" where the environment's metadata know none. Raises ServerFailed when the program does not say."""
        if not self.packages:
            said = run_to_end([str(program), "--version"]).strip()
            return said.partition("\n")[0].removeprefix("version: ")
        for package in self.packages:
            for folder in program.parent.parent.glob(f"lib/python3*/site-packages/{package}-*.dist-info"):
                return folder.name.removeprefix(f"{package}-").removesuffix(".dist-info")
        return "-"

    def kv_bytes(self, log: str) -> int | None:
        found = self.kv_size.findall(log) if self.kv_size is not None else []
        return round(sum(float(number) * _UNITS[unit] for number, unit in found)) if found else None


_UNITS = {"MiB": 2**20, "GiB": 2**30, "GB": 2**30}
"""SGLang says GB, and divides by 2**30."""


def locate(engine: Engine, place: Path) -> Path:
    """The program itself, of a path to it or to the environment that it is in. Raises ValueError."""
    if place.is_dir():
        for folder in (place / "bin", place):
            if (folder / engine.program).is_file():
                return folder.absolute() / engine.program
        raise ValueError(f"{place} and its bin/ have no program {engine.program}")
    if not place.is_file():
        raise ValueError(f"{place} does not exist")
    return place.absolute()


def find_on_path() -> dict[str, Path]:
    """The servers whose program can be found by its name, by the name of the engine."""
    found = {name: shutil.which(engine.program) for name, engine in ENGINES.items() if engine.on_path}
    return {name: Path(place) for name, place in found.items() if place is not None}


def _tercet(python: Path, model: ModelFiles, room: Room, port: int) -> Launch:
    argv = [str(python), "-m", "tercet", "serve", str(model.folder), "--dtype", "bfloat16"]
    return Launch([*argv, "--host", HOST, "--port", str(port)], str(model.folder))


def _vllm(program: Path, model: ModelFiles, room: Room, port: int) -> Launch:
    argv = [str(program), "serve", str(model.folder), "--dtype", "bfloat16"]
    argv += ["--max-model-len", str(_CONTEXT_LEN), "--host", HOST, "--port", str(port)]
    return Launch(argv, str(model.folder), _OFFLINE | ({} if hardware()["gpus"] else _vllm_cpu_env(program)))


def _vllm_cpu_env(program: Path) -> dict[str, str]:
    openmp = sorted(program.parent.parent.glob("lib/libiomp5.so"))
    malloc = [path for place in _MALLOC_PLACES for path in sorted(Path("/").glob(place[1:]))]
    preload = [str(found[0]) for found in (malloc, openmp) if found]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(_VLLM_KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{usable_cores() - 1}",  # its "auto" leaves a core idle
        **({"LD_PRELOAD": ":".join(preload)} if preload else {}),
    }


def _llama_cpp(program: Path, model: ModelFiles, room: Room, port: int) -> Launch:
    return _llama_server(program, model.gguf, model, room, port)


def _llama_cpp_quantized(program: Path, model: ModelFiles, room: Room, port: int) -> Launch | None:
    file = quantized_file(model.name)
    return None if file is None else _llama_server(program, file, model, room, port)


def _llama_server(program: Path, file: Path, model: ModelFiles, room: Room, port: int) -> Launch:
    threads = str(usable_cores())
    # Its context is shared out to the slots in equal parts.
    context_len = room.requests * (-(-room.tokens // 256) * 256)
    argv = [str(program), "-m", str(file), "-np", str(room.requests), "-c", str(context_len), "--cont-batching"]
    argv += ["-t", threads, "-tb", threads, "--host", HOST, "--port", str(port)]
    config = load_model_config(model.folder)
    numbers_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return Launch(argv, "default", kv_bytes=context_len * numbers_per_token * _LLAMA_KV_NUMBER_BYTES)


def _transformers(python: Path, model: ModelFiles, room: Room, port: int) -> Launch:
    argv = [str(python), "-P", str(_SHIM), "serve", str(model.folder), "--continuous-batching", "--dtype", "bfloat16"]
    device = "auto" if hardware()["gpus"] else "cpu"
    return Launch([*argv, "--device", device, "--host", HOST, "--port", str(port)], str(model.folder), _OFFLINE)


def _sglang(python: Path, model: ModelFiles, room: Room, port: int) -> Launch:
    argv = [str(python), "-m", "sglang.launch_server", "--model-path", str(model.folder), "--dtype", "bfloat16"]
    device = [] if hardware()["gpus"] else ["--device", "cpu"]
    return Launch([*argv, *device, "--host", HOST, "--port", str(port)], str(model.folder), _OFFLINE)


TERCET = "tercet"
OWN_PYTHON = Path(sys.executable)
ENGINES = {
    TERCET: Engine("python", _tercet, re.compile(r"KV pool of \d+ tokens \(([\d.]+) (MiB|GiB)\)"), ["tercet"]),
    "vllm": Engine(
        "vllm", _vllm, re.compile(r"Explicitly set \(([\d.]+)/[\d.]+\) (GiB|MiB)"), ["vllm", "vllm_cpu"], on_path=True
    ),
    "llama.cpp": Engine("llama-server", _llama_cpp, on_path=True),
    "llama.cpp-q4_1": Engine("llama-server", _llama_cpp_quantized),
    "transformers": Engine("python", _transformers, packages=["transformers"]),
    "sglang": Engine("python", _sglang, re.compile(r"\b[KV]{1,2} size: ([\d.]+) (GB)"), ["sglang"]),
}

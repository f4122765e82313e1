"""The endpoints that profile the engine, as SGLang's clients call them."""

from __future__ import annotations

import re
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ...managers.tokenizer_manager import TokenizerManager
from ..errors import InvalidRequest, NotAllowed
from ..profile_messages import StartProfileReq
from .allowed_paths import path_inside
from .routing import Server, json_response
from .wire import BodyCodec, Wire, doc, only, shown

MAX_STEPS = 500
"""Steps of a profile. The scheduler keeps all events of a profile in memory, and writes them between two steps."""
_PREFIX = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


class StartProfileBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /start_profile."""

    output_dir: Annotated[
        str | None, doc("Folder of the trace, inside that of the flag --profile-dir, which is the default")
    ] = None
    num_steps: Annotated[
        int | None,
        doc(f"Number of steps to record, 1 to {MAX_STEPS} (default); then, or at /stop_profile, the trace is written"),
    ] = None
    activities: Annotated[
        list[Literal["CPU", "GPU"]] | None,
        doc("What to record: CPU, GPU or both (default); a GPU only if the engine has one"),
    ] = None
    record_shapes: Annotated[bool | None, doc("Record the shapes of the operations' inputs, default false")] = None
    with_stack: Annotated[
        bool | None, doc("Record the Python functions that call the operations, default false; steps take longer")
    ] = None
    profile_prefix: Annotated[
        str | None, doc("Start of the file's name: up to 64 letters, digits, dots, dashes and underscores")
    ] = None
    start_step: Annotated[Any, only("recording begins with the next step")] = None
    profile_by_stage: Annotated[Any, only("one trace has all steps, with their kinds in their names", False)] = None
    profile_stages: Annotated[Any, only("one trace has all steps, with their kinds in their names")] = None
    merge_profiles: Annotated[Any, only("one process runs the model, so there is one trace", True, False)] = None


class ProfileAnswer(msgspec.Struct, frozen=True):
    message: Annotated[str, doc("What was done")]
    trace: Annotated[str, doc("The file of the trace, relative to the folder of --profile-dir")]


START_PROFILE_CODEC = BodyCodec(StartProfileBody)


async def start_profile(server: Server, request: Request, body: StartProfileBody) -> ASGIApp:
    """Answers when the profile has started. Raises NotAllowed, InvalidRequest."""
    root = _profile_dir(server)
    folder = path_inside(root, body.output_dir or "", param="output_dir", flag="--profile-dir")
    path = await begin_profile(server.manager, folder, body)
    return json_response(ProfileAnswer("the profile has started", _relative(path, root)))


async def stop_profile(server: Server, request: Request, body: None) -> ASGIApp:
    """Answers when the trace is written. Raises NotAllowed, InvalidRequest."""
    root = _profile_dir(server)
    path = await server.manager.profile.stop()
    return json_response(ProfileAnswer("the profile has ended, and its trace is written", _relative(path, root)))


async def begin_profile(manager: TokenizerManager, folder: Path, body: StartProfileBody) -> str:
    """Starts a profile whose trace goes to `folder`. Returns the file. Raises InvalidRequest."""
    num_steps = MAX_STEPS if body.num_steps is None else body.num_steps
    if not 1 <= num_steps <= MAX_STEPS:
        raise InvalidRequest(f"num_steps must be in [1, {MAX_STEPS}], got {body.num_steps}", param="num_steps")
    activities = {"CPU", "GPU"} if body.activities is None else set(body.activities)
    if manager.facts.device == "cpu":
        activities.discard("GPU")
    if not activities:
        raise InvalidRequest(
            f"activities has nothing that can be recorded on {manager.facts.device}", param="activities"
        )
    prefix = body.profile_prefix
    if prefix is not None and not _PREFIX.fullmatch(prefix):
        raise InvalidRequest(
            "profile_prefix must have 1 to 64 letters, digits, dots, dashes or underscores, and must not begin with a "
            f"dot, got {shown(prefix)}",
            param="profile_prefix",
        )
    name = f"{time.time_ns() // 1_000_000}.trace.json.gz"
    question = partial(
        StartProfileReq,
        path=str(folder / (name if prefix is None else f"{prefix}-{name}")),
        num_steps=num_steps,
        cpu="CPU" in activities,
        gpu="GPU" in activities,
        record_shapes=bool(body.record_shapes),
        with_stack=bool(body.with_stack),
    )
    return await manager.profile.start(lambda call_id: question(call_id=call_id))


def make_profile_dir(folder: Path) -> None:
    """Makes the folder of --profile-dir, unless it exists. Raises OSError if it cannot have files."""
    if not folder.is_dir():
        folder.mkdir(parents=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _profile_dir(server: Server) -> str:
    folder = server.manager.server_args.profile_dir
    if folder is None:
        raise NotAllowed("profiles are off; start the server with --profile-dir")
    return folder


def _relative(path: str, root: str) -> str:
    return str(Path(path).relative_to(Path(root).resolve()))

"""How long the simulated device and its host need for a step: a built-in profile, or one from a file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ...managers.step_cost import StepCost

_MAX_SECONDS = 3600.0


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The coefficients of a StepCost in seconds, and the host. `name` says where they come from; reports show it."""

    name: str
    step_s: float
    extend_s: float
    row_s: float
    prompt_token_s: float
    prompt_context_s: float
    decode_context_s: float
    joined_row_s: float = 0.0
    host_s: float = 0.0
    """Of the host for each step: planning it, and processing its results."""
    wake_s: float = 0.0
    """From the first message to an idle scheduler until it reads its messages. So those of a burst come together."""
    is_asynchronous: bool = False
    """Whether the host plans a step while the device works on the one before, as with a GPU."""

    def __post_init__(self) -> None:
        """Raises ValueError for costs that no machine has: time would run backwards."""
        for name in (*StepCost._fields, "host_s", "wake_s"):
            if not 0 <= getattr(self, name) <= _MAX_SECONDS:
                raise ValueError(f"{name} must be in [0, {_MAX_SECONDS:g}], got {getattr(self, name)}")

    @classmethod
    def of(cls, name: str, cost: StepCost, *, host_s: float = 0.0, is_asynchronous: bool = False) -> DeviceProfile:
        return cls(name=name, host_s=host_s, is_asynchronous=is_asynchronous, **cost._asdict())

    @property
    def cost(self) -> StepCost:
        return StepCost(*(getattr(self, name) for name in StepCost._fields))


PROFILES = {
    profile.name: profile
    for profile in (
        DeviceProfile(
            name="smollm2-135m-2-cores",
            step_s=8.5e-3,
            extend_s=0.0,
            row_s=2.3e-4,
            prompt_token_s=5.7e-4,
            prompt_context_s=3e-7,
            decode_context_s=9e-7,
            joined_row_s=3.4e-4,
            host_s=5e-4,
        ),
        DeviceProfile(
            name="llama-3.1-8b-h100-estimate",
            step_s=5.5e-3,
            extend_s=0.0,
            row_s=2e-5,
            prompt_token_s=3.2e-5,
            prompt_context_s=1e-9,
            decode_context_s=4.5e-8,
            joined_row_s=1.2e-5,
            host_s=1e-3,
            is_asynchronous=True,
        ),
    )
}
"""The first: SmolLM2-135M in bfloat16 on 2 cores of an AMD EPYC (Zen 4), from the figures of docs/performance.md. The
second is no measurement: 16 GB of weights and 128 KiB of KV per token at 3 TB/s, and products at 0.5 PFLOP/s.
In both, a row that decodes in an extend step is taken to cost as much as a prompt token."""
DEFAULT_PROFILE = "smollm2-135m-2-cores"


def load_profile(named: str) -> DeviceProfile:
    """The profile of this name, or the one in a JSON file. Raises ValueError."""
    if named in PROFILES:
        return PROFILES[named]
    path = Path(named)
    try:
        if not path.is_file():
            raise ValueError(f"--cost must be a JSON file or one of {', '.join(PROFILES)}, got {named!r}")
        return msgspec.json.decode(path.read_bytes(), type=DeviceProfile)
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise ValueError(f"--cost {named}: {error}") from error


def save_profile(profile: DeviceProfile, path: Path) -> None:
    """Write a profile as JSON, for `--cost`."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")

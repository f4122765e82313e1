"""The setting --tenant-weights: the shares of tenants in the engine."""

from __future__ import annotations

from .tenant_names import tenant_name


def parse_weights(given: str | None) -> dict[str, float]:
    """Weights by tenant, of a text such as `alice=2,bob=0.5`. Raises ValueError."""
    weights: dict[str, float] = {}
    for part in (given or "").split(","):
        if not part.strip():
            continue
        name, _, value = part.rpartition("=")
        name = tenant_name(name.strip())
        weight = _number(value)
        if not name or weight is None:
            raise ValueError(
                f"--tenant-weights must be tenants with weights in [0.001, 1000], such as alice=2,bob=0.5; got {part!r}"
            )
        if name in weights:
            raise ValueError(f"--tenant-weights has the tenant {name!r} twice")
        weights[name] = weight
    return weights


def _number(text: str) -> float | None:
    try:
        weight = float(text)
    except ValueError:
        return None
    return weight if 0.001 <= weight <= 1000 else None

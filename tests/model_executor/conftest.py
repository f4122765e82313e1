"""What tests of the sampler share: they run on every way of choosing tokens on a CPU."""

from __future__ import annotations

import pytest

from tercet.model_executor import cpu_extension


@pytest.fixture(params=["compiled", "torch"])
def each_cpu_choice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samplers on a CPU choose by its compiled operations, and then in plain torch."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_extension, "load", lambda: None)
    elif cpu_extension.load() is None:
        pytest.skip("no build of csrc/cpu for this processor")

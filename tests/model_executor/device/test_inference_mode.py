"""Methods that run in torch's inference mode, whatever mode their thread is in."""

from __future__ import annotations

import pytest
import torch

from tercet.model_executor.device.inference_mode import in_inference_mode, inference_mode


class Engine:
    @in_inference_mode
    def modes(self, *outer: bool, fail: bool = False) -> tuple[bool, ...]:
        """The modes of the caller, then that of this call."""
        if fail:
            raise ValueError("failed")
        return *outer, torch.is_inference_mode_enabled()


def test_a_method_runs_in_inference_mode_and_its_caller_does_not() -> None:
    engine = Engine()
    assert engine.modes(torch.is_inference_mode_enabled()) == (False, True)
    with pytest.raises(ValueError, match="failed"):
        engine.modes(fail=True)
    assert not torch.is_inference_mode_enabled()


def test_a_thread_that_is_in_the_mode_stays_in_it() -> None:
    with inference_mode():
        assert Engine().modes(torch.is_inference_mode_enabled()) == (True, True)
        assert torch.is_inference_mode_enabled()
    assert not torch.is_inference_mode_enabled()

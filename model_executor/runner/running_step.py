"""A step of a ModelRunner whose forward pass is queued."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..device.device_buffers import TokenCopy
from ..sampling.draft_verification import Verified
from ..sampling.row_logprobs import PromptLogprobs, SampledLogprobs
from ..step import Choices, Int32Array, StepOutput, TokenMasks
from .hidden_states import ArrivingStates
from .hidden_sums import ArrivingSums
from .host_kv import CopiesUnderWay
from .recorded_steps import StepHead

if TYPE_CHECKING:  # it imports this file
    from .model_runner import ModelRunner


class StepExtras(NamedTuple):
    """What a step returns besides its new tokens, on its way to the host. None: nothing of the kind is wanted."""

    prompts: PromptLogprobs | None = None
    sums: ArrivingSums | None = None
    states: ArrivingStates | None = None


NO_EXTRAS = StepExtras()


class RunningStep:
    """The LaunchedStep of a ModelRunner: a step whose forward pass is queued."""

    def __init__(
        self,
        runner: ModelRunner,
        head: StepHead,
        rows: Int32Array,
        seq_lens: Int32Array,
        extras: StepExtras = NO_EXTRAS,
        drafted: Choices | None = None,
    ) -> None:
        """`rows`, `seq_lens`: of the choices. `drafted`: the choices of a step with drafts."""
        self._runner = runner
        self._forward: tuple[StepHead, Int32Array, Int32Array] | None = None
        if len(rows):
            self._forward = head, rows, seq_lens
        self._tokens: TokenCopy | None = None
        self._logprobs: SampledLogprobs | None = None
        self._extras = extras
        self._drafted = drafted
        self._verified: Verified | None = None
        self.copies: CopiesUnderWay | None = None

    def sample(self, masks: TokenMasks | None = None) -> None:
        if self._forward is None:
            return
        drafts = None if self._drafted is None else self._drafted.drafts
        self._tokens, self._logprobs = self._runner.choose(*self._forward, masks, drafts)
        self._forward = None  # the logits' memory is free for the next step
        if self._drafted is not None:
            self._verified = self._runner.verify(self._tokens, self._drafted)

    def wait(self) -> StepOutput:
        if self.copies is not None:
            self.copies.wait()
        tokens = np.empty(0, np.int32) if self._tokens is None else self._tokens.wait()
        verified = self._verified
        num_tokens = None if verified is None else verified.num_tokens
        if verified is not None:
            tokens = verified.tokens
        if self._logprobs is None and self._extras is NO_EXTRAS:
            return StepOutput(tokens, num_tokens)
        prompts, sums, states = self._extras
        logprobs = {} if self._logprobs is None else self._logprobs.wait()
        return StepOutput(
            tokens,
            num_tokens,
            logprobs=logprobs if verified is None else verified.merge(logprobs),
            prompt_logprobs=[] if prompts is None else prompts.wait(),
            hidden_sums=[] if sums is None else sums.wait(),
            hidden_states=[] if states is None else states.wait(),
        )

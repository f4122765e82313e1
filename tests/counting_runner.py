"""A FakeRunner that counts the tokens of rows with penalties, as the device does."""

from __future__ import annotations

from typing import Any

from fakes import WEIGHTS_STEP, FakeRunner, FakeStep
from tercet.model_executor.step import INVALID_TOKEN, StepInputs, TokenMasks


class CountingRunner(FakeRunner):
    """Checks at every choice that it has counted all output tokens before, each once and in their order.

    Otherwise penalties would count too few tokens or too many: the runner counts only what it chooses, and what a new
    row brings.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_counted_drafts = 0
        """Accepted drafts of rows with penalties."""
        self._counted: dict[int, tuple[int, list[int]]] = {}
        """The length of the prompt and the counted tokens of each row with penalties."""

    def launch(self, step: StepInputs) -> FakeStep:
        for new in step.new_rows:
            self._counted.pop(new.row, None)
            if new.sampling.has_penalties:
                self._counted[new.row] = len(new.prompt_ids), new.output_ids.tolist()
        launched = super().launch(step)
        sample = launched.sample

        def sample_and_count(masks: TokenMasks | None = None) -> None:
            sample(masks)
            self._count(launched)

        launched.sample = sample_and_count  # type: ignore[method-assign]
        return launched

    def _count(self, launched: FakeStep) -> None:
        for tokens, (row, seq_len, num_drafts) in zip(launched._rows, launched._places, strict=True):
            if row not in self._counted:
                continue
            prompt_len, output = self._counted[row]
            slots = self._table[row, prompt_len : seq_len - num_drafts]
            assert (self._kv_token[slots] % WEIGHTS_STEP).tolist() == output, f"row {row} has counted other tokens"
            if INVALID_TOKEN in tokens:
                del self._counted[row]  # a step in flight has another token than the host
            else:
                output += tokens
                self.num_counted_drafts += len(tokens) - 1

"""The log probabilities of one request: which prompt tokens are still to be computed, and what was not sent yet."""

from __future__ import annotations

from ..model_executor.step import Int32Array, PromptScore
from ..srt.logprobs import LogprobOptions, Logprobs, NewLogprobs


class ReqLogprobs:
    """It survives a retraction: the prompt tokens that a launched step has computed are not computed again."""

    def __init__(self, options: LogprobOptions, prompt_ids: Int32Array) -> None:
        self.options = options
        self._prompt_ids = prompt_ids
        self._next = options.input_start(len(prompt_ids))
        """The first position whose logits no step has computed. They belong to the prompt token after it."""
        self._input: list[Logprobs] = []
        self._output: list[Logprobs] = []
        self._is_input_sent = False

    @property
    def reusable_len(self) -> int | None:
        """Tokens at the start of the prompt whose KV may come from the cache, because their logits are not needed.

        None: all.
        """
        return self._next if self._next < len(self._prompt_ids) - 1 else None

    def resume(self) -> None:
        """The client has the first output from an engine that has died, and with it those of the prompt."""
        self._next = len(self._prompt_ids) - 1
        self._is_input_sent = True

    def plan(self, row: int, first: int, start: int, end: int) -> PromptScore | None:
        """What a step computes of the prompt, if it has positions [start, end) of the request.

        `first`: index of position `start` in the step. The result of a planned step always arrives, so the next plan
        goes on behind it.
        """
        assert start <= self._next or self.reusable_len is None
        begin, end = self._next, min(end, len(self._prompt_ids) - 1)
        if begin >= end:
            return None
        self._next = end
        return PromptScore(row, first + begin - start, self._prompt_ids[begin + 1 : end + 1])

    def add_input(self, found: Logprobs) -> None:
        """Keep the result of a PromptScore."""
        self._input.append(found)

    def add_output(self, found: Logprobs) -> None:
        """Keep those of a step's new tokens."""
        self._output.append(found)

    def take_newest(self) -> Logprobs:
        """Those of one output token. All others were sent before."""
        return self._output.pop()

    def take(self, num_tokens: int) -> NewLogprobs:
        """What was not sent yet: those of `num_tokens` output tokens and, once, those of the prompt.

        There are more of them than tokens if the request has ended and has dropped tokens.
        """
        output, self._output = Logprobs.concat(self._output).first(num_tokens), []
        found = None
        if not self._is_input_sent:
            self._is_input_sent = True
            found = Logprobs.concat(self._input)
            self._input = []
        return NewLogprobs(found, output)

"""Processes a finished step: each request appends its tokens, may end and release its KV, and sends its output."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..model_executor.step import INVALID_TOKEN, StepOutput
from ..srt.errors import InvalidLogits, TercetError
from ..srt.io_struct import AbortFinish, FinishReason
from .grammar import GrammarFailed
from .kv_cache_manager import KVCacheManager
from .req import Req, Stage
from .request_queues import RequestQueues
from .schedule_batch import ScheduleBatch
from .scheduler_io import SchedulerIO
from .scheduler_metrics import SchedulerMetrics
from .token_masks import grammar_error

logger = logging.getLogger(__name__)


class ResultProcessor:
    """Processes results of steps. Only this class ends requests."""

    def __init__(self, kv: KVCacheManager, queues: RequestQueues, io: SchedulerIO, metrics: SchedulerMetrics) -> None:
        self._kv = kv
        self._queues = queues
        self._io = io
        self._metrics = metrics
        self._aborted: list[Req] = []
        self._has_several_tokens = False

    def take_several_tokens(self) -> bool:
        """Whether a request has got several tokens at once since the last call: accepted drafts or forced tokens."""
        found, self._has_several_tokens = self._has_several_tokens, False
        return found

    def process(self, batch: ScheduleBatch, output: StepOutput) -> None:
        """Gives the new tokens to the requests, and ends those that are finished. `output`: that of the step.

        The finish test of each token, in order: pending abort, invalid logits, stop string, stop token or EOS, length,
        end of the grammar.
        """
        for req in batch.reqs:
            req.num_steps_in_flight -= 1
        num_known = _num_output_tokens(batch.sampled)
        rows, put = output.rows(), self._io.put
        new = self._io.next_tokens
        add_rid, add_id = new.rids.append, new.token_ids.append
        num_drafts = batch.num_drafts
        if num_drafts is not None:
            self._has_several_tokens = True
            self._free_rejected(batch.sampled, num_drafts, rows)
        if output.logprobs or batch.scored:
            _keep_logprobs(batch, output)
        if batch.pooled or batch.shown:
            _keep_hidden(batch, output)
        for index, (req, tokens) in enumerate(zip(batch.sampled, rows, strict=True)):
            if tokens[-1] == INVALID_TOKEN:
                self._on_invalid_logits(req, tokens[:-1])
                continue
            # It ended while these tokens were computed, or `finish_aborted` will end it.
            if req.finish is not None or req.pending_abort is not None:
                continue
            if req.grammar is None:
                finish = self._accept(req, tokens)
            else:
                finish = self._accept_constrained(req, int(batch.sampled_lens[index]), tokens)
            if num_drafts is not None and num_drafts[index]:
                self._count_accepted(req, num_drafts[index], int(batch.sampled_lens[index]), tokens)
            if finish is not None:
                self.finish(req, finish)
            elif req.is_streaming and len(tokens) == 1:
                req.num_sent += 1
                add_rid(req.rid)
                add_id(tokens[0])
                if output.logprobs:
                    new.logprobs.append(None if req.logprobs is None else req.logprobs.take_newest())
            elif len(req.output_ids) >= req.next_output_len:
                put(req.take_output())
        self._metrics.on_result(_num_output_tokens(batch.sampled) - num_known)

    def _free_rejected(self, reqs: Sequence[Req], num_drafts: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Frees the KV of rejected drafts. Must be called before any KV of these requests enters the cache.

        A step with d drafts returns a <= d + 1 tokens. The newest token and the first a - 1 drafts were right, so the
        KV of the last d + 1 - a positions is of wrong tokens.
        """
        for req, num, tokens in zip(reqs, num_drafts, rows, strict=True):
            num_rejected = num + 1 - len(tokens)
            assert num_rejected >= 0, "a step returned more tokens than it computed"
            if num_rejected and req.row:
                self._kv.truncate(req, req.kv_len - num_rejected)

    def _count_accepted(self, req: Req, num_drafts: int, length: int, tokens: Sequence[int]) -> None:
        """Counts the accepted drafts of a request. Right ones after its end do not count. `length`: of the request
        before `tokens`."""
        num_new = min(req.num_tokens - length, len(tokens))  # forced tokens may follow them
        num_accepted = max(num_new - 1, 0)
        req.num_drafts += num_drafts
        req.num_accepted_drafts += num_accepted
        self._metrics.on_verified(num_drafts, num_accepted)

    def _accept_constrained(self, req: Req, length: int, tokens: Sequence[int]) -> FinishReason | None:
        """As `_accept`, and then also the tokens that the grammar forces. `length`: of the request before `tokens`."""
        finish = None
        if length == req.num_tokens:  # otherwise the step has sampled a forced token, which was taken before
            finish = self._accept(req, tokens)
            if finish is None and req.takes_forced_tokens:
                finish = self._accept_forced(req)
        req.num_unchecked = max(req.num_tokens - length - len(tokens), 0)
        self._has_several_tokens |= req.num_unchecked > 0
        return finish

    def _accept(self, req: Req, tokens: Sequence[int]) -> FinishReason | None:
        try:
            return req.accept(tokens)
        except Exception as error:
            return _failure_of(req, error)

    def _accept_forced(self, req: Req) -> FinishReason | None:
        try:
            return req.accept_forced()
        except Exception as error:
            return _failure_of(req, error)

    def _on_invalid_logits(self, req: Req, tokens: Sequence[int]) -> None:
        """Ends the request, unless it has ended while this step was in flight. Everything that it computed leaves the
        cache, even if the request waits or has ended in another way. `tokens`: the valid tokens of the same step."""
        if req.stage is not Stage.FINISHED:
            invalid = InvalidLogits("the model's logits for this request are not finite")
            self.finish(req, req.pending_abort or self._accept(req, tokens) or AbortFinish.of(invalid))
        self._kv.discard(req)

    def finish(self, req: Req, reason: FinishReason) -> None:
        """Ends the request now, in any stage. Its KV goes to the cache."""
        req.finish = reason
        if req.row:
            self._kv.release(req)
        if req.options.changes_retention and not isinstance(reason, AbortFinish):
            self._kv.retain(req.token_ids(), req.options.retention_seconds or 0.0, req.options)
        self._queues.finish(req)
        self._io.put(req.take_output())
        self._metrics.on_finish(req)

    def abort(self, req: Req, reason: AbortFinish) -> None:
        """Keeps the request out of further steps. It ends when it is in no step in flight."""
        if req.pending_abort is None:
            req.pending_abort = reason
            self._aborted.append(req)

    def finish_aborted(self) -> None:
        still_in_flight = []
        for req in self._aborted:
            if req.num_steps_in_flight:
                still_in_flight.append(req)
            elif req.stage is not Stage.FINISHED:
                assert req.pending_abort is not None
                self.finish(req, req.pending_abort)
        self._aborted = still_in_flight


def _num_output_tokens(reqs: Sequence[Req]) -> int:
    return sum([len(req.output_ids) for req in reqs])


def _failure_of(req: Req, error: Exception) -> AbortFinish:
    """The error of a request whose new tokens could not be processed. Other requests continue."""
    if isinstance(error, GrammarFailed):
        return AbortFinish.of(grammar_error(req, error))
    logger.error("Could not check the stop strings of request %s", req.rid, exc_info=error)
    return AbortFinish.of(TercetError("the stop strings of this request could not be checked"))


def _keep_hidden(batch: ScheduleBatch, output: StepOutput) -> None:
    for req, found in zip(batch.pooled, output.hidden_sums, strict=True):
        assert req.pooling is not None
        req.pooling.add(found)
    for req, states in zip(batch.shown, output.hidden_states, strict=True):
        assert req.hidden is not None
        req.hidden.add(states)


def _keep_logprobs(batch: ScheduleBatch, output: StepOutput) -> None:
    for req, found in zip(batch.scored, output.prompt_logprobs, strict=True):
        assert req.logprobs is not None
        req.logprobs.add_input(found)
    for index, found in output.logprobs.items():
        logprobs = batch.sampled[index].logprobs
        assert logprobs is not None
        logprobs.add_output(found)

"""The TokenizerManager of an HTTP worker. Its scheduler is the parent process, which has the engine.

It tokenises and checks prompts, and hands outputs to their readers. All that concerns the engine as a whole (restarts,
pauses, updates of the weights, the scheduler's state) is the parent's work, which sends news of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from ..srt.io_struct import ToScheduler
from ..srt.model_files.model_config import ModelConfig
from ..srt.server_args import ServerArgs
from ..srt.text.tokenizer import Tokenizer
from ..srt.worker_messages import EngineNews, SampleReq
from .generation import Generation
from .grammar_checker import GrammarChecks
from .tokenizer_manager import TokenizerManager


class ParentLink(Protocol):
    """The way to the parent: an `ipc.Sender`, or a test's fake. It takes samples instead of GenerateReqs."""

    def send(self, message: ToScheduler | SampleReq) -> None: ...


class WorkerManager(TokenizerManager):
    """`number`: that of the worker, which no other process of the server has or had."""

    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        news: EngineNews,
        parent: ParentLink,
        grammars: GrammarChecks,
        number: int,
    ) -> None:
        self._stall: str | None = None
        self._is_parent_silent = False
        own_args = dataclasses.replace(server_args, random_seed=_seed_of(server_args.random_seed, number))
        super().__init__(own_args, model_config, tokenizer, news.facts, parent, grammars, key_prefix=f"{number}-")
        self._parent = parent
        self.hear(news)

    @property
    def stall(self) -> str | None:
        """As the parent tells it; "waiting" while the parent is silent."""
        return self._stall or ("waiting" if self._is_parent_silent else None)

    def set_parent_silent(self, is_silent: bool) -> None:
        """Whether the parent is silent, so that its outputs do not come."""
        began, self._is_parent_silent = is_silent and self.stall is None, is_silent
        if began:
            self.tell_stall()

    def hear(self, news: EngineNews) -> None:
        """The state of the engine has changed."""
        if news.facts != self.facts:
            self.facts = news.facts
            self.inputs.update(news.facts)
            self.adapters.use(news.facts.adapters)
        args = self.server_args
        weights = (news.model_path, news.load_format, news.weight_version, news.dtype)
        if weights != (args.model_path, args.load_format, args.weight_version, args.dtype):
            self.weights.use(*weights)
        self.draining = news.draining
        began, self._stall = self.stall is None and news.stall is not None, news.stall
        if began:
            self.tell_stall()
        if news.failure is not None:
            self.fail(news.failure)

    def hear_of_recoveries(self, by_key: Mapping[str, int]) -> None:
        """How often the engine was restarted while it worked on these samples."""
        for key, number in by_key.items():
            generation = self._requests.generation(key)
            if generation is not None:
                generation.num_recoveries = number

    def abort_by_name(self, name: str | None) -> bool:
        """Aborts the request or prompt of exactly this name; None: all requests. Returns whether there was one."""
        if name is not None:
            return self.abort(name)
        had_any = self.num_unfinished > 0
        self.abort_all()
        return had_any

    def _resend(self, generation: Generation, *, is_suspect: bool = False) -> None:
        """The parent knows the tokens so far of the sample, and whether it is a suspect."""
        request = generation.request
        assert request is not None
        generation.mark_sent()
        sample = SampleReq(request.rid, request.input_ids, request.options, generation.rid, generation.index)
        self._parent.send(sample)


def _seed_of(seed: int | None, number: int) -> int | None:
    """Another seed for each worker: otherwise the first requests of all workers would have equal seeds."""
    return None if seed is None else (seed + number * 0x9E3779B1) % 2**32

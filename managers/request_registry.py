"""The registry of the TokenizerManager: all requests that have not ended, by the names that clients use.

A request is registered before its first await, until its last sample has ended. So an abort by name, an engine failure
and a shutdown find it, even while its prompt is rendered or tokenised. Names are unique: a request with several prompts
has a name, and each of its prompts has another.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

import msgspec

from ..srt.errors import InvalidRequest, TercetError
from ..srt.grammar_spec import ReasoningSpan
from ..srt.io_struct import GenerateReq, pack_ids
from ..srt.request_options import RequestOptions
from .generation import Generation, GenerationOwner
from .input_processor import InputProcessor

_MAX_NAME_CHARS = 256


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt of a request."""

    content: str | Sequence[int] | Callable[[], Awaitable[str | Sequence[int]]]
    """A text, token ids, or a coroutine function that makes one of them."""
    options: RequestOptions
    rid: str | None = None
    """None: a random name."""
    add_special_tokens: bool = True
    truncates: bool | None = None
    """Whether a prompt that is too long loses its first tokens. None: as `--allow-auto-truncate` says."""
    param: str = "prompt"
    """The field of the request's body that has the prompt, for error messages."""
    grammar_param: str | None = None
    """The field of the request's body that has the grammar, for error messages; None: the kind of the grammar."""
    reasoning: Callable[[], ReasoningSpan | None] = lambda: None
    """The reasoning before the text of the grammar. Called when the text is rendered."""


class PromptSamples:
    """The samples of one prompt."""

    def __init__(self, prompt: Prompt, rid: str, first_seed: int, request: Request) -> None:
        self.prompt = prompt
        self.rid = rid
        self.first_seed = first_seed
        """The seed of the first sample, drawn or given. Sample i has `first_seed + i`."""
        self.request = request
        self.prompt_ids: Sequence[int] = ()
        """Empty until the prompt is tokenised. It stays empty if all samples end before that."""
        self.packed_ids = b""
        """The ids in the form of a GenerateReq (`pack_ids`)."""
        self.options = prompt.options
        self._registry = request.registry
        self.generations = [
            self._registry.make_generation(self, i, self._registry.next_key()) for i in range(prompt.options.sampling.n)
        ]
        self._num_unfinished = len(self.generations)
        self._waiter: UnlessOver | None = None

    @property
    def is_over(self) -> bool:
        return self._num_unfinished == 0

    def on_prepared(self, ids: Sequence[int]) -> None:
        """The prompt is rendered, tokenised and checked. Its end says which reasoning comes before a grammar."""
        self.prompt_ids = ids
        self.packed_ids = pack_ids(ids)
        span = self.prompt.reasoning()
        if span is not None:
            self.options = msgspec.structs.replace(self.options, reasoning=span)

    def abort(self) -> None:
        """Asks the engine to stop; every sample still has its last output. See Generation.abort."""
        for generation in self.generations:
            generation.abort()

    def close(self) -> None:
        """Ends every sample without waiting for the engine."""
        for generation in self.generations:
            generation.close()

    def unless_over(self) -> UnlessOver:
        """A context manager whose block is left when the last sample ends. Check `is_over` after the block."""
        self._waiter = UnlessOver()
        return self._waiter

    def stop(self, generation: Generation) -> None:
        self._registry.send_abort(generation.key)

    def held_text(self, generation: Generation) -> str:
        return self._registry.inputs.held_text(self.options, generation.output_ids)

    def on_end(self, generation: Generation) -> None:
        self._num_unfinished -= 1
        self._registry.forget(generation)
        if self.is_over:
            self._registry.free(self.rid)
            self.request.on_prompt_over()
            if self._waiter is not None:
                self._waiter.leave()


class AdoptedSample:
    """The owner of one sample that another process has prepared."""

    def __init__(self, registry: RequestRegistry, request: GenerateReq, name: str) -> None:
        self.rid = name
        self.options = request.options
        self.prompt_ids: Sequence[int] = memoryview(request.input_ids).cast("i")  # a sequence without a copy
        self._registry = registry

    def stop(self, generation: Generation) -> None:
        self._registry.send_abort(generation.key)

    def held_text(self, generation: Generation) -> str:
        return self._registry.inputs.held_text(self.options, generation.output_ids)

    def on_end(self, generation: Generation) -> None:
        self._registry.forget(generation)


class UnlessOver:
    """A context manager. `leave` cancels the wait inside its block, and nothing else, like asyncio.timeout."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._num_cancelled = 0
        self._is_left = False

    def leave(self) -> None:
        if self._task is not None and not self._is_left:
            self._is_left = True
            self._task.cancel()

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._num_cancelled = self._task.cancelling()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        task, self._task = self._task, None
        assert task is not None
        # If other code has cancelled the task, too, then the error propagates.
        return self._is_left and task.uncancel() <= self._num_cancelled and kind is asyncio.CancelledError


class Request:
    """A client's request: `n` samples of each of its prompts."""

    def __init__(self, registry: RequestRegistry, name: str, prompts: Sequence[Prompt]) -> None:
        self.registry = registry
        self.name = name
        self.prompts: list[PromptSamples] = []
        self._num_unfinished = len(prompts)

    @property
    def num_samples(self) -> int:
        return sum(len(prompt.generations) for prompt in self.prompts)

    def abort(self) -> None:
        """Asks the engine to stop; every sample still has its last output. See Generation.abort."""
        for prompt in self.prompts:
            prompt.abort()

    def close(self) -> None:
        """Ends every sample without waiting for the engine."""
        for prompt in self.prompts:
            prompt.close()

    def on_prompt_over(self) -> None:
        self._num_unfinished -= 1
        if self._num_unfinished == 0 and len(self.prompts) > 1:
            self.registry.free(self.name)


class RequestRegistry:
    """Owns the names of requests. `send_abort`: tells the engine to stop the sample of a key.

    `inputs`: draws the seeds, and has the tokenizer. `make_generation`: makes one sample, of the prompt, its index and
    its key. `key_prefix`: begins every key.
    """

    def __init__(
        self,
        send_abort: Callable[[str], None],
        inputs: InputProcessor,
        make_generation: Callable[[GenerationOwner, int, str], Generation],
        key_prefix: str,
    ) -> None:
        self.send_abort = send_abort
        self.inputs = inputs
        self.make_generation = make_generation
        self.on_end: Callable[[Generation], object] = lambda sample: None
        """Called with each sample that ends."""
        self._by_name: dict[str, Request | PromptSamples] = {}
        self._generations: dict[str, Generation] = {}
        self._keys = itertools.count()
        self._key_prefix = key_prefix

    def open(self, prompts: Sequence[Prompt], name: str | None) -> Request:
        """Registers a request. Raises InvalidRequest if a name is in use or too long, and then registers nothing."""
        rids = [uuid.uuid4().hex if prompt.rid is None else prompt.rid for prompt in prompts]
        if len(prompts) == 1:
            name = rids[0]
        elif name is None:
            name = uuid.uuid4().hex
        self._check_names(rids if len(prompts) == 1 else [name, *rids])
        request = Request(self, name, prompts)
        if len(prompts) > 1:
            self._by_name[name] = request
        for prompt, rid in zip(prompts, rids, strict=True):
            seed = prompt.options.sampling.sampling_seed
            samples = PromptSamples(prompt, rid, self.inputs.draw_seed() if seed is None else seed, request)
            request.prompts.append(samples)
            self._by_name[rid] = samples
            self._generations |= {generation.key: generation for generation in samples.generations}
        return request

    def adopt(self, request: GenerateReq, name: str, index: int) -> Generation:
        """Registers a sample that another process has prepared. It has the key of its request.

        `name`, `index`: as in the other process, which alone finds requests by their names.
        """
        generation = self.make_generation(AdoptedSample(self, request, name), index, request.rid)
        self._generations[generation.key] = generation
        return generation

    def __len__(self) -> int:
        """The number of samples that have not ended."""
        return len(self._generations)

    def generation(self, key: str) -> Generation | None:
        """The sample of this key. None if it has ended."""
        return self._generations.get(key)

    def live(self) -> list[Generation]:
        """The samples that have not ended, in the order of their requests."""
        return list(self._generations.values())

    def abort(self, name: str) -> bool:
        """Aborts the request or prompt of exactly this name. Returns whether there is one."""
        named = self._by_name.get(name)
        if named is None:
            return False
        named.abort()
        return True

    def abort_all(self) -> None:
        for generation in self.live():
            generation.abort()

    def fail(self, error: TercetError, keys: Iterable[str] | None = None) -> None:
        """Ends the samples of these keys with this error; None: all samples."""
        for key in list(self._generations) if keys is None else keys:
            generation = self._generations.get(key)
            if generation is not None:
                generation.fail(error)

    def next_key(self) -> str:
        return f"{self._key_prefix}{next(self._keys)}"

    def forget(self, generation: Generation) -> None:
        del self._generations[generation.key]
        self.on_end(generation)

    def free(self, name: str) -> None:
        del self._by_name[name]

    def _check_names(self, names: Sequence[str]) -> None:
        seen: set[str] = set()
        for name in names:
            check_name(name, "rid")
            if name in self._by_name:
                raise InvalidRequest(f"rid {name!r} is in use by a request that has not finished", param="rid")
            if name in seen:
                raise InvalidRequest(f"rid {name!r} is in use twice in this request", param="rid")
            seen.add(name)


def check_name(name: str, field: str) -> None:
    """Raises InvalidRequest, with the field, for a name of a request that is empty or too long."""
    if not 0 < len(name) <= _MAX_NAME_CHARS:
        raise InvalidRequest(f"{field} must have 1 to {_MAX_NAME_CHARS} characters, got {len(name)}", param=field)

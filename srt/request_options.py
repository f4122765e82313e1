"""The options of a request: one struct with all its settings except the prompt.

It is passed unchanged from the decoded body to the scheduler:

    body --options_of--> Prompt.options --> GenerateReq.options --> Req.options

A body declares an option as a field of the same name; the OpenAI bodies call `tenant` `user`
(srt/entrypoints/options.py). So a new option is a field here, a field of the bodies that offer it, and the code that
reads it. Each API makes `sampling`, `logprobs`, `adapter` and `prediction` from fields of its own.
`reasoning` follows from the rendered prompt, and `shown_tokens` from the formats that its answer is read in.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .adapters import AdapterRef, namespace_of
from .errors import InvalidRequest
from .grammar_spec import ANYTHING, GrammarSpec, ReasoningSpan
from .logprobs import LogprobOptions
from .sampling_params import SamplingParams
from .settings.checks import MAX_RETENTION_S

MAX_SALT_CHARS = 256
MAX_SESSION_CHARS = 256
Pooling = Literal["last", "mean"]
"""Which hidden states of a prompt its embedding is the mean of: that of the last token, or those of all tokens."""


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The options of one request. Raises InvalidRequest for a value out of range."""

    sampling: SamplingParams
    """In the scheduler `n` is 1, and `max_new_tokens` and `sampling_seed` are always set."""
    cache_salt: str = ""
    """Namespace of the prefix cache: only requests with the same salt share prefixes."""
    stream: bool = False
    """False: the client reads only the complete output, so the scheduler sends no output between the first token and
    the last."""
    priority: int = 0
    """Requests of higher priority go first; with `--schedule-low-priority-values-first`, those of lower priority."""
    tenant: str = ""
    """Whose request it is: the tenants share the engine (`--schedule-policy dlpm`), and /metrics counts for each. The
    key or header of an HTTP request goes before the field of its body (srt/entrypoints/tenants.py)."""
    waiting_timeout: float | None = None
    """Seconds that the request may wait for its first step. None: as long as `--waiting-timeout` allows."""
    running_timeout: float | None = None
    """Seconds that the request may run after that. None: as long as `--running-timeout` allows."""
    session_id: str = ""
    """Whose next turn will continue this request. A session has one retention, that of its last request that ended."""
    retention_seconds: float | None = None
    """Seconds for which the prefix will probably be needed again, from the end of the request on. None: the server
    decides (`--tool-call-retention-s`)."""
    adapter: AdapterRef | None = None
    """The LoRA adapter that computes it; None: the model alone."""
    logprobs: LogprobOptions | None = None
    """None: no log probabilities are computed."""
    return_hidden_states: bool = False
    """The outputs have the final hidden states of prompt and output."""
    pooling: Pooling | None = None
    """None: no embedding is computed. Otherwise the last output has the embedding, if nothing failed."""

    prediction: bytes = b""
    """Token ids (`pack_ids`) of a text that the output probably resembles. Drafts come from it, too."""
    reasoning: ReasoningSpan | None = None
    """The reasoning before the text of the grammar. None: the grammar begins with the first token. Without a grammar,
    it has a limit."""

    shown_tokens: list[int] = []
    """Special tokens that the text has even with `skip_special_tokens`: the marks of tool calls and reasoning."""

    def __post_init__(self) -> None:
        for name, most in (("cache_salt", MAX_SALT_CHARS), ("session_id", MAX_SESSION_CHARS)):
            length = len(getattr(self, name))
            if length > most:
                raise InvalidRequest(f"{name} must have at most {most} characters, got {length}", param=name)
        if not -(2**31) <= self.priority < 2**31:
            raise InvalidRequest(f"priority must be in [-2**31, 2**31), got {self.priority}", param="priority")
        for name in ("waiting_timeout", "running_timeout"):
            limit_s = getattr(self, name)
            if limit_s is not None and not limit_s > 0:
                raise InvalidRequest(f"{name} must be a positive number of seconds, got {limit_s:g}", param=name)
        seconds = self.retention_seconds
        if seconds is not None and not 0 <= seconds <= MAX_RETENTION_S:
            raise InvalidRequest(
                f"retention_seconds must be in [0, {MAX_RETENTION_S:g}], got {seconds:g}", param="retention_seconds"
            )

    @property
    def grammar(self) -> GrammarSpec | None:
        """What the output must match: the grammar of `sampling`, or ANYTHING if only the reasoning has a limit."""
        if self.sampling.grammar is None and self.reasoning is not None and self.reasoning.max_tokens is not None:
            return ANYTHING
        return self.sampling.grammar

    @property
    def namespace(self) -> str:
        """The namespace of the request's prefixes in the cache."""
        return namespace_of(self.cache_salt, self.adapter)

    @property
    def changes_retention(self) -> bool:
        """Whether the end of the request sets the retention of its prefix, or ends the last one of its session."""
        return bool(self.session_id) or self.retention_seconds is not None


def shorter(limit_s: float | None, other_s: float | None) -> float | None:
    """The shorter one of two limits. None: no limit."""
    if limit_s is None or other_s is None:
        return other_s if limit_s is None else limit_s
    return min(limit_s, other_s)

"""The sampling parameters of a request: how its tokens are chosen and when it ends.

They are checked once, in the HTTP process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import get_args

import msgspec

from .errors import InvalidRequest
from .grammar_spec import MAX_GRAMMAR_BYTES, GrammarKind, GrammarSpec
from .plain_values import converted
from .text.stop_regex import MAX_STATES, compile_stop_regex

MAX_STOP_STRINGS = 32
MAX_STOP_BYTES = 1024
MAX_STOP_REGEX_BYTES = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_N = 128
MAX_LOGIT_BIAS = 1024
GREEDY_BELOW = 1e-6
"""A temperature below this means greedy decoding."""
GRAMMAR_FIELDS: tuple[GrammarKind, ...] = get_args(GrammarKind)
_SHOWN_CHARS = 80
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling parameters of one request. The defaults are those of SGLang's `/generate`.

    `top_k`, `top_p` and `min_p` are joint filters: each threshold is computed on the full distribution after
    temperature, so no filter changes the meaning of another. Raises InvalidRequest for a value out of range or of a
    wrong type.
    """

    max_new_tokens: int | None = 128
    """None: up to the end of the context. 0: the prompt is computed and cached, and no token is returned."""
    min_new_tokens: int = 0
    stop: str | list[str] | None = None
    """An empty string or list is no stop string."""
    stop_regex: str | list[str] | None = None
    """Patterns that end the text before their first match (srt/text/stop_regex.py). Empty: none."""
    stop_token_ids: list[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    logit_bias: dict[str, float] | None = None
    """The number that is added to the logit of a token id. Keys are text, as JSON requires."""
    sampling_seed: int | None = None
    """None: drawn by the engine."""
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    # The grammar that the output must match: at most one of these.
    json_schema: str | None = None
    """A JSON schema, as JSON."""
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    """Tags in free text, as JSON: managers/structural_tag.py."""

    def __post_init__(self) -> None:
        try:
            self._check_numbers()
            self._check_stops()
            self._check_logit_bias()
            self._check_grammar()
        except (TypeError, AttributeError, OverflowError):  # from Python code; decoders check types first
            converted(SamplingParams, msgspec.structs.asdict(self))
            raise

    def _check_numbers(self) -> None:
        if self.max_new_tokens is not None:
            _check("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 0, "at least 0, or null")
        _check("min_new_tokens", self.min_new_tokens, self.min_new_tokens >= 0, "at least 0")
        if self.max_new_tokens is not None:
            _check(
                "min_new_tokens",
                self.min_new_tokens,
                self.min_new_tokens <= self.max_new_tokens,
                f"at most max_new_tokens ({self.max_new_tokens})",
            )
        temperature_ok = math.isfinite(self.temperature) and self.temperature >= 0
        _check("temperature", self.temperature, temperature_ok, "a finite number of at least 0")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        top_k_ok = self.top_k == -1 or 1 <= self.top_k < 2**31
        _check("top_k", self.top_k, top_k_ok, "-1 (all tokens) or in [1, 2**31)")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        _check("frequency_penalty", self.frequency_penalty, -2 <= self.frequency_penalty <= 2, "in [-2, 2]")
        _check("presence_penalty", self.presence_penalty, -2 <= self.presence_penalty <= 2, "in [-2, 2]")
        _check("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty <= 2, "in (0, 2]")
        _check("n", self.n, 1 <= self.n <= MAX_N, f"in [1, {MAX_N}]")
        if self.sampling_seed is not None:
            seed_ok = -(2**63) <= self.sampling_seed < 2**63
            _check("sampling_seed", self.sampling_seed, seed_ok, "a 64-bit signed integer")

    def _check_stops(self) -> None:
        stops = self.stop_strings
        _check("stop", len(stops), len(stops) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings")
        for text in stops:
            _check("stop", text, text != "", "non-empty strings")
            _check("stop", text[:40], _utf8_len(text) <= MAX_STOP_BYTES, f"at most {MAX_STOP_BYTES} bytes each")
        patterns = self.stop_patterns
        _check("stop_regex", len(patterns), len(patterns) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} patterns")
        for pattern in patterns:
            size_ok = _utf8_len(pattern) <= MAX_STOP_REGEX_BYTES
            _check("stop_regex", pattern[:40], size_ok, f"at most {MAX_STOP_REGEX_BYTES} bytes each")
        num_states = sum(compile_stop_regex(pattern).num_states for pattern in patterns)
        _check("stop_regex", num_states, num_states <= MAX_STATES, f"patterns of at most {MAX_STATES} states together")
        ids = self.stop_token_ids or ()
        _check("stop_token_ids", len(ids), len(ids) <= MAX_STOP_TOKEN_IDS, f"at most {MAX_STOP_TOKEN_IDS} ids")
        for token in ids:
            _check("stop_token_ids", token, 0 <= token < 2**31, "token ids in [0, 2**31)")

    def _check_logit_bias(self) -> None:
        bias = self.logit_bias or {}
        _check("logit_bias", len(bias), len(bias) <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} entries")
        for key, value in bias.items():
            if not isinstance(key, str):
                raise InvalidRequest(
                    f"the keys of logit_bias must be text, such as '5', got {key!r}", param="logit_bias"
                )
            # Without leading zeros, so that a token has one key. Longer texts are no ids, and slow to convert.
            key_ok = _TOKEN_ID.fullmatch(key) is not None and int(key) < 2**31
            if not key_ok:
                raise InvalidRequest(
                    f"the keys of logit_bias must be token ids, got {key[:_SHOWN_CHARS]!r}", param="logit_bias"
                )
            if not -100 <= value <= 100:
                raise InvalidRequest(
                    f"the values of logit_bias must be in [-100, 100], got {value}", param="logit_bias"
                )

    def _check_grammar(self) -> None:
        given = [name for name in GRAMMAR_FIELDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(
                f"only one of {', '.join(GRAMMAR_FIELDS)} is allowed, got {' and '.join(given)}", param=given[1]
            )
        for name in given:
            text = getattr(self, name)
            size = _utf8_len(text)
            _check(name, size, size <= MAX_GRAMMAR_BYTES, f"at most {MAX_GRAMMAR_BYTES} bytes long")
            is_unicode = text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)
            _check(name, text, is_unicode, "valid Unicode without lone surrogates")

    @property
    def grammar(self) -> GrammarSpec | None:
        """What the output must match."""
        for name in GRAMMAR_FIELDS:
            text = getattr(self, name)
            if text is not None:
                return GrammarSpec(name, text)
        return None

    @property
    def stop_strings(self) -> Sequence[str]:
        if not self.stop:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def stop_patterns(self) -> Sequence[str]:
        if not self.stop_regex:
            return ()
        return (self.stop_regex,) if isinstance(self.stop_regex, str) else self.stop_regex

    @property
    def stops_at_text(self) -> bool:
        return bool(self.stop or self.stop_regex)

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on how often each token came before."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    def check_vocab(self, vocab_size: int) -> None:
        """Raise InvalidRequest for a token id that is not in the model's vocabulary."""
        for token in self.stop_token_ids or ():
            _check("stop_token_ids", token, token < vocab_size, f"token ids below {vocab_size}")
        for key in self.logit_bias or ():
            _check("logit_bias", key, int(key) < vocab_size, f"token ids below {vocab_size}")


def _check(field: str, given: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise InvalidRequest(f"{field} must be {allowed}, got {repr(given)[:_SHOWN_CHARS]}", param=field)


def _utf8_len(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))

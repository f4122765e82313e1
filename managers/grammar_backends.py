"""The libraries behind grammars: llguidance, xgrammar, and the choice between them.

llguidance enforces every constraint of a JSON schema or refuses it, compiles in about a millisecond, and bounds the
work of each step. xgrammar computes masks faster, but ignores constraints that it does not know, compiles some schemas
for seconds, and has no bounds. So `auto` gives it only plain schemas (json_schema.py).

Both are imported on first use: most engines never see a grammar, and xgrammar's import takes most of a second.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from typing import Any, Literal

from ..srt.arrays import Int32Array
from ..srt.errors import InvalidRequest
from ..srt.grammar_spec import GrammarSpec
from . import gbnf
from .grammar import Grammar, GrammarCompiler, GrammarFailed, Matcher, Vocabulary, invalid
from .json_schema import closed, is_any, is_plain, load_schema, with_exact_numbers, with_real_days
from .structural_tag import check_last_escape, form_of, lark_of, schemas_in

Backend = Literal["auto", "xgrammar", "llguidance", "none"]
EXTRA = "tercet[grammar]"
_ITEM_SEPARATOR, _KEY_SEPARATOR = ", ", ": "
"""The white space of JSON: that of `json.dumps`. A fixed layout cannot run on, and compiles fastest."""
JSON_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": _ITEM_SEPARATOR,
    "key_separator": _KEY_SEPARATOR,
}
_IN_A_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{chars}{{1,{most}}}" for chars in ("[a-z]", "[a-z ]", "[a-zA-Z]", "[a-zA-Z ]") for most in (10, 30)),
    *(f"{_IN_A_STRING}{{1,{most}}}" for most in (10, 30)),
    f"{_IN_A_STRING}+",
)
"""Sets of tokens, for llguidance. If all tokens of a set may come next, it takes their part of the mask as a whole and
does not look at each of them. A token is in the first set that has it. The library's own sets lack the letters, so
`[a-z ]{600,}`, where each token has another state, took 0.4 to 0.6 ms for a mask, and takes 0.02."""
_KEPT_TEXTS = 4096
"""Texts that only one way leads on from, with their tokens. They come again with each request of a grammar."""
_LIMITS: Any = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Of llguidance. A step at its limits takes some 10 ms, a compilation some 100 ms."""
_PLACE = re.compile(r"\Aat \d+\(\d+\): (failed to compile JSON schema: )?")
_TRANSLATION = re.compile(r"\n +\d+ \| .*", re.DOTALL)
"""Lines of the grammar in llguidance's notation, with their numbers. They follow its error."""
_ADVICE = re.compile(r"\. Enable '.*")
"""It names an option of llguidance, which a client cannot set."""


def make_compiler(backend: Backend, vocabulary: Vocabulary, *, only_check: bool = False) -> GrammarCompiler:
    """The compiler of a backend.

    `only_check`: the grammars tell whether a spec is valid and no request uses them, so `auto` needs only llguidance.
    Raises InvalidRequest if there can be no grammars.
    """
    reason = why_no_grammars(backend)
    if reason is not None:
        raise InvalidRequest(reason)
    if backend == "xgrammar":
        return XGrammarCompiler(vocabulary)
    if backend == "llguidance" or importlib.util.find_spec("xgrammar") is None:
        return LLGuidanceCompiler(vocabulary)
    if only_check:
        return LLGuidanceCompiler(vocabulary, may_round_plain=True)
    return AutoCompiler(vocabulary, LLGuidanceCompiler(vocabulary))


def why_no_grammars(backend: Backend) -> str | None:
    """Why an engine with this backend can use no grammar; None if it can."""
    if backend == "none":
        return "structured output is off in this server (--grammar-backend none)"
    name = "xgrammar" if backend == "xgrammar" else "llguidance"
    if importlib.util.find_spec(name) is not None:
        return None
    return f"structured output needs the package {name}, which is not installed: pip install '{EXTRA}'"


class AutoCompiler:
    """xgrammar for plain JSON schemas, llguidance for everything else (GrammarCompiler)."""

    def __init__(self, vocabulary: Vocabulary, exact: GrammarCompiler) -> None:
        self._vocabulary = vocabulary
        self._exact = exact
        self._fast: GrammarCompiler | None = None

    def compile(self, spec: GrammarSpec) -> Grammar:
        if spec.kind != "json_schema" or not is_plain(_schema(spec), spec.text):
            return self._exact.compile(spec)
        if self._fast is None:
            self._fast = XGrammarCompiler(self._vocabulary)
        return self._fast.compile(spec)


def _schema(spec: GrammarSpec) -> Any:
    try:
        return load_schema(spec.text)
    except ValueError as error:
        raise invalid(spec, str(error)) from None


def _with_schemas(spec: GrammarSpec) -> tuple[GrammarSpec, list[Any]]:
    """The spec, with a structural tag in its newer form, and its JSON schemas. Raises InvalidRequest."""
    if spec.kind == "json_schema":
        return spec, [_schema(spec)]
    if spec.kind != "structural_tag":
        return spec, []
    try:
        form = form_of(spec.text)
        schemas = list(schemas_in(form))
    except (ValueError, RecursionError) as error:
        raise invalid(spec, str(error)) from None
    return GrammarSpec(spec.kind, json.dumps({"type": "structural_tag", "format": form})), schemas


class LLGuidanceCompiler:
    """Grammars of llguidance (GrammarCompiler).

    `may_round_plain`: integers in `enum` and `const` of plain schemas may be rounded, because xgrammar writes them.
    """

    def __init__(self, vocabulary: Vocabulary, *, may_round_plain: bool = False) -> None:
        import llguidance  # on first use, as the module's docstring says

        self._may_round_plain = may_round_plain
        self._library = llguidance
        self._special_texts = vocabulary.special_texts
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary)),
            eos_token=sorted(vocabulary.eos_ids),
            slices=list(SLICES),
        )

    def compile(self, spec: GrammarSpec) -> Grammar:
        try:
            text = self._translate(spec)
        except (ValueError, RecursionError) as error:
            raise invalid(spec, str(error)) from None
        matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise invalid(spec, self._reason(spec, matcher.get_error()))
        return _LLGrammar(matcher)

    def _reason(self, spec: GrammarSpec, error: str) -> str:
        """Why a grammar is refused, without the translation that the library quotes. Names the JSON schema of a tag."""
        if spec.kind == "ebnf":
            return error
        reason = _ADVICE.sub("", _TRANSLATION.sub("", _PLACE.sub("", error)))
        if spec.kind == "structural_tag":
            for schema in schemas_in(form_of(spec.text)):
                text = json.dumps(schema)
                try:
                    self.compile(GrammarSpec("json_schema", text))
                except InvalidRequest:
                    return f"{reason}, in the schema {text}"
        return reason

    def _translate(self, spec: GrammarSpec) -> str:
        """The grammar in the library's own notation. Raises ValueError, RecursionError."""
        library = self._library.LLMatcher
        if spec.kind == "json_schema":
            schema = load_schema(spec.text)
            may_round = self._may_round_plain and is_plain(schema, spec.text)
            schema = with_exact_numbers(with_real_days(closed(schema)), may_round_constants=may_round)
            if schema is False:
                raise ValueError("the schema false allows no value")
            # In place of a client's own options, which could make the library leave out what it does not enforce.
            schema = {**schema, "x-guidance": JSON_OPTIONS}
            return str(library.grammar_from_json_schema(json.dumps(schema)))
        if spec.kind == "regex":
            check_last_escape(spec.text)
            return str(library.grammar_from_regex(spec.text))
        if spec.kind == "structural_tag":
            return str(library.grammar_from_lark(lark_of(spec.text, self._special_texts, JSON_OPTIONS)))
        return str(library.grammar_from_lark(_lark_of_ebnf(spec.text)))


def _lark_of_ebnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark  # on first use, as the module's docstring says

    try:
        return str(gbnf_to_lark(gbnf.plain(text)))
    except RecursionError:
        raise ValueError("the rules are nested too deeply") from None
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(str(error)) from None


class _Tokens:
    """A vocabulary in the form that llguidance asks for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special_ids)
        self.eos_token_id = min(vocabulary.eos_ids)
        self.bos_token_id = None

        self._known = functools.lru_cache(_KEPT_TEXTS)(self._encode)
        self._vocabulary_encode = vocabulary.encode
        self._special = vocabulary.special_ids
        self._ids: dict[bytes, int] = {}

    def __call__(self, text: bytes) -> list[int]:
        """Tokenise. Where only one text can follow, the library allows the first token of that text alone."""
        return self._known(text)

    def _encode(self, text: bytes) -> list[int]:
        ids = self._vocabulary_encode(text.decode("utf-8", "replace"))
        # Some tokenizers put a space before a text, and some texts are not UTF-8 or have the name of a special token.
        is_good = self._special.isdisjoint(ids) and b"".join(self.tokens[token] for token in ids) == text
        return ids if is_good else self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        """Tokenise with the longest token at each place."""
        if not self._ids:
            self._ids = {token: i for i, token in enumerate(self.tokens) if token and i not in self._special}
        longest = max(map(len, self._ids))
        ids = []
        while text:
            size = next((n for n in range(min(longest, len(text)), 0, -1) if text[:n] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[text[:size]])
            text = text[size:]
        return ids


_LEXER = "lexer error"
"""Begins the errors of a lexer that is at its limits."""


class _LLGrammar:
    """A compiled grammar. All its matchers share a lexer, and its limits count what all of them have made."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.is_full = False

    def start(self) -> Matcher:
        return _LLMatcher(self, self._matcher.deep_copy())


class _LLMatcher:
    def __init__(self, grammar: _LLGrammar, matcher: Any) -> None:
        self._grammar = grammar
        self._matcher = matcher

    def fill(self, bits: Int32Array, line: int) -> None:
        size = bits.strides[0]
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data + line * size, size)
        if self._matcher.is_error():
            raise self._failure()

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise self._failure()

    def fork(self) -> Matcher:
        return _LLMatcher(self._grammar, self._matcher.deep_copy())

    def _failure(self) -> GrammarFailed:
        error = self._matcher.get_error()
        if _LEXER in error:  # it never recovers
            self._grammar.is_full = True
        return GrammarFailed(_reason(error))


def _reason(error: str) -> str:
    if "NoExtension" in error:
        return "no text can follow"
    return error.partition("\n")[0] or "the grammar is too complex"


class XGrammarCompiler:
    """Grammars of xgrammar (GrammarCompiler). Refuses JSON schemas that are neither plain nor for any value."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar  # on first use, as the module's docstring says

        self._library = xgrammar
        texts = [b"" if i in vocabulary.special_ids else token for i, token in enumerate(vocabulary.tokens)]
        info = xgrammar.TokenizerInfo(
            texts, xgrammar.VocabType.RAW, vocab_size=len(texts), stop_token_ids=sorted(vocabulary.eos_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> Grammar:
        spec, schemas = _with_schemas(spec)
        if not all(is_any(schema) or is_plain(schema, json.dumps(schema)) for schema in schemas):
            raise invalid(spec, "xgrammar does not enforce all of it; --grammar-backend auto or llguidance may")
        try:
            return _XGrammar(self._library, self._compile(spec))
        except MemoryError:
            raise
        except Exception as error:  # the library raises RuntimeError, and errors of its own that are not
            raise invalid(spec, str(error).rpartition("Check failed: ")[2]) from None

    def _compile(self, spec: GrammarSpec) -> Any:
        if spec.kind == "json_schema":
            separators = (_ITEM_SEPARATOR, _KEY_SEPARATOR)
            return self._compiler.compile_json_schema(spec.text, any_whitespace=False, separators=separators)
        if spec.kind == "regex":
            return self._compiler.compile_regex(spec.text)
        if spec.kind == "structural_tag":
            return self._compiler.compile_structural_tag(spec.text)
        return self._compiler.compile_grammar(spec.text)


class _XGrammar:
    is_full = False

    def __init__(self, library: Any, compiled: Any) -> None:
        self._library = library
        self._compiled = compiled

    def start(self) -> Matcher:
        return _XMatcher(self._library.GrammarMatcher(self._compiled))


class _XMatcher:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, bits: Int32Array, line: int) -> None:
        self._matcher.fill_next_token_bitmask(bits, line)
        if not bits[line].any():
            raise GrammarFailed("no text can follow")

    def accept(self, token: int) -> None:
        if not self._matcher.accept_token(token):
            raise GrammarFailed("the token does not match")

    def fork(self) -> Matcher:
        return _XMatcher(self._matcher.fork())

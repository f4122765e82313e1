"""The pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`. They split text before byte-level BPE.

Source: llama.cpp's `llama-vocab.cpp`, against which each row was checked. Names that only unsupported architectures use
are left out: an unknown name is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
# These patterns also split a word where an upper-case letter follows a lower-case one.
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> PreTokenizer:
    return pre_tokenizers.Sequence([Digits(individual_digits=True), _gpt2()])


def _splits(*patterns: str) -> Callable[[], PreTokenizer]:
    """A builder of a pre-tokenizer that applies the patterns in order, each to the pieces of the previous one."""

    def build() -> PreTokenizer:
        cuts: list[PreTokenizer] = [Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_BUILDERS: tuple[tuple[Callable[[], PreTokenizer], tuple[str, ...]], ...] = (
    (_gpt2, ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat", "mellum", "a.x-4.0")),
    (
        _digits_then_gpt2,
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    (
        _splits(_LLAMA3),
        (
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "dbrx",
            "smaug-bpe",
            "glm4",
            "chatglm-bpe",
        ),
    ),
    (
        _splits(_QWEN2),
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open"),
    ),
    (_splits(_QWEN35), ("qwen35",)),
    (_splits(_SEED), ("seed-coder",)),
    (_splits(_TEKKEN), ("tekken",)),
    (_splits(_GPT4O), ("gpt-4o", "llama4", "kanana2")),
    (_splits(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"), ("deepseek-coder",)),
    (
        _splits(
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" rf"|{_SPACES}",
        ),
        ("hunyuan-dense",),
    ),
    # llama.cpp's default, for files from before the names.
    (_splits(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), ("default",)),
)

PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {name: build for build, names in _BUILDERS for name in names}
"""The function that builds the pre-tokenizer of each name."""

MERGES_ARE_OPTIONAL = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2", "tekken"})
"""Pre-tokenizers whose models use a token for a piece with the same text, without merges (`ignore_merges`)."""

STARTS_WITH_BOS = MERGES_ARE_OPTIONAL
"""Pre-tokenizers whose models start a prompt with BOS, unless the file says otherwise."""

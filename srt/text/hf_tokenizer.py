"""The reader of tokenizers in Hugging Face directories.

`tokenizer.json` has the tokenizer, `tokenizer_config.json` (and the older `special_tokens_map.json`) the special tokens
and their names, `chat_template.jinja` (or `tokenizer_config.json`) the chat template.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ..model_files.files import has_file, read_json_object, read_text
from ..model_files.settings import Settings
from .tokenizer_parts import NAMED_SPECIAL_TOKENS, TokenizerParts

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_OTHER_SPECIAL_TOKENS = ("additional_special_tokens", "extra_special_tokens")


def read_hf_directory(directory: Path) -> TokenizerParts:
    """Read the tokenizer of a directory. Raises ValueError if one of its files is not valid."""
    backend = _read_backend(directory / "tokenizer.json")
    file = directory / "tokenizer_config.json"
    values = _read_json(file)
    if "added_tokens_decoder" not in values:
        older = Settings(str(directory / "special_tokens_map.json"), _read_json(directory / "special_tokens_map.json"))
        values = values | {name: _named_token(older, name) for name in NAMED_SPECIAL_TOKENS if name in older}
    config = Settings(str(file), values)

    _add_tokens(backend, config)
    special_tokens = {name: token for name in NAMED_SPECIAL_TOKENS if (token := _named_token(config, name)) is not None}
    eos_id = backend.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return TokenizerParts(
        backend=backend,
        special_tokens=special_tokens,
        eos_token_ids=frozenset() if eos_id is None else frozenset({eos_id}),
        chat_templates=_chat_templates(directory, config),
    )


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(read_text(file))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises Exception, or panics, which raises a BaseException
        raise ValueError(f"cannot read {file}: {error}") from error


def read_with_transformers(name_or_path: str) -> TokenizerParts:
    """Read a tokenizer without tokenizer.json through `transformers`.

    `transformers` converts the older formats, and finds models on the Hub. Raises ValueError if there is no usable
    tokenizer.
    """
    # Imported on use, because the import takes seconds.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
    except Exception as error:  # `transformers` and its many dependencies can raise any error
        # The library's reason alone misleads: for a folder without a tokenizer, that packages are missing; for a path
        # that does not exist, that it is no name of the Hub.
        if os.path.isdir(name_or_path):
            lack = ", which has no tokenizer.json"
        else:
            lack = ", which is no directory or GGUF file" if os.path.exists(name_or_path) else ", which does not exist"
        raise ValueError(
            f"cannot load a tokenizer from {name_or_path!r}{lack}; --tokenizer-path names another one, and "
            f"--skip-tokenizer-init loads none: {' '.join(str(error).split())}"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ValueError(
            f"the tokenizer in {name_or_path!r} is a {type(tokenizer).__name__}, which the `tokenizers` library "
            "cannot run"
        )
    if backend.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        # For the config of some models, such as Qwen's and Gemma's, `transformers` makes a tokenizer without files.
        raise ValueError(
            f"cannot load a tokenizer from {name_or_path!r}, which has no tokens besides special ones; a file such as "
            "tokenizer.json is missing. --tokenizer-path names another tokenizer, and --skip-tokenizer-init loads none"
        )
    eos_id = tokenizer.eos_token_id
    return TokenizerParts(
        backend=backend,
        special_tokens={
            name: str(token) for name, token in tokenizer.special_tokens_map.items() if name in NAMED_SPECIAL_TOKENS
        },
        eos_token_ids=frozenset() if eos_id is None else frozenset({eos_id}),
        chat_templates=_named_templates(Settings(name_or_path, {"chat_template": tokenizer.chat_template})),
    )


def _read_json(file: Path) -> dict[str, Any]:
    return read_json_object(file) if has_file(file) else {}


def _named_token(config: Settings, name: str) -> str | None:
    """The text of a named token, which the file gives as text or as an object with properties."""
    token = config.get(name)
    if token is None:
        return None
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        raise config.refusal(name, "a string, or an object with a string as content", token)
    return text


def _add_tokens(backend: tokenizers.Tokenizer, config: Settings) -> None:
    """Add the config's tokens that tokenizer.json lacks, and mark the config's special tokens as special."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    described = config.nested("added_tokens_decoder") or Settings(config.source, {})
    for token in _described_tokens(described):
        if repr(token) != repr(known.get(token.content)):
            backend.add_tokens([token])
            known.setdefault(token.content, token)
    # As in transformers, a named token is always special. Of the others, tokenizer.json decides which are.
    special = [
        known.get(token.content, token)
        for token, is_named in _special_tokens(config)
        if is_named or token.content not in known
    ]
    if special:
        backend.add_special_tokens(special)


def _described_tokens(described: Settings) -> list[AddedToken]:
    """The tokens of `added_tokens_decoder`, an object from token id to properties, in order of id."""
    tokens = {}
    for key in described.unused():
        if not (key.isascii() and key.isdigit()):
            raise described.refusal(key, "absent, because all keys must be token ids", described.get(key))
        fields = described.nested(key)
        content = None if fields is None else fields.text("content")
        if fields is None or content is None:
            raise described.refusal(key, "an object with a string as content", described.get(key))
        tokens[int(key)] = AddedToken(content, **{flag: fields.flag(flag) for flag in _FLAGS if flag in fields})
    return [tokens[token_id] for token_id in sorted(tokens)]


def _special_tokens(config: Settings) -> Iterator[tuple[AddedToken, bool]]:
    """The special tokens of the config, and whether each has one of NAMED_SPECIAL_TOKENS."""
    for name in NAMED_SPECIAL_TOKENS:
        if text := _named_token(config, name):
            yield _special_token(config, name, text), True
    for name in _OTHER_SPECIAL_TOKENS:
        others = config.get(name)
        if others is not None and not isinstance(others, list | Mapping):
            raise config.refusal(name, "a list of tokens, or an object whose values are tokens", others)
        values = dict(others) if isinstance(others, Mapping) else dict(enumerate(others or []))
        tokens = Settings(config.source, {f"{name}[{key}]": value for key, value in values.items()})
        for key in tokens.unused():
            if text := _named_token(tokens, key):
                yield _special_token(tokens, key, text), False


def _special_token(config: Settings, name: str, text: str) -> AddedToken:
    """A token that the file gives as text or as an object, with the object's properties."""
    fields = config.nested(name) if isinstance(config.get(name), Mapping) else None
    given = {} if fields is None else {flag: fields.flag(flag) for flag in _FLAGS if flag in fields}
    return AddedToken(text, **{"normalized": False, **given, "special": True})


def _chat_templates(directory: Path, config: Settings) -> dict[str, str]:
    """The chat templates in files, or else those in the config."""
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    default = directory / "chat_template.jinja"
    if has_file(default):
        files["default"] = default
    if files:
        return {name: read_text(path) for name, path in files.items()}
    return _named_templates(config)


def _named_templates(config: Settings) -> dict[str, str]:
    """The chat templates in the config: a text, an object from name to text, or a list of {name, template} objects."""
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    named: list[tuple[Any, Any]] = [(None, None)]
    if isinstance(value, Mapping):
        named = list(value.items())
    elif isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
        named = [(entry.get("name"), entry.get("template")) for entry in value]
    if not all(isinstance(text, str) for pair in named for text in pair):
        raise config.refusal("chat_template", "a template, an object of templates, or a list of named ones", value)
    return dict(named)

"""Read the tokenizer of a Hugging Face model directory.

`tokenizer.json` says how text becomes ids, `tokenizer_config.json` (and the older `special_tokens_map.json`) which
tokens are special and what they are called, `chat_template.jinja` (or the configuration) how a chat is written down.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from .tokenizer_parts import NAMED_SPECIAL_TOKENS, TokenizerParts

_OTHER_SPECIAL_TOKENS = ("additional_special_tokens", "extra_special_tokens")


def read_hf_directory(directory: Path) -> TokenizerParts:
    """ValueError when one of the files cannot be read."""
    file = directory / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"cannot read {file}: {error}") from error
    config = _read_json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        older = _read_json(directory / "special_tokens_map.json")
        config = {**config, **{name: older[name] for name in NAMED_SPECIAL_TOKENS if name in older}}

    _add_tokens(backend, config)
    special_tokens = {
        name: token for name in NAMED_SPECIAL_TOKENS if (token := _token_text(config.get(name))) is not None
    }
    eos_id = backend.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return TokenizerParts(
        backend=backend,
        special_tokens=special_tokens,
        eos_token_ids=frozenset() if eos_id is None else frozenset({eos_id}),
        chat_templates=_chat_templates(directory, config),
    )


def read_with_transformers(name_or_path: str) -> TokenizerParts:
    """For what has no tokenizer.json: `transformers` converts the older formats, and finds models on the Hub."""
    # Only here: the import takes seconds.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
    except Exception as error:  # anything at all, from a dozen libraries behind it
        raise ValueError(f"there is no tokenizer that can be read in {name_or_path!r}: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ValueError(
            f"the tokenizer in {name_or_path!r} is a {type(tokenizer).__name__}, which the `tokenizers` library "
            "cannot run"
        )
    eos_id = tokenizer.eos_token_id
    return TokenizerParts(
        backend=backend,
        special_tokens={
            name: str(token) for name, token in tokenizer.special_tokens_map.items() if name in NAMED_SPECIAL_TOKENS
        },
        eos_token_ids=frozenset() if eos_id is None else frozenset({eos_id}),
        chat_templates=_named_templates(tokenizer.chat_template),
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content


def _token_text(token: Any) -> str | None:
    """A token is written as its text or as an object with its properties."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Adds what the configuration names and tokenizer.json forgot, and makes special what it calls special."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    described = config.get("added_tokens_decoder") or {}
    for _, fields in sorted(described.items(), key=lambda item: int(item[0])):
        token = _added_token(fields)
        if repr(token) != repr(known.get(token.content)):
            backend.add_tokens([token])
            known.setdefault(token.content, token)
    special = [known.get(text) or AddedToken(text, special=True, normalized=False) for text in _special_texts(config)]
    if special:
        backend.add_special_tokens(special)


def _added_token(fields: Mapping[str, Any]) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(fields["content"], **{flag: fields[flag] for flag in flags if flag in fields})


def _special_texts(config: Mapping[str, Any]) -> Iterator[str]:
    values = [config.get(name) for name in NAMED_SPECIAL_TOKENS]
    for name in _OTHER_SPECIAL_TOKENS:
        others = config.get(name) or []
        values.extend(others.values() if isinstance(others, dict) else others)
    for value in values:
        text = _token_text(value)
        if text:
            yield text


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files come before the configuration."""
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    default = directory / "chat_template.jinja"
    if default.is_file():
        files["default"] = default
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    return _named_templates(config.get("chat_template"))


def _named_templates(value: Any) -> dict[str, str]:
    """From any of the three ways to write them: one text, name -> text, or a list of objects with name and template."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, Mapping):
        return dict(value)
    return {entry["name"]: entry["template"] for entry in value}

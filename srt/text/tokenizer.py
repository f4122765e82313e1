"""The tokenizer: text to token ids, token ids to text, and chat messages to text.

It uses the `tokenizers` library. `transformers` is imported only for models without a tokenizer.json or GGUF file,
because its import takes seconds.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequest
from ..model_files.files import has_file, read_text
from ..model_files.gguf_file import is_gguf
from .fill_in_middle import find_fim_format
from .gguf_tokenizer import read_gguf_tokenizer
from .hf_tokenizer import read_hf_directory, read_with_transformers
from .token_bytes import TokenBytes
from .tokenizer_parts import TokenizerParts

if TYPE_CHECKING:
    from ..server_args import ServerArgs
    from .chat_template import ChatTemplate


_LONG_CHARS = 20_000
"""A text of at least this length is encoded without Python's lock (GIL), so that other threads are not delayed."""
_ANCHOR = "\u263a"
"""A character that merges with no other."""
_LONG_IDS = 10_000
"""A list of at least this many ids is decoded without Python's lock."""


class Tokenizer:
    """A model's tokenizer.

    special_ids: the ids that `skip_special_tokens` leaves out. token_bytes: the bytes of each token, or None if
    decoding is not a concatenation of bytes.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        backend = parts.backend
        # Some files enable truncation or padding, which would silently change prompts.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(parts.special_tokens)
        self.eos_token_ids = frozenset(parts.eos_token_ids)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.special_texts = frozenset(
            token.content for token in backend.get_added_tokens_decoder().values() if token.special
        )
        """The tokens of `special_ids` as text."""
        bos = self.special_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else backend.token_to_id(bos)
        self.token_bytes = TokenBytes.of(backend)
        self.fim = find_fim_format(backend, parts.fim_ids)
        """The format of prompts for fill in the middle; None without tokens for it."""
        self._template_sources = dict(parts.chat_templates)
        self._templates: dict[str, ChatTemplate] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text.

        Raises InvalidRequest for invalid Unicode (lone surrogates), and for a text that needs too many steps of a
        regular expression of the tokenizer.
        """
        if len(text) >= _LONG_CHARS:
            return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]  # only this one releases the GIL
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            _explain(error, [text])
            raise

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Encode several texts on all cores, as `encode` does."""
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except BaseException as error:
            _explain(error, texts)
            raise
        return [encoding.ids for encoding in encodings]

    def encode_literally(self, text: str, *, is_start: bool) -> list[int]:
        """Encode a text without special tokens: where the text spells one, it is encoded as other text is.

        `is_start`: the text begins a document, so it gets the space that sentencepiece adds at a start. A text that
        follows other text gets none. Raises as `encode` does.
        """
        pieces, start = [], 0
        while (mark := self._marks.search(text, start)) is not None:
            # The library finds a token only in one piece, so a cut after the first character hides it.
            pieces.append(text[start : mark.start() + 1])
            start = mark.start() + 1
        pieces.append(text[start:])
        first = self.encode(pieces[0], add_special_tokens=False) if is_start else self._encode_inside(pieces[:1])
        return first + self._encode_inside(pieces[1:])

    @functools.cached_property
    def _marks(self) -> re.Pattern[str]:
        """Finds special tokens, and those of `fim`, which some files do not call special."""
        fim: Container[int] = () if self.fim is None else self.fim.end_ids
        added = self.backend.get_added_tokens_decoder().items()
        texts = {token.content for token_id, token in added if token.special or token_id in fim}
        return re.compile("|".join(map(re.escape, sorted(texts))) or r"(?!)")

    @functools.cached_property
    def start_ids(self) -> list[int]:
        """The tokens that the tokenizer adds before a text: BOS, or none."""
        return [token for token in self.encode("")[:1] if token == self.bos_token_id]

    def _encode_inside(self, texts: Sequence[str]) -> list[int]:
        """The tokens of texts that follow other text, one after the other."""
        anchor = self._anchor_ids
        encoded = self.encode_batch([_ANCHOR + text if anchor else text for text in texts], add_special_tokens=False)
        return [token for ids in encoded for token in ids[len(anchor) :]]

    @functools.cached_property
    def _anchor_ids(self) -> list[int]:
        """The tokens of a character before a text, which gets the space that the tokenizer adds. Empty: it adds none.

        The model families with sentencepiece encode the suffix of a FIM prompt in this way.
        """
        first = self.backend.encode("a", add_special_tokens=False).tokens[:1]
        adds_space = "".join(first)[:1] in ("\u2581", "\u0120")  # the space of sentencepiece, and of byte-level BPE
        return self.encode(_ANCHOR, add_special_tokens=False) if adds_space else []

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Decode token ids. Unknown ids give no text. Raises InvalidRequest for ids outside [0, 2**32)."""
        ids = list(ids)
        try:
            if len(ids) >= _LONG_IDS:
                return self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise InvalidRequest("token ids must be in [0, 2**32)", param="tokens") from error

    def tokens_beyond(self, num_rows: int) -> list[str]:
        """The tokens with ids of at least `num_rows`, in order of id."""
        if self.vocab_size <= num_rows and max(self.backend.get_added_tokens_decoder(), default=0) < num_rows:
            return []  # the common case, without a list of the whole vocabulary
        vocab = self.backend.get_vocab(with_added_tokens=True)
        return sorted((token for token, token_id in vocab.items() if token_id >= num_rows), key=vocab.__getitem__)

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id)

    def spell(self, token_id: int) -> bytes:
        """The bytes of one token: of its text, or of a part of a character. Special tokens have their names."""
        if self.token_bytes is not None:
            return self.token_bytes[token_id]
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        r"""The text of one token. Bytes that are no text are written as \xNN."""
        return self.spell(token_id).decode(errors="backslashreplace")

    @property
    def chat_template_source(self) -> str | None:
        """Source of the template for chats without tools; None if there is none."""
        return self._template_sources.get("default")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **chat_template_kwargs: Any,
    ) -> str:
        """Make the prompt of a chat. Encode it with `add_special_tokens=False`: it already has its special tokens.

        Raises InvalidRequest if there is no template, or if the template does not accept the messages.
        """
        return self.chat_template(has_tools=tools is not None).render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **chat_template_kwargs,
        )

    def compile_chat_template(self) -> None:
        """Compile the templates now instead of on first use. Raises ValueError for an invalid template."""
        for name in self._template_sources:
            self._compiled(name)

    def chat_template(self, *, has_tools: bool) -> ChatTemplate:
        """The template of chats with tools or without. Raises InvalidRequest if there is none, or if it is invalid."""
        if not self._template_sources:
            raise InvalidRequest(
                "this model has no chat template; start the server with --chat-template, or use /v1/completions",
                param="messages",
            )
        name = "tool_use" if has_tools and "tool_use" in self._template_sources else "default"
        if name not in self._template_sources:
            raise InvalidRequest(
                f"this model has chat templates {sorted(self._template_sources)} but none named {name!r}; "
                "choose one with --chat-template",
                param="messages",
            )
        try:
            return self._compiled(name)
        except InvalidRequest:
            raise
        except ValueError as error:
            raise InvalidRequest(str(error), param="messages") from error

    def _compiled(self, name: str) -> ChatTemplate:
        if name not in self._templates:
            # Imported on use: two of the three processes never need Jinja, whose import takes 80 ms.
            from .chat_template import ChatTemplate

            self._templates[name] = ChatTemplate(self._template_sources[name], self.special_tokens)
        return self._templates[name]


def load_tokenizer(model_path: str, tokenizer_path: str | None = None, chat_template: str | None = None) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory or a GGUF file, or one that `transformers` finds by its name.

    A config.json or tokenizer.json stands for its directory.
    `chat_template`: a file or the template's text; it replaces the model's own templates.
    Raises ValueError if there is no tokenizer, or if it is not supported.
    """
    name = tokenizer_path or model_path
    if os.path.basename(name) in ("config.json", "tokenizer.json"):
        name = os.path.dirname(name) or "."
    path = Path(name)
    if is_gguf(path):
        parts = read_gguf_tokenizer(path)
    elif has_file(path / "tokenizer.json"):
        parts = read_hf_directory(path)
    else:
        parts = read_with_transformers(name)
    if chat_template is None:
        return Tokenizer(parts)
    tokenizer = Tokenizer(parts._replace(chat_templates={"default": _read_template(chat_template)}))
    tokenizer.compile_chat_template()
    return tokenizer


def tokenizer_of(server_args: ServerArgs) -> Tokenizer | None:
    """The tokenizer of these settings, with its chat template. None with `skip_tokenizer_init`.

    Raises as `load_tokenizer`.
    """
    if server_args.skip_tokenizer_init:
        return None
    return load_tokenizer(server_args.model_path, server_args.tokenizer_path, server_args.chat_template)


def _read_template(template: str) -> str:
    if "{" in template or "\n" in template:
        return template
    try:
        return read_text(template)
    except OSError as error:
        raise ValueError(
            f"--chat-template must be a Jinja template or a file with one, got {template!r} ({error.strerror or error})"
        ) from error


def _explain(error: BaseException, texts: Sequence[str]) -> None:
    """Raises InvalidRequest if the texts are the cause of the library's error, and RuntimeError if it panicked."""
    if isinstance(error, TypeError):
        for text in texts:
            _check_unicode(text)
    elif type(error).__name__ == "PanicException":  # Rust's: it is not an Exception, so no handler would answer it
        if "retry-limit" in str(error):
            raise InvalidRequest(
                f"the tokenizer needs too many steps for a text, got {max(map(len, texts)):,} characters; "
                "runs of spaces or letters must be shorter"
            ) from error
        raise RuntimeError(f"the tokenizer failed: {error}") from error


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"text must be valid Unicode, got a lone surrogate {text[error.start]!r} at character {error.start}"
        ) from error

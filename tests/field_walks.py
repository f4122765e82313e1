"""Walks over the honoured fields of a body: each has an effect at the scheduler's door or in the answer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from fake_http import Site, byte_tokenizer
from tokenizers.processors import TemplateProcessing

from tercet.srt.entrypoints.wire import Wire, fields_of
from tercet.srt.io_struct import GenerateReq, unpack_ids
from tercet.srt.text.tokenizer import Tokenizer

NO_EFFECT = {
    *("metadata", "client_metadata", "prompt_cache_key", "safety_identifier", "index", "parsed", "parsed_arguments")
}
BY_THEMSELVES = {"messages", "sampling_params", "stream_options", "response_format", "structured_outputs"}
"""Objects: their own fields are in tables of their own."""
BOS = 257


@dataclass
class Seen:
    """What came of a request: what the scheduler got, and the answer (of a stream, its events)."""

    reqs: list[GenerateReq]
    answer: Any

    @property
    def req(self) -> GenerateReq:
        return self.reqs[0]

    @property
    def ids(self) -> list[int]:
        return unpack_ids(self.req.input_ids).tolist()

    @property
    def prompt(self) -> str:
        return bytes(token for token in self.ids if token != BOS).decode()


Effect = Callable[[Seen], bool]
Table = dict[str, tuple[Any, Effect]]


STREAM: tuple[Any, Effect] = (True, lambda seen: seen.req.options.stream and isinstance(seen.answer, list))


def sampling(name: str, value: Any) -> tuple[Any, Effect]:
    return value, lambda seen: getattr(seen.req.options.sampling, name) == value


@dataclass
class Walk:
    """One kind of object: the fields of `cls` in `table`, set in a request to `path` that `body` makes."""

    path: str
    cls: type[Wire]
    table: Table
    body: Callable[[str, Any], dict[str, Any]]


def honoured(cls: type[Wire], labels: Collection[str] = NO_EFFECT) -> set[str]:
    return {field.name for field in fields_of(cls) if field.allowed is None} - {*labels} - BY_THEMSELVES


def see(site: Site, path: str, body: dict[str, Any]) -> Seen:
    site.scheduler.received.clear()
    answer = site.stream(path, body) if body.get("stream") else site.post(path, body).json()
    return Seen(list(site.scheduler.received), answer)


def happens(effect: Effect, seen: Seen) -> bool:
    try:
        return effect(seen)
    except (KeyError, IndexError, TypeError):
        return False  # nothing reached the scheduler, or the answer is of another kind


def tokenizer() -> Tokenizer:
    made = byte_tokenizer()
    made.backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return made


def check(site: Site, walk: Walk, labels: Collection[str] = NO_EFFECT) -> None:
    """Every honoured field of the walk's object has its effect, and null has not. `labels` have no effect."""
    assert set(walk.table) == honoured(walk.cls, labels)
    for name, (value, effect) in walk.table.items():
        assert happens(effect, see(site, walk.path, walk.body(name, value))), name
        assert not happens(effect, see(site, walk.path, walk.body(name, None))), f"{name}: the effect is always there"


def logprobs(name: str, value: Any, listed: str) -> tuple[Any, Effect]:
    """A field of RequestOptions.logprobs, whose results are in this list of the answer."""

    def effect(seen: Seen) -> bool:
        meta = seen.answer["meta_info"]
        return getattr(seen.req.options.logprobs, name) == value and len(meta[listed]) > 0

    return value, effect

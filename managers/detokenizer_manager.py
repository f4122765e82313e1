"""The DetokenizerManager: token ids from the scheduler become text for the TokenizerManager.

Knows a request from its first TokenOut, which carries its DecodeOptions, to the one with its finish.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..srt.errors import TercetError
from ..srt.io_struct import (
    AbortFinish,
    BatchTextOut,
    BatchTokenOut,
    BrokenMessage,
    Counts,
    DecodeOptions,
    StopFinish,
    TextOut,
    ToDetokenizer,
    TokenOut,
    ToTokenizer,
)
from ..srt.ipc import Receiver, Sender
from ..srt.text.tokenizer import Tokenizer
from .text_stream import TextStream

_log = logging.getLogger(__name__)
_POLL_S = 0.5


class DetokenizerManager:
    """Without I/O; see `run_detokenizer`. `tokenizer` None: ids only, every text is empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}
        # Requests that failed here while the scheduler goes on with them; their end has been told.
        self._failed: set[str] = set()

    @property
    def num_requests(self) -> int:
        """Requests that are known, failed ones included."""
        return len(self._requests) + len(self._failed)

    def process(self, batch: BatchTokenOut) -> BatchTextOut:
        """One TextOut for each TokenOut, in order, but none for a request that has failed before."""
        return BatchTextOut([text for out in batch.outs if (text := self._process_one(out)) is not None])

    def _process_one(self, out: TokenOut) -> TextOut | None:
        if out.rid in self._failed:
            if out.options is None:
                if out.finish is not None:
                    self._failed.discard(out.rid)
                return None
            self._failed.discard(out.rid)  # the id is used again
        text, finish = "", out.finish
        if self._tokenizer is not None:
            try:
                text = self._text(self._tokenizer, out)
            except Exception:
                # One request's tokens must not take its neighbours down.
                _log.exception("Could not detokenise request %s", out.rid)
                if out.finish is None:
                    self._failed.add(out.rid)
                finish = AbortFinish.of(TercetError("the tokens of this request could not be converted to text"))
            if finish is not None:
                self._requests.pop(out.rid, None)
        return TextOut(rid=out.rid, text=text, token_ids=out.token_ids, finish=finish, counts=out.counts)

    def fail(self, message: BrokenMessage) -> BatchTextOut:
        """Ends the requests that a broken message names."""
        for rid in message.rids:
            self._requests.pop(rid, None)
        finish = AbortFinish.of(TercetError(message.reason))
        no_counts = Counts(0)
        return BatchTextOut(
            [TextOut(rid=rid, text="", token_ids=[], finish=finish, counts=no_counts) for rid in message.rids]
        )

    def _text(self, tokenizer: Tokenizer, out: TokenOut) -> str:
        if out.options is not None:
            self._requests[out.rid] = _Request(tokenizer, out.options)
        request = self._requests.get(out.rid)
        if request is not None:
            return request.text(out)
        if out.token_ids or out.finish is None:
            raise ValueError(f"request {out.rid} is unknown: its first output is missing")
        return ""  # it ended before it began


class _Request:
    def __init__(self, tokenizer: Tokenizer, options: DecodeOptions) -> None:
        self._stream = TextStream(tokenizer, options)
        self._trims_stop_token = not options.no_stop_trim

    def text(self, out: TokenOut) -> str:
        ids, finish = out.token_ids, out.finish
        if self._trims_stop_token and isinstance(finish, StopFinish) and ids[-1:] == [finish.matched]:
            ids = ids[:-1]
        text = self._stream.push(ids)
        return text if finish is None else text + self._stream.finish()


def run_detokenizer(
    receiver: Receiver[ToDetokenizer],
    sender: Sender[ToTokenizer],
    tokenizer: Tokenizer | None,
    should_stop: Callable[[], bool],
) -> None:
    """The loop of the detokenizer's process. `should_stop` is asked at least twice a second.

    What has queued up while the last message was worked on is answered by one message.
    """
    manager = DetokenizerManager(tokenizer)
    while not should_stop():
        if not receiver.wait(_POLL_S):
            continue
        outs: list[TextOut] = []
        for message in receiver.drain():
            texts = manager.fail(message) if isinstance(message, BrokenMessage) else manager.process(message)
            outs += texts.outs
        if outs:
            sender.send(BatchTextOut(outs))

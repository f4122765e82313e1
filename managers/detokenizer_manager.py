"""The DetokenizerManager: token ids from the scheduler become text for the TokenizerManager.

It knows a request from its first TokenOut, which has its DecodeOptions, to its last one, which has its finish reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from ..srt.errors import TercetError
from ..srt.io_struct import (
    AbortFinish,
    BatchTextOut,
    BatchTokenOut,
    BrokenMessage,
    Counts,
    DecodeOptions,
    DetokenizerAlive,
    StopFinish,
    TextOut,
    ToDetokenizer,
    TokenOut,
    ToTokenizer,
)
from ..srt.ipc import Receiver, Sender
from ..srt.settings.failures import HEARTBEAT_S
from ..srt.text.tokenizer import Tokenizer
from .text_stream import TextStream
from .token_out_reader import TokenOutReader

logger = logging.getLogger(__name__)


class DetokenizerManager:
    """Converts messages; `run_detokenizer` does the I/O. Without a tokenizer, every text is empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._reader = TokenOutReader()
        self._requests: dict[str, _Request] = {}
        # Requests that failed here while the scheduler continues them. Their end was sent.
        self._failed: set[str] = set()

    @property
    def num_requests(self) -> int:
        """The number of known requests, failed ones included."""
        return len(self._requests) + len(self._failed)

    def process(self, batch: BatchTokenOut) -> BatchTextOut:
        """A TextOut for each output, in order. None for a request that failed before."""
        outs = self._reader.read(batch)
        return BatchTextOut([text for out in outs if (text := self._process_one(out)) is not None])

    def _process_one(self, out: TokenOut) -> TextOut | None:
        if out.rid in self._failed:
            if out.options is None:
                if out.finish is not None:
                    self._failed.discard(out.rid)
                return None
            self._failed.discard(out.rid)  # the id is used again
        text = ""
        if self._tokenizer is not None:
            try:
                text = self._text(self._tokenizer, out)
            except Exception:
                # An error in the tokens of one request must not end other requests.
                logger.exception("Could not detokenise request %s", out.rid)
                if out.finish is None:
                    self._failed.add(out.rid)
                error = TercetError("the tokens of this request could not be converted to text")
                out = msgspec.structs.replace(out, finish=AbortFinish.of(error))
            if out.finish is not None:
                self._requests.pop(out.rid, None)
        if out.options is not None:
            out = msgspec.structs.replace(out, options=None)
        return TextOut(tokens=out, text=text)

    def fail(self, message: BrokenMessage) -> BatchTextOut:
        """Ends the requests that a broken message names."""
        for rid in message.rids:
            self._requests.pop(rid, None)
            self._reader.forget(rid)
        finish = AbortFinish.of(TercetError(message.reason))
        ends = [TokenOut(rid=rid, token_ids=[], finish=finish, counts=Counts(0)) for rid in message.rids]
        return BatchTextOut([TextOut(tokens=end, text="") for end in ends])

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
        # The text depends only on the tokens, so this is the text that the client got from the engine that died.
        self._stream.push(options.resumed_ids)
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
    """The loop of the detokenizer's process. It calls `should_stop` and sends a heartbeat at least twice a second.

    One message answers all messages that arrived during the previous turn.
    """
    manager = DetokenizerManager(tokenizer)
    while not should_stop():
        receiver.wait(HEARTBEAT_S)
        outs: list[TextOut] = []
        for message in receiver.drain():
            texts = manager.fail(message) if isinstance(message, BrokenMessage) else manager.process(message)
            outs += texts.outs
        sender.send(BatchTextOut(outs) if outs else DetokenizerAlive())

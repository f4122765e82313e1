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
    DecodeOptions,
    FinishReason,
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
        if self._tokenizer is None:
            return _text_out(out, "", out.finish)
        try:
            return _text_out(out, self._text(self._tokenizer, out), out.finish)
        except Exception:
            # One request's tokens must not take its neighbours down.
            _log.exception("Could not detokenise request %s", out.rid)
            if out.finish is None:
                self._failed.add(out.rid)
            return _text_out(out, "", _failure("the tokens of this request could not be converted to text"))
        finally:
            if out.finish is not None or out.rid in self._failed:
                self._requests.pop(out.rid, None)

    def fail(self, message: BrokenMessage) -> BatchTextOut:
        """Ends the requests that a broken message names."""
        for rid in message.rids:
            self._requests.pop(rid, None)
        failure = _failure(message.reason)
        return BatchTextOut([TextOut(rid, "", [], failure, 0, 0, 0, 0) for rid in message.rids])

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


def _failure(message: str) -> AbortFinish:
    return AbortFinish(message, TercetError.status, TercetError.__name__)


def _text_out(out: TokenOut, text: str, finish: FinishReason | None) -> TextOut:
    return TextOut(
        rid=out.rid,
        text=text,
        token_ids=out.token_ids,
        finish=finish,
        prompt_tokens=out.prompt_tokens,
        completion_tokens=out.completion_tokens,
        cached_tokens=out.cached_tokens,
        num_retractions=out.num_retractions,
    )


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

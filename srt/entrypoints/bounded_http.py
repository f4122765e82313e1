"""uvicorn's fast HTTP parser knows no limit on a request's head; this protocol has one."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 431 and closes when a request line and headers exceed 64 KiB (plus at most one read) unfinished."""

    _num_head_bytes = 0
    _in_head = True

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head:
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes = 0
        self._in_head = True

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = False

"""HTTP/1.1 on a bare asyncio protocol: quick, and able to break its own rules where a fault asks for it."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate

REASONS = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    413: "Payload Too Large", 429: "Too Many Requests", 500: "Internal Server Error", 502: "Bad Gateway",
    503: "Service Unavailable", 504: "Gateway Timeout",
}  # fmt: skip
JSON = "application/json"


@dataclass(slots=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class _Date:
    """The Date header, made once a second."""

    def __init__(self) -> None:
        self._at, self._text = 0, b""

    def line(self) -> bytes:
        now = int(time.time())
        if now != self._at:
            self._at, self._text = now, f"date: {formatdate(now, usegmt=True)}\r\n".encode()
        return self._text


_DATE = _Date()


def head(status: int, length: int | None, content_type: str | None = JSON, extra: str = "") -> bytes:
    """A response's head in uvicorn's order; `length` None is chunked."""
    size = "Transfer-Encoding: chunked" if length is None else f"content-length: {length}"
    kind = f"content-type: {content_type}\r\n" if content_type else ""
    start = f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}\r\n".encode()
    return start + _DATE.line() + f"server: uvicorn\r\n{size}\r\n{kind}{extra}vary: Origin\r\n\r\n".encode()


class Connection(asyncio.Protocol):
    """One client connection. `handle(connection, request)` answers now or later, by one of the methods below.

    `gone`, when set by the handler, is called if the client leaves before its answer is complete.
    """

    def __init__(self, handle: Callable[[Connection, Request], None], open_ones: set[Connection]) -> None:
        self._handle = handle
        self._open_ones = open_ones
        self._buffer = bytearray()
        self._pumping = False
        self.busy = False
        self.last = False  # close after the answer in progress
        self.gone: Callable[[], None] | None = None
        self.idle_since = 0.0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.idle_since = time.monotonic()
        self._open_ones.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._open_ones.discard(self)
        gone, self.gone = self.gone, None
        if gone is not None:
            gone()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._pump()

    def _pump(self) -> None:
        if self._pumping:
            return
        self._pumping = True
        try:
            while not self.busy and not self.last and self.transport is not None:
                request = self._parse()
                if request is None:
                    break
                self.busy = True
                self._handle(self, request)
        finally:
            self._pumping = False

    def _parse(self) -> Request | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ", 2)
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        start = end + 4
        if headers.get("transfer-encoding", "").lower() == "chunked":
            found = self._chunks(start)
            if found is None:
                return None
            body, stop = found
        else:
            stop = start + int(headers.get("content-length", "0"))
            if len(self._buffer) < stop:
                return None
            body = bytes(self._buffer[start:stop])
        del self._buffer[:stop]
        return Request(method, target.partition("?")[0], headers, body)

    def _chunks(self, at: int) -> tuple[bytes, int] | None:
        body = bytearray()
        while (end := self._buffer.find(b"\r\n", at)) >= 0:
            size = int(self._buffer[at:end].split(b";")[0], 16)
            if len(self._buffer) < end + 2 + size + 2:
                return None
            if size == 0:
                return bytes(body), end + 4
            body += self._buffer[end + 2 : end + 2 + size]
            at = end + 2 + size + 2
        return None

    def respond(self, status: int, body: bytes = b"", content_type: str | None = JSON, extra: str = "") -> None:
        if self.transport is None:
            return
        self.gone = None
        self.transport.write(head(status, len(body), content_type if body else None, extra) + body)
        self._next()

    def stream(self, parts: list[bytes], content_type: str) -> None:
        """A whole chunked answer."""
        if self.transport is None:
            return
        self.gone = None
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
        self.transport.write(head(200, None, content_type) + chunks + b"0\r\n\r\n")
        self._next()

    def _next(self) -> None:
        self.busy = False
        self.idle_since = time.monotonic()
        if self.last and self.transport is not None:
            self.transport.close()
        elif self._buffer:
            self._pump()

    def close(self, sent: bytes = b"") -> None:
        """An orderly close, after `sent`."""
        if self.transport is not None:
            self.gone = None
            self.transport.write(sent)
            self.transport.close()

    def reset(self, sent: bytes = b"") -> None:
        """A TCP reset; what was `sent` before it has left first, as when a process dies while answering."""
        if self.transport is None:
            return
        self.gone = None
        if sent:
            self.transport.write(sent)
            asyncio.get_running_loop().call_later(0.02, self.reset)
            return
        sock: socket.socket = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

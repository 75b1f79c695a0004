"""A proxy before an S3 server that does what stores and networks do: throttle, reset, tear, delay, refuse, lie.

Requests pass through unless a `Fault` matches: the first that does, acts. Every request is counted by its operation.
"""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "expect"}


@dataclass
class Fault:
    """What happens to requests of `operation` ("*": all) whose key contains `key`: after `skip` of them, `times` times.

    `action`: status | reset (nothing answered) | half_upload (reset amid the body) | torn (the answer breaks off) |
    flip (a byte of the answer's body is another) | delay | lost (done at the store, the answer never arrives).
    """

    action: str
    operation: str = "*"
    key: str = ""
    times: int = 1 << 30
    skip: int = 0
    status: int = 503
    code: str = "SlowDown"
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    only_with_header: str | None = None
    only_without_header: str | None = None
    hits: int = 0


@dataclass
class S3Proxy:
    url: str
    faults: list[Fault]
    seen: Counter[str] = field(default_factory=Counter)
    log: list[tuple[str, str]] = field(default_factory=list)  # operation, key
    sent_headers: list[dict[str, str]] = field(default_factory=list)
    page_size: int | None = None  # forces listings into pages of so many keys
    clock_s: float = 0.0  # how far the store's clock is ahead
    ignore_conditions: bool = False  # a store that never heard of If-None-Match and If-Match
    stopped: threading.Event = field(default_factory=threading.Event)

    def add(self, action: str, **how: object) -> Fault:
        fault = Fault(action, **how)  # type: ignore[arg-type]
        self.faults.append(fault)
        return fault

    def clear(self) -> None:
        self.faults.clear()
        self.seen.clear()
        self.log.clear()
        self.sent_headers.clear()
        self.page_size, self.clock_s, self.ignore_conditions = None, 0.0, False

    @property
    def requests(self) -> int:
        return sum(self.seen.values())


def operation_of(method: str, key: str, query: dict[str, str]) -> str:
    """S3's name of a path-style request."""
    if not key:
        if method == "POST" and "delete" in query:
            return "DeleteObjects"
        if method == "GET":
            return "ListMultipartUploads" if "uploads" in query else "ListObjectsV2"
        return {"PUT": "CreateBucket", "HEAD": "HeadBucket", "DELETE": "DeleteBucket"}.get(method, method)
    if "uploadId" in query:
        kinds = {"PUT": "UploadPart", "POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"}
        return kinds.get(method, "ListParts")
    if method == "POST" and "uploads" in query:
        return "CreateMultipartUpload"
    names = {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}
    return names.get(method, method)


@contextmanager
def s3_proxy(upstream: str, port: int = 0) -> Iterator[S3Proxy]:
    """A proxy to the server at `upstream` on a loopback port (0: a free one), stopped at the end."""
    target = urlsplit(upstream)
    proxy = S3Proxy("", [])
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def handle_any(self) -> None:
            path, _, query_text = self.path.partition("?")
            query = dict(parse_qsl(query_text, keep_blank_values=True))
            key = unquote(path).lstrip("/").partition("/")[2]
            operation = operation_of(self.command, key, query)
            with lock:
                proxy.seen[operation] += 1
                proxy.log.append((operation, key))
                proxy.sent_headers.append({name.lower(): value for name, value in self.headers.items()})
                fault = self._fault(operation, key or query.get("prefix", ""))
            length = int(self.headers.get("Content-Length") or 0)
            if fault is not None and fault.action == "half_upload":
                self.rfile.read(length // 2)
                self._reset()
                return
            body = self._body(length)
            if fault is not None and self._act_before(fault):
                return
            self._forward(path, query_text, operation, body, fault)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

        def _fault(self, operation: str, key: str) -> Fault | None:
            for fault in proxy.faults:
                if fault.operation not in ("*", operation) or fault.key not in key:
                    continue
                if fault.only_with_header and fault.only_with_header not in self.headers:
                    continue
                if fault.only_without_header and fault.only_without_header in self.headers:
                    continue
                fault.hits += 1
                if fault.skip < fault.hits <= fault.skip + fault.times:
                    return fault
            return None

        def _body(self, length: int) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(length)
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _act_before(self, fault: Fault) -> bool:
            if fault.action == "status":
                content = f"<Error><Code>{fault.code}</Code><Message>no</Message></Error>".encode()
                if self.command == "HEAD" or fault.code == "":
                    content = b""
                self._head(fault.status, {"Content-Type": "application/xml", **fault.headers}, len(content))
                self.wfile.write(content)
                return True
            if fault.action == "reset":
                self._reset()
                return True
            if fault.action == "delay":
                proxy.stopped.wait(fault.seconds)
            return False

        def _forward(self, path: str, query: str, operation: str, body: bytes, fault: Fault | None) -> None:
            if proxy.page_size is not None and operation == "ListObjectsV2":
                pairs = [pair for pair in query.split("&") if not pair.startswith("max-keys=")]
                query = "&".join([*pairs, f"max-keys={proxy.page_size}"])
            connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
            try:
                connection.putrequest(
                    self.command, path + (f"?{query}" if query else ""), skip_host=True, skip_accept_encoding=True
                )
                for name, value in self.headers.items():
                    lower = name.lower()
                    conditional = proxy.ignore_conditions and lower in ("if-none-match", "if-match")
                    if lower not in _HOP_BY_HOP and lower != "content-length" and not conditional:
                        connection.putheader(name, value)
                if body or self.command in ("PUT", "POST"):
                    connection.putheader("Content-Length", str(len(body)))
                connection.endheaders(body or None)
                answer = connection.getresponse()
                content = answer.read()
            finally:
                connection.close()
            if fault is not None and fault.action == "lost":
                self._reset()
                return
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP}
            length = int(answer.getheader("Content-Length") or len(content))
            if fault is not None and fault.action == "flip" and content:
                middle = len(content) // 2
                content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            self._head(answer.status, headers, length)
            if fault is not None and fault.action == "torn":
                self.wfile.write(content[: len(content) // 2])
                self.wfile.flush()
                self.close_connection = True
                return
            self.wfile.write(content)

        def _head(self, status: int, headers: dict[str, str], length: int) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "date"):
                    self.send_header(name, value)
            date = datetime.now(UTC) + timedelta(seconds=proxy.clock_s)
            self.send_header("Date", format_datetime(date, usegmt=True))
            self.send_header("Content-Length", str(length))
            self.end_headers()

        def _reset(self) -> None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Clients that are killed, and our own resets, are what this is for."""

    server = Server(("127.0.0.1", port), Handler)
    proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.stopped.set()
        server.shutdown()
        server.server_close()
        thread.join()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)

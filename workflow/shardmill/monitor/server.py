"""The monitor over HTTP: the files of its page, and the status as JSON. GET and HEAD alone, so nothing can change."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson

from shardmill.errors import ShardmillError, UsageError
from shardmill.status.model import Status

_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/monitor.css": ("monitor.css", "text/css; charset=utf-8"),
    "/words.js": ("words.js", "text/javascript; charset=utf-8"),
    "/monitor.js": ("monitor.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    # Nothing but what this server itself sends; excerpts of prompts are text, and could not run if they weren't.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
# A command line can hold anything that somebody typed.
_PRIVATE = ("command", "user")


class Latest:
    """The status, gathered anew when somebody asks and the last one is `every_s` old; one gathering at a time."""

    def __init__(self, gather: Callable[[], Status], every_s: float) -> None:
        self._gather = gather
        self._every_s = every_s
        self._lock = threading.Lock()
        self._taken = float("-inf")
        self._answer: tuple[HTTPStatus, bytes] = (HTTPStatus.SERVICE_UNAVAILABLE, b"")

    def get(self) -> tuple[HTTPStatus, bytes]:
        """An HTTP status and JSON: the build's status, or {"error": one sentence}."""
        with self._lock:
            if time.monotonic() - self._taken >= self._every_s:
                self._answer = self._look()
                self._taken = time.monotonic()
            return self._answer

    def _look(self) -> tuple[HTTPStatus, bytes]:
        try:
            status = public(self._gather())
        except ShardmillError as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, orjson.dumps({"error": str(error)})
        return HTTPStatus.OK, orjson.dumps(status)


def public(status: Status) -> dict[str, Any]:
    """What the page may show."""
    values = status.as_dict()
    values["run"] = {name: value for name, value in values["run"].items() if name not in _PRIVATE}
    return values


def make_server(host: str, port: int, latest: Latest) -> ThreadingHTTPServer:
    """Bound and not yet serving. Raises UsageError when the port is taken or the host is none of this machine."""
    handler = type("Handler", (_Handler,), {"latest": latest, "loopback": is_loopback(host)})
    try:
        return ThreadingHTTPServer((host, port), handler)
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"The monitor can't listen at {host}:{port} ({why}): give another --port.") from None


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Handler(BaseHTTPRequestHandler):
    latest: Latest
    loopback: bool
    server_version = "shardmill"
    sys_version = ""

    def do_GET(self) -> None:
        if self.loopback and not is_loopback(_host_name(self.headers.get("Host", ""))):
            # A page of another site whose name was pointed at this machine (DNS rebinding) must not read it.
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"Open this page as localhost.\n")
            return
        path = self.path.partition("?")[0]
        if path == "/status.json":
            status, body = self.latest.get()
            self._send(status, "application/json", body)
        elif path in _FILES:
            name, kind = _FILES[path]
            self._send(HTTPStatus.OK, kind, Path(__file__).with_name(name).read_bytes())
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"There is nothing here.\n")

    do_HEAD = do_GET

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are of no interest to the person at the terminal."""


def _host_name(host: str) -> str:
    """The Host header without its port; an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]

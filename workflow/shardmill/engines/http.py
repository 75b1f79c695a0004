"""HTTP as every engine speaks it: one session's options, and a closed list of faults in place of aiohttp's errors."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from shardmill.engines.base import Fault, ServerFault
from shardmill.errors import SetupFault

# uvicorn closes an idle connection after 5 s, and a request that meets the close is reset (facts: SGLang #20851).
_KEEPALIVE_S = 2.0
_CONNECT_S = 10.0
_DETAIL = 300

_SETUP_STATUS = {
    401: "wants an API key: put it into the environment variable named by servers.api_key_env",
    403: "refuses the API key: look at the environment variable named by servers.api_key_env",
    404: "does not know this path: look at servers.engine and at the URL",
    405: "does not take this request here: look at servers.engine and at the URL",
    413: "takes no request of this size: raise the limit of the proxy before it",
    501: "cannot do this: look at servers.engine and at the URL",
}


def new_session() -> aiohttp.ClientSession:
    """No cap on connections (the fleet's leases are the cap) and no timeout of its own (each request brings one)."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        headers={"Accept": "application/json"},
        skip_auto_headers=("User-Agent",),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes
    seconds: float

    def json(self) -> Any:
        """Raises ServerFault NOT_JSON."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            pass
        try:
            return json.loads(self.body)  # slower, and takes what orjson refuses: lone surrogates, NaN
        except ValueError:
            raise ServerFault(Fault.NOT_JSON, f"status {self.status} with {excerpt(self.body)}") from None

    def message(self) -> str:
        """The error message of a body in any of the shapes servers use; the body's start where there is none."""
        try:
            body = self.json()
        except ServerFault:
            return excerpt(self.body)
        found = error_message(body)
        return found if found is not None else excerpt(self.body)


async def call(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    timeout_s: float,
    api_key: str | None = None,
    payload: Mapping[str, Any] | None = None,
) -> Reply:
    """One request, its whole body read. Raises ServerFault when no whole answer came, whatever its status."""
    headers = {"Content-Type": "application/json"} if payload is not None else {}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    data = orjson.dumps(payload) if payload is not None else None
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(_CONNECT_S, timeout_s))
    started = time.monotonic()
    answering = False
    try:
        async with session.request(
            method, url, data=data, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            answering = True
            body = await response.read()
    except aiohttp.ServerTimeoutError as error:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            raise ServerFault(Fault.REFUSED, "no connection in time") from None
        raise ServerFault(Fault.TIMEOUT, f"no answer within {timeout_s:.0f} s") from None
    except TimeoutError:
        raise ServerFault(Fault.TIMEOUT, f"no answer within {timeout_s:.0f} s") from None
    except aiohttp.ClientConnectorError as error:
        raise ServerFault(Fault.REFUSED, _one_line(str(error.os_error or error))) from None
    except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, OSError) as error:
        fault = Fault.HALF_SENT if answering else Fault.RESET
        raise ServerFault(fault, _one_line(str(error) or type(error).__name__)) from None
    except aiohttp.InvalidURL:
        raise SetupFault(f"The server address {url} is not a URL: correct servers.endpoints.") from None
    except aiohttp.ClientError as error:
        raise ServerFault(Fault.NOT_JSON, f"not HTTP: {_one_line(str(error) or type(error).__name__)}") from None
    return Reply(response.status, body, time.monotonic() - started)


def check_status(reply: Reply, url: str) -> None:
    """Raises for every status that is neither 200 nor 400 and means the same with every engine."""
    status = reply.status
    if status in (200, 400):
        return
    if status in _SETUP_STATUS:
        raise SetupFault(f"The server at {url} answered {status} and {_SETUP_STATUS[status]}.")
    if status == 422:
        raise setup_fault(reply, url)
    raise ServerFault(Fault.QUEUE_FULL if _full(reply) else Fault.SERVER_ERROR, f"status {status}: {reply.message()}")


def setup_fault(reply: Reply, url: str) -> SetupFault:
    return SetupFault(
        f"The server at {url} does not understand shardmill's requests ({reply.message()}): "
        f"look at servers.engine and at the server's version."
    )


def _full(reply: Reply) -> bool:
    if reply.status == 429:
        return True
    if reply.status != 503:
        return False
    message = reply.message().lower()
    return any(word in message for word in ("queue", "waiting timeout", "running timeout", "too many"))


def error_message(body: Any) -> str | None:
    """The message of an error body; None where it is none.

    Shapes: `{"error": "…"}`, `{"error": {"message": "…"}}`, `{"object": "error", "message": "…"}`, `{"detail": …}`.
    """
    if not isinstance(body, dict):
        return None
    error = body.get("error")
    if isinstance(error, dict):
        error = error.get("message", error)
    if error is None and body.get("object") == "error":
        error = body.get("message", "")
    if error is None:
        error = body.get("detail")
    return None if error is None else _one_line(str(error))


def token_ids(value: Any) -> list[int]:
    """The ids of an answer. Raises ServerFault NO_IDS or BAD_IDS; whether they are in range is the audit's business."""
    if not isinstance(value, list):
        raise ServerFault(Fault.NO_IDS, "the answer has no list of token ids")
    if not all(type(item) is int for item in value):
        raise ServerFault(Fault.BAD_IDS, "a token id is not an integer")
    return value


def count(fields: Mapping[str, Any], key: str) -> int:
    value = fields.get(key)
    if type(value) is not int:
        raise ServerFault(Fault.COUNTS_DISAGREE, f"{key} is missing or not a number")
    return value


def number(value: Any) -> float | None:
    """A finite number or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -1e300 < value < 1e300 else None


def whole(value: Any) -> int | None:
    return value if type(value) is int else None


def excerpt(body: bytes) -> str:
    return _one_line(body[:_DETAIL].decode(errors="replace")) or "an empty body"


def plain(ids: Sequence[int]) -> list[int]:
    return ids if isinstance(ids, list) else list(ids)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _DETAIL else line[: _DETAIL - 1] + "…"


async def get_object(
    session: aiohttp.ClientSession, url: str, path: str, timeout_s: float, api_key: str | None
) -> dict[str, Any]:
    """The JSON object at `path` of the server at `url`. Raises as `check_status`, and ServerFault for another body."""
    reply = await call(session, "GET", f"{url}{path}", timeout_s=timeout_s, api_key=api_key)
    check_status(reply, url)
    body = reply.json()
    if not isinstance(body, dict):
        raise ServerFault(Fault.NOT_JSON, f"{path} answered no object")
    return body

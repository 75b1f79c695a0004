"""What jobs and their fleet say to each other: one JSON object a line, over a Unix socket.

Job to fleet                                              Fleet to job
  hello   who 'job', and what client.py says of itself      welcome  warnings[]
  lease   n, avoid[], alone                                 grant    n, server, url
  cancel  n                                                 refuse   kind 'no_servers' | 'setup', message
  release n, ok, fault, detail, tokens, seconds, …          after    n, server_died
  want    n                                                 lost     n
  ping    n                                                 pong     n
                                                            stop
`n` is the job's own number of a request; it names the lease from the asking to its release, also over a fleet that was
started again: `held` in the hello lists the leases that the job still has.

The command line says `who: "cli"` in its hello, and then `stay`, `state` or `down`; to each the answer is the state.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import orjson

from shardmill.errors import ShardmillError

Message = dict[str, Any]
LINE_LIMIT = 16 << 20  # bytes: a hello lists every lease that a job holds


def write(writer: asyncio.StreamWriter, message: Message) -> None:
    """Never blocks: messages are small, and a peer that doesn't read is found by its silence."""
    if not writer.is_closing():
        writer.write(orjson.dumps(message) + b"\n")


async def read(reader: asyncio.StreamReader) -> Message | None:
    """The next message; None at the end of the connection, also one that broke inside a line."""
    try:
        line = await reader.readline()
    except (ConnectionError, ValueError):
        return None
    if not line.endswith(b"\n"):
        return None
    try:
        message = orjson.loads(line)
    except orjson.JSONDecodeError:
        raise ShardmillError("The fleet's socket carries something else than JSON: stop what else uses it.") from None
    if not isinstance(message, dict):
        raise ShardmillError("The fleet's socket carries something else than messages: stop what else uses it.")
    return message


def peer(writer: asyncio.StreamWriter) -> int:
    """The pid of the process that listens at the other end, by the kernel's word; 0 where that can't be known."""
    credentials = struct.Struct("3i")  # pid, uid, gid
    end: socket.socket = writer.get_extra_info("socket")
    pid, _, _ = credentials.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return int(pid)

"""A network line before a server: so many bytes a second each way, shared by all connections, and a round-trip time.

A process of its own, so that it takes no turns with the client that is measured. Bytes pass unread: a chunk leaves the
line when those before it have left, and arrives half a round trip later; a connection takes a round trip to open.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

_CHUNK = 128 << 10
_CHUNKS_UNDER_WAY = 16


@dataclass(frozen=True, slots=True)
class Line:
    round_trip_s: float
    bytes_per_s: float


@contextlib.contextmanager
def line_to(url: str, line: Line) -> Iterator[str]:
    """The server at `url` behind a line: yields the URL of the line's near end, on a free loopback port."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(url, line, theirs), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()


def _serve(url: str, line: Line, told: Connection) -> None:
    asyncio.run(_forward(url, line, told))


async def _forward(url: str, line: Line, told: Connection) -> None:
    target = urlsplit(url)
    up, down = _Direction(line), _Direction(line)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(line.round_trip_s)
        far_reader, far_writer = await asyncio.open_connection(target.hostname, target.port, limit=_CHUNK)
        await asyncio.gather(up.carry(reader, far_writer), down.carry(far_reader, writer))

    server = await asyncio.start_server(connect, "127.0.0.1", 0, limit=_CHUNK)
    told.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


class _Direction:
    """One way of the line. `_free_at` is when the last byte given to it has left, by the loop's clock."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._free_at = 0.0

    async def carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """Carries one connection's bytes to their end, then closes the far side."""
        clock = asyncio.get_running_loop().time
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS_UNDER_WAY)

        async def deliver() -> None:
            while True:
                due, chunk = await under_way.get()
                await asyncio.sleep(max(0.0, due - clock()))
                if not chunk:
                    return
                target.write(chunk)
                await target.drain()

        delivery = asyncio.create_task(deliver())
        # A connection that its client or server breaks off ends here, as it does on a network.
        with contextlib.suppress(ConnectionError):
            while chunk := await source.read(_CHUNK):
                self._free_at = max(clock(), self._free_at) + len(chunk) / self._line.bytes_per_s
                await under_way.put((self._free_at + self._line.round_trip_s / 2, chunk))
                # No more is read than the line carries, so that connections share it chunk by chunk.
                await asyncio.sleep(max(0.0, self._free_at - clock()))
            await under_way.put((clock() + self._line.round_trip_s / 2, b""))
            await delivery
        delivery.cancel()
        target.close()

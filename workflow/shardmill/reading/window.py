"""A window that slides over a stream of bytes."""

from __future__ import annotations

from collections.abc import Iterator

MINIMUM = 1 << 20  # bytes that are there at once where the stream has them


class Window:
    """`data` holds the stream from offset `base` on. Positions are into `data`, offsets into the stream."""

    def __init__(self, chunks: Iterator[bytes], base: int = 0) -> None:
        self._chunks = chunks
        self.data = b""
        self.base = base
        self.ended = False

    def more(self) -> bool:
        """Reads on until there is half as much again, so that a huge record costs linear time. False at the end."""
        wanted = len(self.data) + max(MINIMUM, len(self.data) // 2)
        pieces = [self.data]
        size = len(self.data)
        while size < wanted:
            chunk = next(self._chunks, None)
            if chunk is None:
                self.ended = True
                break
            pieces.append(chunk)
            size += len(chunk)
        grown = size > len(self.data)
        if grown:
            self.data = b"".join(pieces)
        return grown

    def drop(self, position: int) -> None:
        """Forgets what lies before `position`, which becomes position 0."""
        self.data = self.data[position:]
        self.base += position

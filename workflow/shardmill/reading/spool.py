"""Where the conversations wait between the two passes: their turns in a file, what decides about them in memory."""

from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

_PACK = struct.Struct("<QIIQq32sQIIQQQQB7x")
DTYPE = np.dtype(
    [
        ("spool", "<u8"),  # where its turns begin in the spool file
        ("length", "<u4"),  # and how many bytes they are
        ("file", "<u4"),
        ("record", "<u8"),
        ("offset", "<i8"),  # -1: unknown
        ("digest", "<u8", 4),  # of the content, standing alone
        ("base", "<u8"),  # hash of the id without its part suffix; 0: no part
        ("start", "<u4"),
        ("turns", "<u4"),
        ("first", "<u8"),
        ("last", "<u8"),
        ("context", "<u8"),
        ("raw", "<u8"),  # hash of the turns as they are
        ("flags", "u1"),
        ("_pad", "V7"),
    ]
)
ALONE_UNREADABLE = 1  # makes no conversation unless it is joined to another part
ASSISTANT_FIRST = 2
ASSISTANT_LAST = 4
ASSISTANT = 8  # one of its turns is an assistant's

_BUFFER = 4 << 20


class Spool:
    """An unnamed file in `folder` and its index. It is gone when it is closed, or with the process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, buffering=_BUFFER)  # noqa: SIM115
        self._size = 0
        self._entries = bytearray()

    def add(
        self,
        payload: bytes,
        place: tuple[int, int, int],
        digest: bytes,
        part: tuple[int, int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0, 0),
        flags: int = 0,
    ) -> None:
        """`place`: file, record, offset. `part`: base, start, turns, first, last, context, raw."""
        self._file.write(payload)
        self._entries += _PACK.pack(self._size, len(payload), *place, digest, *part, flags)
        self._size += len(payload)

    def index(self) -> npt.NDArray[Any]:
        """All entries, in the order in which they were added; writable. Ends the adding."""
        self._file.flush()
        return np.frombuffer(self._entries, dtype=DTYPE)

    def load(self, entry: Any) -> Any:
        return orjson.loads(os.pread(self._file.fileno(), int(entry["length"]), int(entry["spool"])))

    def close(self) -> None:
        self._file.close()

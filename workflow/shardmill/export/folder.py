"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardmill.errors import NO_SPACE, UsageError
from shardmill.files import sync


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out`; it becomes `out`, on disk, when the block ends well, and goes otherwise.

    A killed process leaves it, under a hidden name that no reader looks for (`left_over`). Raises UsageError when
    there is something at `out` already, or no folder can be made there.
    """
    out = out.resolve()
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        _refuse(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    except OSError as error:
        if error.errno in NO_SPACE:
            raise
        why = os.strerror(error.errno) if error.errno else str(error)
        raise UsageError(f"No folder can be made at {out} ({why}): give --out another place.") from None
    try:
        yield temporary
        for folder, _, files in os.walk(temporary):
            for name in files:
                sync(Path(folder) / name)
            sync(Path(folder))
        _refuse(out)
        temporary.replace(out)
        sync(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def left_over(out: Path) -> list[Path]:
    """Temporary folders of exports to `out` that are at work now or were killed."""
    out = out.resolve()
    return sorted(out.parent.glob(f".{out.name}.*.tmp"))


def _refuse(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        raise UsageError(f"{out} is there already: give --out a folder that is new or empty.")

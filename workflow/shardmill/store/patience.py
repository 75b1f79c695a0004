"""How long a store that is away is waited for: by a job as long as for a server, by a command as long as by a person.

botocore's own retries don't do: all requests of a client share one allowance of them, and eight that fail at once have
used it up within a second.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_COMMAND_S = 30.0


class _Process:
    patience_s = _COMMAND_S


class _Thread(threading.local):
    hurried = False


_thread = _Thread()


def be_patient(seconds: float) -> None:
    """For this process, from now on."""
    _Process.patience_s = seconds


@contextmanager
def hurried() -> Iterator[None]:
    """For what can be left undone: this thread's requests are tried as often as botocore does, and no longer."""
    before, _thread.hurried = _thread.hurried, True
    try:
        yield
    finally:
        _thread.hurried = before


def patience_s() -> float:
    """Seconds from a request's first answer, or first failure, in which it is tried again."""
    return 0.0 if _thread.hurried else _Process.patience_s

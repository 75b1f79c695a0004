"""Small things about processes: dying with the parent, and free ports."""

from __future__ import annotations

import ctypes
import random
import signal
import socket

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
# Below the ephemeral range, so that no outgoing connection takes the port of a server that is down for a while.
_PORTS = range(18000, 32000)


def die_with_parent() -> None:
    """For preexec_fn: SIGKILL when the thread that started this process ends, however it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_ports(n: int) -> list[int]:
    """`n` ports that nothing listens on now."""
    found: list[int] = []
    source = random.SystemRandom()
    while len(found) < n:
        port = source.choice(_PORTS)
        if port in found:
            continue
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found

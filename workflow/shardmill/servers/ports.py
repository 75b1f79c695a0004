"""Loopback ports that are free at the moment."""

from __future__ import annotations

import random
import socket

# Below Linux's ephemeral range (32768 on), from which the kernel could give a port away before the server binds it.
_RANGE = range(20000, 32000)
_TRIES = 200


def free_ports(count: int) -> list[int]:
    """`count` different ports that nothing listens on. Another process may still take one: then start again.

    Raises OSError when none is found.
    """
    found: list[int] = []
    for _ in range(_TRIES * count):
        port = random.choice(_RANGE)
        if port not in found and _free(port):
            found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"no free port among {_RANGE.start}-{_RANGE.stop - 1}")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

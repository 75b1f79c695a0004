"""How many files and connections a process may have open."""

from __future__ import annotations

import resource

_ENOUGH = 1 << 16


def allow_many() -> None:
    """As many as the machine allows: each request that waits for its answer is one, and 1,024 are soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

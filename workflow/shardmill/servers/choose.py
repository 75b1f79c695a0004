"""The servers that a config asks to be started."""

from __future__ import annotations

from collections.abc import Sequence

from shardmill.home import Home
from shardmill.servers.launcher import Launcher
from shardmill.settings import Settings


def launchers(settings: Settings, home: Home) -> Sequence[Launcher]:
    """One for each server, in order. Nothing is started or looked up yet."""
    if settings.servers.engine == "llamacpp":
        from shardmill.servers.llamacpp import LlamaCppLauncher

        return [LlamaCppLauncher(f"embedded-{index}", settings) for index in range(settings.servers.count)]
    from shardmill.servers.sglang import sglang_launchers

    return sglang_launchers(settings, home)

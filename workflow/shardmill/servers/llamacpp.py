"""Starts embedded servers (servers/embedded.py) on loopback ports: the model that shardmill brings along."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass

from shardmill.servers.launcher import StartProblem, fingerprint, flags, last_line, merge_args
from shardmill.servers.ports import free_ports
from shardmill.servers.process import Command
from shardmill.settings import Settings

_CONTEXT = 2048
_PORT_TAKEN = re.compile(r"address already in use|couldn't bind", re.IGNORECASE)


@dataclass(frozen=True)
class LlamaCppLauncher:
    """One embedded server. All of them together leave a core free."""

    name: str
    settings: Settings
    gpu: int | None = None

    async def command(self) -> Command:
        port = free_ports(1)[0]
        return Command(
            argv=[*self._argv(), "--port", str(port)],
            env={},
            url=f"http://127.0.0.1:{port}",
            ports=(port,),
            fingerprint=self.fingerprint(),
        )

    def fingerprint(self) -> str:
        return fingerprint(self._argv())

    def explain(self, log: str, exit_code: int | None) -> StartProblem:
        if _PORT_TAKEN.search(log):
            return StartProblem("its port was taken meanwhile", ports=True)
        return StartProblem(last_line(log, f"it ended with exit code {exit_code} and said nothing"), exit_code == 2)

    def capped(self, log: str) -> str | None:
        return None

    def _argv(self) -> list[str]:
        from shardmill.rendering.embedded import embedded_gguf

        settings = self.settings
        defaults = {
            "model": str(embedded_gguf()),
            "context-per-slot": max(_CONTEXT, settings.model.context),
            "threads": max(1, (len(os.sched_getaffinity(0)) - 1) // settings.servers.count),
        }
        args = merge_args(defaults, settings.servers.args)
        return [sys.executable, "-m", "shardmill.servers.embedded", *flags(args)]

"""What the fleet needs to know to start a server, whatever engine it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from shardmill import __version__
from shardmill.files import sha256_json
from shardmill.servers.process import Command


@dataclass(frozen=True, slots=True)
class StartProblem:
    """Why a server did not start. `setup`: no further start helps. `ports`: the next start, with others, may."""

    reason: str
    setup: bool = False
    ports: bool = False


class Launcher(Protocol):
    """One server that can be started again and again, under one name."""

    @property
    def name(self) -> str: ...

    @property
    def gpu(self) -> int | None:
        """The one GPU that it runs on."""
        ...

    async def command(self) -> Command:
        """How to start it now, at ports that are free. May take long: it prepares what the start needs.

        Raises ShardmillError when it can't be started at all.
        """
        ...

    def fingerprint(self) -> str:
        """The same for every start of the same server, whatever its ports: by it, the next fleet knows its own."""
        ...

    def explain(self, log: str, exit_code: int | None) -> StartProblem:
        """Why a start failed, from what the server wrote and how it ended (None: it had to be stopped)."""
        ...

    def capped(self, log: str) -> str | None:
        """Why the server runs fewer requests at once than asked, if its log says so."""
        ...


def normal_names(args: dict[str, Any]) -> dict[str, Any]:
    """As SGLang's help writes them, however the config does: `mem_fraction_static` is `mem-fraction-static`."""
    return {name.lstrip("-").replace("_", "-"): value for name, value in args.items()}


def merge_args(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Flags by name without dashes: `given` wins, and its false or null takes a default away."""
    merged = {**defaults, **normal_names(given)}
    return {name: value for name, value in merged.items() if value is not None and value is not False}


def flags(args: dict[str, Any]) -> list[str]:
    """`--name value` for each; true is a flag without a value, a list gives its values one after another."""
    words: list[str] = []
    for name, value in args.items():
        words.append(f"--{name}")
        if value is True:
            continue
        words += [str(item) for item in (value if isinstance(value, list | tuple) else [value])]
    return words


def fingerprint(*parts: Any) -> str:
    """Over JSON values and dataclasses of them."""
    return sha256_json([__version__, *parts])[:16]


def last_line(log: str, fallback: str) -> str:
    """The last line of a log that says something, shortened."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1][:300] if lines else fallback

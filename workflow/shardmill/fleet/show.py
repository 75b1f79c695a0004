"""A fleet's state (fleet/state.py) as people read it, on a terminal and through a pipe."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 200  # a pipe has no width of its own; nothing is cut for its sake
_COLOURS = {"ready": "green", "refused": "red", "failed": "red"}
_GIB = 1 << 30


def console() -> Console:
    """For stdout; wide where that isn't a terminal."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def show(state: dict[str, Any], out: Console) -> None:
    """The servers as a table, then what a table has no room for: why one is capped or not ready, and warnings."""
    servers = state["servers"]
    out.print(_heading(state), soft_wrap=True)
    if not servers:
        out.print("No server is known yet: no endpoint is given.")
        return
    out.print(_table(servers))
    for server in servers:
        for note in _notes(server):
            out.print(f"{server['name']}: {note}", soft_wrap=True, markup=False)
    for warning in state["warnings"]:
        out.print(f"Warning: {warning}", soft_wrap=True, markup=False)


def _heading(state: dict[str, Any]) -> str:
    ready = sum(1 for server in state["servers"] if server["state"] == "ready")
    in_flight = sum(server["in_flight"] for server in state["servers"])
    parts = [
        f"{state['model']} on {state['host']} ({state['engine']}): {ready} of {len(state['servers'])} servers ready",
        f"{len(state['jobs'])} jobs, {in_flight} requests in flight, {state['waiting']} waiting",
    ]
    if state["stay"]:
        parts.append("up until `shardmill servers down`")
    return "; ".join(parts) + "."


def _table(servers: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("server")
    table.add_column("state")
    for name in ("for", "restarts", "running", "queued", "in flight", "at once", "KV", "Mamba", "tokens/s", "accept"):
        table.add_column(name, justify="right")
    table.add_column("memory", justify="right")
    gpus = any(server["gpu"] for server in servers)
    if gpus:
        table.add_column("GPU", justify="right")
        table.add_column("power", justify="right")
    table.add_column("address")
    for server in servers:
        table.add_row(*_row(server, gpus))
    return table


def _row(server: dict[str, Any], gpus: bool) -> list[str | Text]:
    gpu = server["gpu"] or {}
    memory = server["resident_bytes"]
    return [
        server["name"],
        Text(server["state"], style=_COLOURS.get(server["state"], "yellow")),
        duration(server["for_s"]),
        str(server["restarts"]),
        _number(server["running"]),
        _number(server["queued"]),
        str(server["in_flight"]),
        _at_once(server),
        _share(server["kv_use"]),
        _share(server["mamba_use"]),
        _number(server["tokens_per_s"]),
        "-" if server["accept_length"] is None else f"{server['accept_length']:.2f}",
        "-" if memory is None else f"{memory / _GIB:.1f} GiB",
        *([_share(gpu.get("utilisation")), _power(gpu.get("power_w"))] if gpus else []),
        server["url"],
    ]


def _at_once(server: dict[str, Any]) -> str:
    """Requests that the server really runs at once, and of how many asked for when that is another number."""
    effective, requested = server["effective_cap"], server["requested_cap"]
    if effective is None or requested is None or effective == requested:
        return _number(effective if effective is not None else requested)
    return f"{effective} of {requested}"


def _notes(server: dict[str, Any]) -> list[str]:
    notes = []
    if server["state"] != "ready" and server["why"]:
        notes.append(f"{server['state']}, {server['why']}")
    if server["cap_reason"]:
        notes.append(f"runs {server['effective_cap']} of {server['requested_cap']} at once: {server['cap_reason']}")
    if server["faults"]:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(server["faults"].items()))
        last = f"; last {server['last_fault']}" if server["last_fault"] else ""
        notes.append(f"{server['answers']} answers; faults: {counts}{last}")
    if server["state"] in ("failed", "refused", "backoff") and server["log"]:
        notes.append(f"its log is {server['log']}")
    return notes


def duration(seconds: float) -> str:
    """`45s`, `12m`, `3h05m`, `2d07h`."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if minutes < 1:
        return f"{int(seconds)}s"
    if hours < 1:
        return f"{minutes}m"
    if hours < 48:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{hours // 24}d{hours % 24:02d}h"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _power(watts: float | None) -> str:
    return "-" if watts is None else f"{watts:.0f} W"

"""A Status as people read it, on a terminal and through a pipe."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardmill.status.model import Failure, Figures, Server, Status, Trend
from shardmill.status.words import lines

_COLOURS = {"ready": "green", "refused": "red", "failed": "red"}
_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE = 16  # characters of a curve
_GIB = 1 << 30


def render(status: Status, out: Console) -> RenderableType:
    """On a terminal folded to its width; for a pipe a line a fact, however long. The most urgent first."""
    facts = list(lines(status))
    parts: list[RenderableType]
    if out.is_terminal:
        parts = [_grid(facts, _bar(status))]
    else:
        parts = [Text(f"{name:<9}{value}") for name, value in facts]
    if status.warnings:
        parts += [Text(), *(Text(f"Warning: {warning}", style="yellow") for warning in status.warnings)]
    if status.fleet.servers:
        parts += [part for table in _servers(status.fleet.servers, out) for part in (Text(), table)]
    if status.other_gpus:
        parts += [Text(), Text("\n".join(_gpu_lines(status)))]
    parts += [Text(), _estimates(status)]
    if status.failures:
        parts += [Text(), *_failures(status.failures)]
    if status.trends:
        parts += [Text(), _trends(status.trends, out)]
    return Group(*parts)


def _grid(facts: list[tuple[str, str]], bar: ProgressBar | None) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(name, Text(value))
        if name == "prompts" and bar is not None:
            grid.add_row("", bar)
    return grid


def _bar(status: Status) -> ProgressBar | None:
    prompts = status.prompts
    return ProgressBar(prompts.all, prompts.ok + prompts.failed, width=60) if prompts.all else None


def _servers(servers: tuple[Server, ...], out: Console) -> list[Table]:
    """One table, or two where it doesn't fit. A column in which no server has anything is left out."""
    columns = [
        ("running", [_number(server.running) for server in servers]),
        ("queued", [_number(server.queued) for server in servers]),
        ("at once", [_at_once(server) for server in servers]),
        ("KV", [_share(server.kv_use) for server in servers]),
        ("Mamba", [_share(server.mamba_use) for server in servers]),
        ("memory", [_gib(server.resident_bytes) for server in servers]),
        ("GPU", [_share(server.gpu_use) for server in servers]),
        ("power", [_number(server.gpu_power_w, unit=" W") for server in servers]),
        ("GPU mem", [_gib(server.gpu_bytes) for server in servers]),
        ("restarts", [_number(server.restarts or None) for server in servers]),
        ("tok/s now", [_number(server.tokens_per_s_now) for server in servers]),
        ("mean", [_number(server.tokens_per_s) for server in servers]),
        ("accept now", [_number(server.accept_length_now, 2) for server in servers]),
        ("mean", [_number(server.accept_length, 2) for server in servers]),
        ("answers", [_number(server.answers) for server in servers]),
    ]
    used = [(name, cells) for name, cells in columns if any(cell != "-" for cell in cells)]
    whole = _server_table(servers, used)
    if Measurement.get(out, out.options.update(max_width=1000), whole).maximum <= out.width:
        return [whole]
    half = -(-len(used) // 2)
    return [_server_table(servers, used[:half]), _server_table(servers, used[half:])]


def _server_table(servers: tuple[Server, ...], columns: list[tuple[str, list[str]]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("server")
    table.add_column("state")
    for name, _ in columns:
        table.add_column(name, justify="right")
    for index, server in enumerate(servers):
        state = Text(server.state or "-", style=_COLOURS.get(server.state or "", "yellow"))
        table.add_row(server.name, state, *(cells[index] for _, cells in columns))
    return table


def _gpu_lines(status: Status) -> Iterator[str]:
    for gpu in status.other_gpus:
        power = "-" if gpu.power_w is None else f"{gpu.power_w:.0f} W"
        yield f"GPU {gpu.index} of this machine: {_share(gpu.use)} busy, {power}, {_gib(gpu.bytes)}"


def _estimates(status: Status) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("whole build")
    for name in ("expected by the pilot", "as it comes out"):
        table.add_column(name, justify="right")
    figures = [_figures(status.outlook.estimated), _figures(status.outlook.actual)]
    for index, name in enumerate(_FIGURES):
        table.add_row(name, *(column[index] for column in figures))
    return table


_FIGURES = ("tokens an answer", "tokens", "tokens/s a server", "server hours", "hours", "dollars")


def _figures(figures: Figures | None) -> list[str]:
    if figures is None:
        return ["-"] * len(_FIGURES)
    dollars = "-" if figures.usd is None else f"${figures.usd:,.2f}"
    return [
        _number(figures.mean_tokens),
        _number(figures.tokens),
        _number(figures.tokens_per_s_per_server),
        _number(figures.server_hours, 2),
        _number(figures.hours, 2),
        dollars,
    ]


def _failures(failures: tuple[Failure, ...]) -> Iterator[RenderableType]:
    for failure in failures:
        line = Text(f"{failure.rows:,} failed: ")
        line.append(failure.reason, style="bold red")
        line.append(f", {failure.meaning}")
        yield line
        for example in failure.examples:
            prompt = f': "{example.prompt}"' if example.prompt else ""
            tries = "1 attempt" if example.attempts == 1 else f"{example.attempts} attempts"
            text = f"{example.shard}, {example.conversation_id[:16]} turn {example.turn}, {tries}"
            yield Padding(Text(text + prompt), (0, 0, 0, 2))


def _trends(trends: tuple[Trend, ...], out: Console) -> Table:
    """A row a server; without the curves where they don't fit. What warns is coloured, and said above the servers."""
    whole = _trend_table(trends, curves=True)
    fits = Measurement.get(out, out.options.update(max_width=1000), whole).maximum <= out.width
    return whole if fits else _trend_table(trends, curves=False)


def _trend_table(trends: tuple[Trend, ...], curves: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("over the hours")
    kinds = list(dict.fromkeys(trend.what for trend in trends))
    for kind in kinds:
        table.add_column(kind, no_wrap=True)
    for server in dict.fromkeys(trend.server for trend in trends):
        moved = {trend.what: trend for trend in trends if trend.server == server}
        table.add_row(server, *(_moved(moved[kind], curves) if kind in moved else Text("-") for kind in kinds))
    return table


def _moved(trend: Trend, curve: bool) -> Text:
    first, last = _value(trend.what, trend.first), _value(trend.what, trend.last)
    text = f"{first} → {last} {round(trend.change, 2) + 0.0:+.0%}"  # + 0.0: there is no -0%
    return Text(f"{text} {_spark(trend)}" if curve else text, style="yellow" if trend.warning else "")


def _value(what: str, value: float) -> str:
    return _gib(value) if what == "memory" else _number(value, 2 if what == "accept length" else 0)


def _spark(trend: Trend) -> str:
    """The curve in block characters, from zero to its highest value."""
    most = max(point.value for point in trend.points)
    step = -(-len(trend.points) // _CURVE)
    return "".join(_BLOCKS[min(7, int(8 * point.value / most))] if most else " " for point in trend.points[::step])


def _at_once(server: Server) -> str:
    effective, requested = server.effective_cap, server.requested_cap
    if effective is None or requested is None or effective == requested:
        return _number(effective if effective is not None else requested)
    return f"{effective} of {requested}"


def _number(value: float | None, digits: int = 0, unit: str = "") -> str:
    return "-" if value is None else f"{value:,.{digits}f}{unit}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value / _GIB:.1f} GiB"

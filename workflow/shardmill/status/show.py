"""A Status as people read it, on a terminal and through a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardmill.fleet.show import duration
from shardmill.status.model import Failure, Figures, Server, Status, Trend

_COLOURS = {"ready": "green", "refused": "red", "failed": "red"}
_BLOCKS = "▁▂▃▄▅▆▇█"
_GIB = 1 << 30


def render(status: Status, out: Console) -> RenderableType:
    """On a terminal folded to its width; for a pipe a line a fact, however long."""
    lines = list(_lines(status))
    parts: list[RenderableType]
    if out.is_terminal:
        parts = [_grid(lines, _bar(status))]
    else:
        parts = [Text(f"{name:<9}{value}") for name, value in lines]
    if status.fleet.servers:
        parts += [part for table in _servers(status.fleet.servers, out) for part in (Text(), table)]
    if status.other_gpus:
        parts += [Text(), Text("\n".join(_gpu_lines(status)))]
    parts += [Text(), _estimates(status)]
    if status.failures:
        parts += [Text(), *_failures(status.failures)]
    if status.trends:
        parts += [Text(), _trends(status.trends)]
    if status.warnings:
        parts += [Text(), *(Text(f"Warning: {warning}", style="yellow") for warning in status.warnings)]
    return Group(*parts)


def _grid(lines: list[tuple[str, str]], bar: ProgressBar | None) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in lines:
        grid.add_row(name, Text(value))
        if name == "prompts" and bar is not None:
            grid.add_row("", bar)
    return grid


def _bar(status: Status) -> ProgressBar | None:
    prompts = status.prompts
    return ProgressBar(prompts.all, prompts.ok + prompts.failed, width=60) if prompts.all else None


def _lines(status: Status) -> Iterator[tuple[str, str]]:
    yield "build", status.root
    yield "run", _run(status)
    yield "shards", _shards(status)
    yield "prompts", _prompts(status)
    yield "speed", _speed(status)
    yield "left", _left(status)
    yield "answers", _answers(status)
    yield "servers", _fleet(status)
    yield "store", _store(status)
    yield "dataset", _dataset(status)
    yield "checks", _checks(status)


def _run(status: Status) -> str:
    run = status.run
    if run.at_work:
        since = "" if run.started is None else f" since {_clock(run.started)} ({duration(status.taken - run.started)})"
        return f"at work{since}, pid {run.pid} on {run.host}: {run.command}"
    if run.started is None:
        return "none has been at work here"
    sign = "" if run.last_sign is None else f", last answers {_clock(run.last_sign)}"
    return f"none at work; the last one began {_clock(run.started)}{sign}"


def _shards(status: Status) -> str:
    shards = status.shards
    parts = [f"{shards.published:,} of {shards.all:,} finished"]
    if shards.restored or shards.to_restore:
        parts.append(f"{shards.restored:,} of them restored from S3 (of {shards.to_restore:,} to restore)")
    for count, what in (
        (shards.answered, "answered, not published yet"),
        (shards.generating, "generating"),
        (shards.begun, "begun and stopped"),
        (shards.waiting, "waiting"),
    ):
        if count:
            parts.append(f"{count:,} {what}")
    return ", ".join(parts)


def _prompts(status: Status) -> str:
    prompts = status.prompts
    total = "an unknown number" if prompts.all is None else f"{prompts.all:,}"
    share = "" if status.dataset.answered_share is None else f" ({status.dataset.answered_share:.1%})"
    parts = [f"{prompts.ok:,} of {total} answered{share}"]
    for count, what in (
        (prompts.failed, "failed"),
        (prompts.not_reached, "not reached, after a failed turn"),
        (prompts.reused, "reused from other builds"),
        (prompts.in_flight, "in flight"),
        (prompts.left or 0, "left"),
    ):
        if count:
            parts.append(f"{count:,} {what}")
    return ", ".join(parts)


def _speed(status: Status) -> str:
    pace = status.pace
    parts = []
    if pace.tokens_per_s_now is not None:
        parts.append(f"now {pace.tokens_per_s_now:,.0f} tokens/s, {pace.requests_per_s_now:.2f} requests/s")
    if pace.tokens_per_s is not None and pace.requests_per_s is not None:
        each = "" if pace.tokens_per_s_per_server is None else f", {pace.tokens_per_s_per_server:,.0f} a server"
        parts.append(f"mean {pace.tokens_per_s:,.0f} tokens/s{each}, {pace.requests_per_s:.2f} requests/s")
    return "; ".join(parts) or "nothing answered yet"


def _left(status: Status) -> str:
    look = status.outlook
    if status.prompts.left == 0:
        return f"nothing: every prompt has its row{_spent(status)}"
    if look.left_s is None:
        return f"not known yet{_spent(status)}"
    when = "" if look.finished_at is None else f", until {_clock(look.finished_at)}"
    return f"about {duration(look.left_s)} of answering{when}{_spent(status)}"


def _spent(status: Status) -> str:
    look = status.outlook
    hours = f"; {status.pace.server_hours:,.2f} server hours so far"
    if look.usd_so_far is None:
        return f"{hours} (set cost.usd_per_gpu_hour for dollars)" if status.fleet.engine == "sglang" else hours
    come = "" if look.usd_to_come is None else f", ${look.usd_to_come:,.2f} to come"
    return f"{hours}, ${look.usd_so_far:,.2f} so far{come}"


def _answers(status: Status) -> str:
    prompts = status.prompts
    if prompts.mean_tokens is None:
        return "none yet"
    parts = [f"mean {prompts.mean_tokens:,.0f} tokens, {prompts.tokens:,} in all"]
    if prompts.cut_share is not None:
        parts.append(f"{prompts.cut_share:.1%} cut at the length limit")
    if status.faults:
        parts.append("server faults, all tried again: " + ", ".join(f"{n} {kind}" for kind, n in status.faults.items()))
    return "; ".join(parts)


def _fleet(status: Status) -> str:
    fleet = status.fleet
    parts = []
    if fleet.alive:
        parts.append(f"{fleet.ready} of {len(fleet.servers)} ready, {fleet.waiting} requests waiting for a place")
    else:
        parts.append("no fleet at work")
    match fleet.mtp:
        case "on":
            parts.append(f"MTP is on, accept length {fleet.accept_length:.2f}")
        case "useless":
            parts.append(f"MTP is on and useless, accept length {fleet.accept_length:.2f}")
        case "off":
            parts.append("MTP is off: no server gives an accept length")
        case _:
            parts.append("MTP: the servers don't say")
    if fleet.alive and fleet.seen is not None:
        parts.append(f"seen {duration(max(0.0, status.taken - fleet.seen))} ago")
    return "; ".join(parts)


def _store(status: Status) -> str:
    store = status.store
    if store.where is None:
        return "none: shards stay on this machine (s3.bucket)"
    if store.offline:
        return f"{store.where}, not used (s3.offline)"
    parts = [f"{store.where}: {store.published_shards:,} shards, {_bytes(store.published_bytes)}"]
    if store.last_published is not None:
        parts.append(f"last {_clock(store.last_published)}")
    if store.behind_shards:
        parts.append(f"{store.behind_shards:,} shards and {_bytes(store.behind_bytes)} behind")
    else:
        parts.append("nothing behind")
    if store.usd_per_month is not None:
        parts.append(f"${store.usd_per_month:,.2f} a month")
    return ", ".join(parts)


def _dataset(status: Status) -> str:
    use = status.dataset
    if use.records is None:
        return "not read yet"
    parts = [f"{use.records:,} records"]
    for count, what in (
        (use.joined, "joined with others (rejoin)"),
        (use.duplicates, "duplicates (dedupe)"),
        (use.beyond_limit, "beyond the limit (limit)"),
        (use.rejected, "rejected"),
    ):
        if count:
            parts.append(f"- {count:,} {what}")
    prompts = "" if use.prompts is None else f" = {use.prompts:,} prompts (turns: {use.turns})"
    rejected = ", ".join(f"{reason} {count:,}" for reason, count in use.rejected_by_reason.items())
    return " ".join(parts) + f" = {use.conversations:,} conversations{prompts}" + (f"; {rejected}" if rejected else "")


def _checks(status: Status) -> str:
    verdict = status.verdict
    words = {True: "passed", False: "not passed", None: "not checked yet"}
    failed = f"; not met: {', '.join(verdict.failed_checks)}" if verdict.failed_checks else ""
    return f"pilot {words[verdict.pilot]}, build {words[verdict.build]}{failed}"


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
            text = f"{example.shard}, {example.conversation_id[:16]} turn {example.turn}, {example.attempts} attempts"
            yield Padding(Text(text + prompt), (0, 0, 0, 2))


def _trends(trends: tuple[Trend, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("over the hours", "server"):
        table.add_column(name)
    for name in ("first", "last", "change"):
        table.add_column(name, justify="right")
    table.add_column("")
    for trend in trends:
        table.add_row(
            trend.what,
            trend.server,
            _value(trend.what, trend.first),
            _value(trend.what, trend.last),
            Text(f"{trend.change:+.0%}", style="yellow" if trend.warning else ""),
            Text(_spark(trend), no_wrap=True),
        )
    return table


def _value(what: str, value: float) -> str:
    return _gib(value) if what == "memory" else _number(value, 2 if what == "accept length" else 0)


def _spark(trend: Trend) -> str:
    """The curve in block characters, from zero to its highest value."""
    most = max(point.value for point in trend.points)
    step = max(1, len(trend.points) // 30)
    return "".join(_BLOCKS[min(7, int(8 * point.value / most))] if most else " " for point in trend.points[::step])


def _at_once(server: Server) -> str:
    effective, requested = server.effective_cap, server.requested_cap
    if effective is None or requested is None or effective == requested:
        return _number(effective if effective is not None else requested)
    return f"{effective} of {requested}"


def _clock(moment: float) -> str:
    """Local time; with its day where that isn't today's."""
    local = datetime.fromtimestamp(moment).astimezone()
    today = datetime.now().astimezone().date()
    return local.strftime("%H:%M" if local.date() == today else "%Y-%m-%d %H:%M")


def _number(value: float | None, digits: int = 0, unit: str = "") -> str:
    return "-" if value is None else f"{value:,.{digits}f}{unit}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value / _GIB:.1f} GiB"


def _bytes(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value / 1e3:,.1f} kB"

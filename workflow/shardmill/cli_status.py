"""`shardmill status`: what people ask about a run, at once, while it is at work or after."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import orjson

from shardmill.cli_common import build_options, target

if TYPE_CHECKING:
    from shardmill.status.gather import Gatherer
    from shardmill.status.model import Status

_LEAST_EVERY_S = 2.0


@click.command()
@click.option("--watch", is_flag=True, help="Again and again, until Ctrl-C.")
@click.option("--every", type=click.FloatRange(min=_LEAST_EVERY_S), default=3.0, help="Seconds, with --watch.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; with --watch, one a line.")
@build_options
def status(watch: bool, every: float, as_json: bool, root: Path | None, configfiles: tuple[Path, ...]) -> None:
    """How far a build is, how fast it goes, what it costs, how its servers are, what failed and why.

    It reads what the run leaves on disk and touches nothing: it is right while a run is at work and after.
    """
    from shardmill.status.gather import Gatherer

    subject = target(root, configfiles)
    looks = _looks(Gatherer(subject.settings, subject.build), every if watch else None)
    try:
        if as_json:
            for look in looks:
                click.echo(orjson.dumps(look.as_dict(), option=0 if watch else orjson.OPT_INDENT_2))
        else:
            _show(looks, watch)
    except KeyboardInterrupt:
        if not watch:
            raise


def _looks(gatherer: Gatherer, every: float | None) -> Iterator[Status]:
    """One, or one every so many seconds without end."""
    yield gatherer.gather()
    while every is not None:
        time.sleep(every)
        yield gatherer.gather()


def _show(looks: Iterator[Status], watch: bool) -> None:
    from rich.live import Live

    from shardmill.fleet.show import console
    from shardmill.status.show import render

    out = console()
    if not (watch and out.is_terminal):
        for look in looks:
            out.print(render(look, out), soft_wrap=not out.is_terminal)
        return
    with Live(console=out, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
        for look in looks:
            live.update(render(look, out), refresh=True)

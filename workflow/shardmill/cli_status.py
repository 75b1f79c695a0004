"""`shardmill status`: what people ask about a run, at once, while it is at work or after."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import orjson

from shardmill.cli_common import build_options, target

if TYPE_CHECKING:
    from shardmill.status.gather import Gatherer

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
    gatherer = Gatherer(subject.settings, subject.build)
    if as_json:
        while True:
            option = 0 if watch else orjson.OPT_INDENT_2
            click.echo(orjson.dumps(gatherer.gather().as_dict(), option=option))
            if not watch:
                return
            time.sleep(every)
    _show(gatherer, every if watch else None)


def _show(gatherer: Gatherer, every: float | None) -> None:
    from rich.live import Live

    from shardmill.fleet.show import console
    from shardmill.status.show import render

    out = console()
    if every is None or not out.is_terminal:
        while True:
            out.print(render(gatherer.gather(), out), soft_wrap=not out.is_terminal)
            if every is None:
                return
            time.sleep(every)
    with Live(render(gatherer.gather(), out), console=out, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(every)
            live.update(render(gatherer.gather(), out), refresh=True)

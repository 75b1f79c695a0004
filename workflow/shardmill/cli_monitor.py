"""`shardmill monitor`: the status as a live web page on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from shardmill.cli_common import build_options, target


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="0 takes a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Another than loopback shows the page to others.")
@click.option("--every", type=click.FloatRange(min=1.0), default=3.0, show_default=True, help="Seconds between looks.")
@build_options
def monitor(port: int, host: str, every: float, root: Path | None, configfiles: tuple[Path, ...]) -> None:
    """Show a build's status as a web page that refreshes by itself, until Ctrl-C. It is read-only.

    From another machine, over SSH: ssh -L 8765:127.0.0.1:8765 HOST, then http://localhost:8765.
    """
    from shardmill.monitor.server import Latest, is_loopback, make_server
    from shardmill.status.gather import Gatherer

    subject = target(root, configfiles)
    server = make_server(host, port, Latest(Gatherer(subject.settings, subject.build).gather, every))
    if not is_loopback(host):
        click.echo(f"Everybody who reaches {host} can read this page.", err=True)
    name = f"[{host}]" if ":" in host else host
    click.echo(f"{subject.build.name} at http://{name}:{server.server_port}/ (Ctrl-C ends it)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()

"""`shardmill doctor`: whether this machine can run the build that the config names, and what to do where it can't."""

from __future__ import annotations

import asyncio
import importlib.util
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from shardmill.cli_common import build_options, settings_for
from shardmill.digests import input_digests
from shardmill.engines.choose import api_key
from shardmill.errors import SetupFault, ShardmillError
from shardmill.settings import Servers, Settings

_MIN_DISK = 2e9
_ASK_S = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    well: bool
    detail: str


@click.command()
@build_options
def doctor(root: Path | None, configfiles: tuple[Path, ...]) -> None:
    """Checks environment, inputs, disk, servers and store. Exit code 1 when something needs mending.

    Before the first run, when there is no build yet, it goes by config/config.yaml.
    """
    findings = list(_findings(settings_for(root, configfiles), Path()))
    for finding in findings:
        mark = click.style("ok  ", fg="green") if finding.well else click.style("MEND", fg="red", bold=True)
        click.echo(f"{mark}  {finding.what:<12} {finding.detail}")
    faults = sum(not finding.well for finding in findings)
    click.echo(f"{len(findings)} checked, {faults} to mend")
    sys.exit(1 if faults else 0)


def _findings(settings: Settings, base: Path) -> Iterator[Finding]:
    yield _python()
    yield _attempt("inputs", lambda: _inputs(settings, base))
    yield _disk(base / settings.results)
    yield from _servers(settings)
    if settings.s3.used:
        yield _attempt("store", lambda: _store(settings))


def _attempt(what: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except ShardmillError as error:
        return Finding(what, False, str(error))


def _python() -> Finding:
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Finding("python", sys.version_info >= (3, 11), f"{version} in {sys.prefix}")


def _inputs(settings: Settings, base: Path) -> Finding:
    digests = input_digests(settings, base)
    if digests.missing:
        return Finding("inputs", False, " ".join(digests.missing))
    size = sum(file.stat().st_size for file in digests.dataset_files)
    return Finding(
        "inputs", True, f"{len(digests.dataset_files)} dataset file(s), {size / 1e6:.1f} MB; tokenizer found"
    )


def _disk(results: Path) -> Finding:
    place = results
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    return Finding("disk", free >= _MIN_DISK, f"{free / 1e9:.1f} GB free for {results}")


def _servers(settings: Settings) -> Iterator[Finding]:
    servers = settings.servers
    try:
        api_key(servers)
    except SetupFault as fault:
        yield Finding("servers", False, str(fault))
        return
    if servers.launch:
        yield _launched(servers)
    else:
        yield from _endpoints(settings)


def _launched(servers: Servers) -> Finding:
    if servers.engine == "llamacpp":
        found = importlib.util.find_spec("xllamacpp") is not None
        return Finding("servers", found, "the embedded server is installed" if found else "Run `make venv`.")
    command = shlex.split(servers.command or "sglang serve")[0]
    path = shutil.which(command)
    if path is None:
        return Finding("servers", False, f"{command} is not found: run `make sglang-venv`, or set servers.command.")
    return Finding("servers", True, f"{path} on GPUs {', '.join(str(gpu) for gpu in servers.gpus)}")


def _endpoints(settings: Settings) -> Iterator[Finding]:
    """Asks each once, as `shardmill servers status` does."""
    from shardmill.fleet.command import look

    file = settings.servers.endpoints_file
    missing = file is not None and not Path(file).exists()
    if missing:
        yield Finding("servers", False, f"servers.endpoints_file names {file}, which is not there: one URL a line.")
    try:
        state = asyncio.run(look(settings, _ASK_S))
    except ShardmillError as error:
        yield Finding("servers", False, str(error))
        return
    assert state is not None, "only servers that are launched can't be looked at without a fleet"
    servers = state["servers"]
    ready = sum(server["state"] == "ready" for server in servers)
    if ready:
        said = [f"{ready} of {len(servers)} endpoints ready ({settings.servers.engine}).", *state["warnings"]]
        yield Finding("servers", True, " ".join(said))
    elif not servers and not missing:
        yield Finding("servers", False, "No endpoint is given: name one in servers.endpoints or its file.")
    for server in servers:
        if server["state"] != "ready":
            why = " ".join(server["why"].split())  # what it answered may have several lines
            yield Finding("servers", False, f"{server['url']}: {why or server['state']}")


def _store(settings: Settings) -> Finding:
    from shardmill.store.client import check_access

    check_access(settings)
    return Finding("store", True, f"bucket {settings.s3.bucket} can be read and written")

"""What the commands of `shardmill` share: which build they act on, and with which settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from shardmill.errors import UsageError
from shardmill.paths import BuildPaths
from shardmill.settings import Settings, frozen, load

Command = TypeVar("Command", bound=Callable[..., Any])
_LATEST = Path("results/latest")


@dataclass(frozen=True, slots=True)
class Target:
    """A build and the settings that it last ran with, or those of the config files given."""

    build: BuildPaths
    settings: Settings


def build_options(command: Command) -> Command:
    """The options --build and --configfile, as every command takes them."""
    command = click.option(
        "--configfile",
        "configfiles",
        type=click.Path(path_type=Path),
        multiple=True,
        help="Act on the build that config/config.yaml with this laid over it makes. Can be given several times.",
    )(command)
    return click.option(
        "--build",
        "root",
        type=click.Path(path_type=Path),
        default=None,
        help="A build's folder.  [default: results/latest]",
    )(command)


def target(root: Path | None, configfiles: tuple[Path, ...]) -> Target:
    """The build that the options name. Raises UsageError when there is none."""
    _refuse_both(root, configfiles)
    if configfiles:
        return _from_config(configfiles)
    root = root or _LATEST
    build = BuildPaths(root.resolve() if root.is_symlink() else root)
    if not build.settings.exists():
        if build.build_json.exists():
            raise UsageError(
                f"{build.settings}, which holds the settings that this build last ran with, is missing: run snakemake "
                f"again, or name the build's config with --configfile."
            )
        raise UsageError(
            f"{root} is not a build's folder: run `snakemake --cores 7`, or name one with --build or --configfile."
        )
    return Target(build, frozen(build.settings))


def settings_for(root: Path | None, configfiles: tuple[Path, ...]) -> Settings:
    """For what can be done without a build: its settings where one is named or at hand, else those of the config.

    Which build the config files name is not asked, since inputs may be missing. Raises UsageError.
    """
    _refuse_both(root, configfiles)
    if configfiles or (root is None and not _LATEST.exists()):
        return load(*configfiles)
    return target(root, ()).settings


def _refuse_both(root: Path | None, configfiles: tuple[Path, ...]) -> None:
    if root is not None and configfiles:
        raise UsageError("Give --build or --configfile, not both.")


def _from_config(configfiles: tuple[Path, ...]) -> Target:
    from shardmill.run import find_build

    settings = load(*configfiles)
    return Target(find_build(settings, Path()), settings)

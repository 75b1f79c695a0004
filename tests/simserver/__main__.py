"""`python -m simserver`: see the package's docstring."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, get_type_hints

from .config import STYLES, VERSIONS, SimConfig, read_config
from .flags import from_sglang_flags


def parse(argv: Sequence[str]) -> SimConfig:
    """The simulator's own command line: every plain setting of SimConfig is a flag."""
    parser = argparse.ArgumentParser(prog="simserver", description="A SGLang stand-in for tests and benchmarks.")
    parser.add_argument("--config", help="JSON object of settings, inline or a path; flags win over it")
    parser.add_argument("--faults", help="JSON list of fault rules, inline or a path")
    parser.add_argument("--style", choices=STYLES)
    hints = get_type_hints(SimConfig)
    for name, kind in hints.items():
        flag = "--" + name.replace("_", "-")
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
        elif kind in (int, float, str):
            parser.add_argument(flag, type=kind, choices=VERSIONS if name == "version" else None)
        elif kind == int | None:
            parser.add_argument(
                flag, type=lambda text: None if text == "none" else int(text), default=argparse.SUPPRESS
            )
        elif kind == str | None:
            parser.add_argument(flag)
        elif kind == tuple[int, ...]:
            parser.add_argument(flag, type=lambda text: tuple(int(part) for part in text.split(",") if part))
    given = vars(parser.parse_args(argv))
    values: dict[str, Any] = read_config(given["config"]) if given["config"] else {}
    if given["faults"]:
        text = given["faults"]
        values["faults"] = json.loads(text) if text.lstrip().startswith("[") else read_config_list(text)
    if given["style"]:
        values["styles"] = {given["style"]: 1.0}
    for name, kind in hints.items():
        if name in given and name not in ("config", "faults") and (given[name] is not None or kind == int | None):
            values[name] = given[name]
    return SimConfig.of(values)


def read_config_list(path: str) -> list[Any]:
    with open(path) as file:  # noqa: PTH123
        return list(json.load(file))


async def _serve(config: SimConfig) -> int:
    from .server import Server

    return await Server(config).run()


def main(argv: Sequence[str]) -> int:
    if list(argv[:2]) == ["-m", "sglang.launch_server"]:
        argv = ["serve", *argv[2:]]
    environment = os.environ.get("SIMSERVER_CONFIG")
    if list(argv) in (["version"], ["--version"]):
        config = SimConfig.of({} if environment is None else _base(read_config(environment)))
        print(f"sglang version: {config.version}")
        return 0
    try:
        if argv and (argv[0] == "serve" or ("--model-path" in argv and environment is not None)):
            config = from_sglang_flags(argv[1:] if argv[0] == "serve" else argv, environment)
        else:
            config = parse(argv)
    except ValueError as error:
        sys.stderr.write(f"simserver: {error}\n")
        return 1
    return asyncio.run(_serve(config))


def _base(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k != "by_gpu"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m shardmill.fleet FOLDER`: the fleet process of a folder (home.py). The first job starts it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from shardmill import runlock
from shardmill.descriptors import allow_many
from shardmill.errors import ShardmillError
from shardmill.fleet.process import FleetProcess
from shardmill.fleet.timing import timing
from shardmill.home import Home
from shardmill.settings import frozen


def main() -> int:
    home = Home(Path(sys.argv[1]))
    allow_many()
    try:
        with runlock.acquire(home.lock, runlock.myself("the fleet")):
            asyncio.run(FleetProcess(home, frozen(home.settings), timing()).run())
    except runlock.Held:
        return 0  # another was faster
    except ShardmillError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What all rules share: the targets of this run, and where jobs find the `shardmill` command and their build."""

import sys
from pathlib import Path

# Jobs run the command of the environment that reads this file, activated or not.
shell.prefix(f"set -euo pipefail; export PATH={Path(sys.executable).parent}:$PATH; ")

STEP = f"shardmill step --build {BUILD.root} --log {{log}}"


wildcard_constraints:
    shard=r"shard-\d{5,}-of-\d{5,}",


def each(place, shards):
    """`place` of every one of `shards`, as strings, for inputs and outputs."""
    return [str(place(shard)) for shard in shards]


def targets():
    """Every file of every unfinished shard, then the verdict over the whole build."""
    places = (BUILD.completions, BUILD.tokens, BUILD.manifest)
    wanted = [file for place in places for file in each(place, PLAN.unfinished)]
    if PLAN.quality:
        wanted.append(str(BUILD.quality_passed(PLAN.checks_key)))
    # With nothing left, a file that no rule makes: Snakemake would compare any other with how it was made before.
    return wanted or [ancient(str(BUILD.build_json))]

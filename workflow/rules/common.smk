"""What all rules share: the targets of this run, and where jobs find the `shardmill` command and their build."""

import sys
from pathlib import Path
from shlex import quote

from shardmill.run import asks_for_report

# Jobs run the command of the environment that reads this file, activated or not.
shell.prefix(
    f'set -euo pipefail; export PATH={quote(str(Path(sys.executable).parent))}:"$PATH"; '
)


# A core stays for tokenize, publish and restore, however many shards wait for servers or for disk. --resources overrides.
if "generating" not in workflow.global_resources and workflow.cores:
    workflow.register_resource("generating", max(1, workflow.cores - 1))


wildcard_constraints:
    shard=r"shard-\d{5,}-of-\d{5,}",


def each(place, shards):
    """`place` of every one of `shards`, as strings, for inputs and outputs."""
    return [str(place(shard)) for shard in shards]


def gate_ticket(wildcards):
    """The gate's verdict, for a shard that it may hold back."""
    if PLAN.gate and wildcards.shard not in PLAN.pilot:
        return str(BUILD.gate_passed(PLAN.checks_key))
    return []


def facts_ticket(wildcards):
    """Lost facts of the build, found again, for a job that needs them. Mostly nothing is lost."""
    return [str(BUILD.facts_found)] if PLAN.facts else []


def generate_priority(wildcards):
    """Between 0 and 1, falling in the order in which this machine takes the shards."""
    return 1 - (RUN.places[wildcards.shard] + 1) / (len(PLAN.shards) + 1)


def targets():
    """Every file of every unfinished shard, then the verdict over the whole build."""
    places = (BUILD.completions, BUILD.tokens, BUILD.manifest)
    wanted = [file for place in places for file in each(place, PLAN.unfinished)]
    if PLAN.pilot_report:
        wanted.append(str(BUILD.pilot_report))
    if PLAN.quality:
        wanted.append(str(BUILD.quality_passed(PLAN.checks_key)))
    # With nothing left, a file that nothing makes, since Snakemake compares any other with how it was made before.
    nothing = (
        str(BUILD.report_page)
        if asks_for_report(sys.argv)
        else ancient(str(BUILD.build_json))
    )
    return wanted or [nothing]

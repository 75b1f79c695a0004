"""Prompts to completions: a job a shard, all of them on one fleet. Every shard but the pilot waits for the gate."""


def gate_ticket(wildcards):
    """The gate's verdict, for a shard that it may hold back."""
    if PLAN.gate and wildcards.shard not in PLAN.pilot:
        return str(BUILD.gate_passed(PLAN.checks_key))
    return []


rule generate:
    input:
        prompts=str(BUILD.prompts("{shard}")),
        gate=gate_ticket,
    output:
        str(BUILD.completions("{shard}")),
    log:
        str(BUILD.logs / "generate" / "{shard}.log"),
    benchmark:
        str(BUILD.logs / "generate" / "{shard}.tsv")
    wildcard_constraints:
        shard=pattern(PLAN.generate),
    shell:
        STEP + " generate {wildcards.shard}"

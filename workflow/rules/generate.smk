"""Prompts to completions: a job a shard, all of them on one fleet. Every shard but the pilot waits for the gate."""


rule generate:
    input:
        prompts=str(BUILD.prompts("{shard}")),
        gate=gate_ticket,
        facts=facts_ticket,
    output:
        str(BUILD.completions("{shard}")),
    log:
        str(BUILD.logs / "generate" / "{shard}.log"),
    benchmark:
        str(BUILD.logs / "generate" / "{shard}.tsv")
    wildcard_constraints:
        shard=pattern(PLAN.generate),
    priority: generate_priority
    resources:
        generating=1,
    params:
        build=BUILD.root,
    shell:
        "shardmill step --build {params.build:q} --log {log:q} generate {wildcards.shard}"

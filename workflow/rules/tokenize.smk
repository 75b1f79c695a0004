"""Completions to training rows: validated, with ids and a loss mask of the same length."""


rule tokenize:
    input:
        completions=str(BUILD.completions("{shard}")),
        facts=facts_ticket,
    output:
        str(BUILD.tokens("{shard}")),
    log:
        str(BUILD.logs / "tokenize" / "{shard}.log"),
    benchmark:
        str(BUILD.logs / "tokenize" / "{shard}.tsv")
    wildcard_constraints:
        shard=pattern(PLAN.tokenize),
    priority: 1
    params:
        build=BUILD.root,
    shell:
        "shardmill step --build {params.build:q} --log {log:q} tokenize {wildcards.shard}"

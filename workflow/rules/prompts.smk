"""Dataset to prompts: one job that writes the shards still to be answered, and what was rejected and why.

The second rule is for a build that lost its counts or its rejects and needs no prompt: the same job, writing no shard.
"""


rule make_prompts:
    input:
        dataset=[ancient(str(file)) for file in RUN.digests.dataset_files],
    output:
        shards=each(BUILD.prompts, PLAN.prompts),
        rejects=str(BUILD.rejects),
    log:
        str(BUILD.logs / "prompts.log"),
    benchmark:
        str(BUILD.logs / "prompts.tsv")
    threads: workflow.cores
    params:
        build=BUILD.root,
    shell:
        "shardmill step --build {params.build:q} --log {log:q} prompts --threads {threads}"


rule find_facts:
    input:
        dataset=[ancient(str(file)) for file in RUN.digests.dataset_files],
    output:
        temp(touch(str(BUILD.facts_found))),
    log:
        str(BUILD.logs / "facts.log"),
    benchmark:
        str(BUILD.logs / "facts.tsv")
    threads: workflow.cores
    params:
        build=BUILD.root,
    shell:
        "shardmill step --build {params.build:q} --log {log:q} prompts --threads {threads}"

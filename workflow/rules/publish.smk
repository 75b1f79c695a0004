"""Finished shards to S3 and back. The manifest is written last: where it is, everything that it names is."""


rule publish:
    input:
        completions=str(BUILD.completions("{shard}")),
        tokens=str(BUILD.tokens("{shard}")),
    output:
        str(BUILD.manifest("{shard}")),
    log:
        str(BUILD.logs / "publish" / "{shard}.log"),
    benchmark:
        str(BUILD.logs / "publish" / "{shard}.tsv")
    wildcard_constraints:
        shard=pattern(PLAN.publish),
    priority: 1
    params:
        build=BUILD.root,
    shell:
        "shardmill step --build {params.build:q} --log {log:q} publish {wildcards.shard}"


rule restore:
    output:
        completions=str(BUILD.completions("{shard}")),
        tokens=str(BUILD.tokens("{shard}")),
        manifest=str(BUILD.manifest("{shard}")),
    log:
        str(BUILD.logs / "restore" / "{shard}.log"),
    benchmark:
        str(BUILD.logs / "restore" / "{shard}.tsv")
    wildcard_constraints:
        shard=pattern(PLAN.restore),
    priority: 1
    params:
        build=BUILD.root,
    shell:
        "shardmill step --build {params.build:q} --log {log:q} restore {wildcards.shard}"

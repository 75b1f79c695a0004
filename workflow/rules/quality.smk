"""The whole build: its checks, its report, and last the verdict, so that a build that fails can be read about."""


rule check_build:
    input:
        manifests=each(BUILD.manifest, PLAN.unfinished),
        pilot=[str(BUILD.pilot_report)] if PLAN.pilot_report else [],
        facts=facts_ticket,
    output:
        report=str(BUILD.quality_report),
        checked=touch(str(BUILD.quality_checked(PLAN.checks_key))),
    log:
        str(BUILD.logs / "check_build.log"),
    benchmark:
        str(BUILD.logs / "check_build.tsv")
    params:
        build=BUILD.root,
    shell:
        "shardmill step --build {params.build:q} --log {log:q} check-build"


rule report:
    input:
        report=str(BUILD.quality_report),
        checked=str(BUILD.quality_checked(PLAN.checks_key)),
    output:
        page=report(str(BUILD.report_page), category="Build"),
        catalog=str(BUILD.catalog),
        card=str(BUILD.card),
    log:
        str(BUILD.logs / "report.log"),
    benchmark:
        str(BUILD.logs / "report.tsv")
    params:
        build=BUILD.root,
    shell:
        "shardmill step --build {params.build:q} --log {log:q} report"


rule verdict:
    input:
        report=str(BUILD.quality_report),
        page=str(BUILD.report_page),
        catalog=str(BUILD.catalog),
    output:
        touch(str(BUILD.quality_passed(PLAN.checks_key))),
    log:
        str(BUILD.logs / "verdict.log"),
    benchmark:
        str(BUILD.logs / "verdict.tsv")
    params:
        build=BUILD.root,
    shell:
        "shardmill step --build {params.build:q} --log {log:q} verdict {input.report:q}"

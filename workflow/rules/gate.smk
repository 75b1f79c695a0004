"""The pilot's checks. Two rules, since a rule that fails loses its outputs: one writes the report, one judges it."""


rule check_pilot:
    input:
        completions=each(BUILD.completions, PLAN.pilot),
        tokens=each(BUILD.tokens, PLAN.pilot),
    output:
        report=str(BUILD.pilot_report),
        checked=touch(str(BUILD.pilot_checked(PLAN.checks_key))),
    log:
        str(BUILD.logs / "check_pilot.log"),
    benchmark:
        str(BUILD.logs / "check_pilot.tsv")
    priority: 2
    params:
        build=BUILD.root,
    shell:
        "shardmill step --build {params.build:q} --log {log:q} check-pilot"


rule gate:
    input:
        report=str(BUILD.pilot_report),
        checked=str(BUILD.pilot_checked(PLAN.checks_key)),
    output:
        touch(str(BUILD.gate_passed(PLAN.checks_key))),
    log:
        str(BUILD.logs / "gate.log"),
    benchmark:
        str(BUILD.logs / "gate.tsv")
    priority: 2
    params:
        build=BUILD.root,
    shell:
        "shardmill step --build {params.build:q} --log {log:q} verdict {input.report:q}"

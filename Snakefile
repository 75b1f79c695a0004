"""shardmill: a ShareGPT-style dataset into training shards written by the model that the config names.

    prompts ─┬─ generate (pilot) ─ gate ─┐
             └─ generate (the rest) ◄────┘ ─ tokenize ─ publish ─ quality ─ report

What is finished is decided here, while the workflow is read: by content and existence, never by clocks. PLAN lists the
shards that still need each step, and a rule matches no other. Servers are nobody's input: the first job that needs
them starts them, and they leave when the run ends.
"""

from shardmill.plan import pattern
from shardmill.run import open_run


configfile: "config/config.yaml"


RUN = open_run(config, workflow.config_settings, not workflow.is_main_process)
BUILD, PLAN = RUN.build, RUN.plan


include: "workflow/rules/common.smk"
include: "workflow/rules/prompts.smk"
include: "workflow/rules/generate.smk"
include: "workflow/rules/gate.smk"
include: "workflow/rules/tokenize.smk"
include: "workflow/rules/publish.smk"
include: "workflow/rules/quality.smk"


rule all:
    default_target: True
    input:
        targets(),


onstart:
    RUN.start()


onsuccess:
    RUN.succeeded()


onerror:
    RUN.failed()

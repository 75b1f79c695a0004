"""`snakemake --lint`, clean but for its demand for a conda environment or container in each rule (CONTRACTS.md)."""

from __future__ import annotations

import json
import subprocess
import sys

WAIVED = "Specify a conda environment or container for each rule."


def main() -> int:
    done = subprocess.run(["snakemake", "--lint", "json"], capture_output=True, text=True)
    start = done.stdout.find("{")
    if start < 0:
        sys.stderr.write(f"snakemake --lint gave no report:\n{done.stdout}{done.stderr}")
        return 1
    report = json.loads(done.stdout[start:])
    found = [
        f"{item.get('rule', item.get('snakefile', '?'))}: {lint['title']}"
        for item in [*report.get("rules", []), *report.get("snakefiles", [])]
        for lint in item["lints"]
        if lint["title"] != WAIVED
    ]
    for line in found:
        print(line)
    print(f"snakemake --lint: {len(report.get('rules', []))} rules, {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

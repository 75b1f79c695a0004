"""Times that tests shorten, through the environment; nobody else needs to."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import orjson

from shardmill.errors import SettingsError


def shortened(variable: str, known: Collection[str]) -> dict[str, Any]:
    """Times by name from the JSON object in an environment variable; none where it isn't set."""
    given: dict[str, Any] = orjson.loads(os.environ.get(variable) or "{}")
    unknown = given.keys() - known
    if unknown:
        raise SettingsError(f"{variable} has {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}.")
    return given

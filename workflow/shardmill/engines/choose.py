"""The engine that a config names, and its key."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardmill.engines.base import Engine
from shardmill.errors import SettingsError, SetupFault
from shardmill.settings import Servers

if TYPE_CHECKING:
    import aiohttp


def engine(name: str, api_key: str | None = None) -> Engine:
    """`name` as in servers.engine; `api_key` is sent as a bearer token and shown nowhere."""
    match name:
        case "sglang":
            from shardmill.engines.sglang import SGLang

            return SGLang(api_key)
        case "llamacpp":
            from shardmill.engines.llamacpp import LlamaCpp

            return LlamaCpp(api_key)
        case _:
            raise SettingsError(f"Setting servers.engine is {name}, but only sglang and llamacpp are known.")


def api_key(servers: Servers) -> str | None:
    """What servers.api_key_env holds; None where it is not set. Raises SetupFault when that variable is empty."""
    if servers.api_key_env is None:
        return None
    key = os.environ.get(servers.api_key_env)
    if not key:
        raise SetupFault(
            f"The environment variable {servers.api_key_env} (servers.api_key_env) is empty: put the API key into it."
        )
    return key


def new_session() -> aiohttp.ClientSession:
    """The one HTTP session of a job or of the fleet; close it when done. Must be called inside a running loop."""
    from shardmill.engines import http

    return http.new_session()

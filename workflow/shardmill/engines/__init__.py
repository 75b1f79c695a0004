"""Engines: the HTTP dialects of model servers."""

from shardmill.engines.base import (
    Answer,
    Engine,
    Fault,
    PromptRefused,
    Refusal,
    Request,
    SamplingParams,
    ServerFault,
    ServerInfo,
    ServerLoad,
)
from shardmill.engines.choose import api_key, engine, new_session

__all__ = [
    "Answer",
    "Engine",
    "Fault",
    "PromptRefused",
    "Refusal",
    "Request",
    "SamplingParams",
    "ServerFault",
    "ServerInfo",
    "ServerLoad",
    "api_key",
    "engine",
    "new_session",
]

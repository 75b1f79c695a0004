"""Engines: the HTTP dialects of model servers."""

from shardmill.engines.base import (
    Answer,
    Engine,
    Fault,
    PromptRefused,
    Request,
    SamplingParams,
    ServerFault,
    ServerInfo,
    ServerLoad,
)
from shardmill.engines.choose import engine

__all__ = [
    "Answer",
    "Engine",
    "Fault",
    "PromptRefused",
    "Request",
    "SamplingParams",
    "ServerFault",
    "ServerInfo",
    "ServerLoad",
    "engine",
]

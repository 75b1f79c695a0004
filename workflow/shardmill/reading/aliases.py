"""One table of the names that ShareGPT dialects go by, and how a name is looked up in it.

What is in no table is rejected by its name, never guessed, and never taken for the assistant.
"""

from __future__ import annotations

import functools
from typing import Any

# Keys are compared without case; a key written exactly like this goes before a variant.
ID_KEYS = ("id", "conversation_id", "conv_id", "_id", "uuid")
TURNS_KEYS = ("conversations", "conversation", "messages", "items")
SYSTEM_KEYS = ("system", "system_prompt")
TOOLS_KEYS = ("tools", "functions")
ROLE_KEYS = ("from", "role")
CONTENT_KEYS = ("value", "content", "text")

# Roles are compared in lower case, without outer spaces, and with `_` for inner spaces and hyphens.
FUNCTION_CALL = "function_call"
ROLES: dict[str, str] = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(
        ("gpt", "assistant", "chatgpt", "bing", "bard", "bot", "chatbot", "ai", "model", "claude"), "assistant"
    ),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
    **dict.fromkeys(
        tuple(f"{what}_{kind}" for what in ("tool", "function") for kind in ("response", "result", "output")),
        "tool",
    ),
    **dict.fromkeys((FUNCTION_CALL, "tool_call", "tool_calls"), FUNCTION_CALL),
}

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


@functools.lru_cache(maxsize=1024)
def known_role(written: str) -> str | None:
    return ROLES.get("_".join(written.replace("-", " ").replace("_", " ").lower().split()))


def get(mapping: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The first value that is not null under one of `keys`, whatever their case; None where there is none."""
    for key in _present(tuple(mapping), keys):
        value = mapping[key]
        if value is not None:
            return value
    return None


def keys_there(mapping: dict[str, Any], keys: tuple[str, ...]) -> tuple[str, ...]:
    """Which of `keys` `get` may find something under."""
    return _keys_there(tuple(mapping), keys)


@functools.lru_cache(maxsize=4096)
def _keys_there(there: tuple[str, ...], keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(key for key in keys if _present(there, (key,)))


@functools.lru_cache(maxsize=4096)
def _present(there: tuple[str, ...], keys: tuple[str, ...]) -> tuple[str, ...]:
    """Which keys of an object are some of `keys`, in the order of those, exact spelling first. Few shapes are many."""
    exact = [key for key in keys if key in there]
    variants = [key for wanted in keys for key in there if key not in keys and key.lower() == wanted]
    return (*exact, *variants)

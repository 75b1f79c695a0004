"""Which turns of a conversation are asked of the model, by `prompts.turns`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardmill.reading.text import is_blank

# A message as a chat template takes it: {"role": …, "content": …} and, for tools, {"tool_calls"}, {"name"}.
Chat = dict[str, Any]


class NoPrompt(Exception):
    """The conversation asks nothing under this policy. `args` are a reject reason and a detail."""


def asked_turns(messages: Sequence[Chat], policy: str) -> list[list[Chat]]:
    """The messages that each asked turn adds before its answer; one list a turn, in order.

    user_only: everything but the assistant's turns (and the tool results that answer them), asked once.
    final: the original history up to the last turn that wants an answer, asked once.
    regenerate: a turn for each run of user messages; the model's own earlier answers go between them.

    Raises NoPrompt for a conversation without a user turn, for a blank earlier answer under final, and for tool turns
    under regenerate, whose results answer calls that the model may not make again.
    """
    if not any(message["role"] == "user" for message in messages):
        raise NoPrompt("no_user_turn", "the conversation has no user turn")
    if policy == "final":
        return [_through_last_question(messages)]
    if policy == "user_only":
        return [[message for message in messages if message["role"] not in ("assistant", "tool")]]
    if any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        raise NoPrompt("tools_not_supported", "prompts.turns: regenerate cannot replay tool results; use final")
    return _runs_of_questions(messages)


def _through_last_question(messages: Sequence[Chat]) -> list[Chat]:
    last = max(index for index, message in enumerate(messages) if message["role"] in ("user", "tool"))
    history = list(messages[: last + 1])
    for message in history:
        if message["role"] == "assistant" and is_blank(message["content"]) and not message.get("tool_calls"):
            raise NoPrompt("empty_assistant", "an earlier answer is empty, and prompts.turns: final keeps it")
    return history


def _runs_of_questions(messages: Sequence[Chat]) -> list[list[Chat]]:
    turns: list[list[Chat]] = [[]]
    for message in messages:
        asked = any(earlier["role"] == "user" for earlier in turns[-1])
        if message["role"] == "assistant":
            if asked:
                turns.append([])
            continue
        turns[-1].append(message)
    if not any(message["role"] == "user" for message in turns[-1]):
        turns.pop()
    return turns

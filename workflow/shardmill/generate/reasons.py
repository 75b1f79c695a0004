"""Why a prompt has no answer: the closed list behind the `reason` column of completions. One place."""

from __future__ import annotations

from enum import StrEnum


class FailReason(StrEnum):
    """What is the prompt's own, so that asking again is no use. Servers' faults are never in here."""

    EMPTY = "empty"
    REPETITION = "repetition"
    TOO_LONG = "too_long"
    REFUSED = "refused"
    KILLS_SERVER = "kills_server"
    BAD_PROMPT_IDS = "bad_prompt_ids"
    TEMPLATE = "template"


MEANING: dict[FailReason, str] = {
    FailReason.EMPTY: "every attempt gave an empty answer, or nothing but a stop id",
    FailReason.REPETITION: "every attempt ended in one id or one cycle of ids without end",
    FailReason.TOO_LONG: "the prompt leaves no room for an answer in the context",
    FailReason.REFUSED: "the server refuses the prompt with status 400, in words that shardmill doesn't know",
    FailReason.KILLS_SERVER: "it was in flight at the death of three servers, and killed a fourth on its own",
    FailReason.BAD_PROMPT_IDS: "the prompt is empty or has an id outside the vocabulary, which kills a real server",
    FailReason.TEMPLATE: "the chat template cannot render this later turn",
}

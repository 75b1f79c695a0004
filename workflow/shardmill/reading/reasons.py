"""Why a record becomes no prompt: the closed list of `rejects.parquet`, and what to do about broken syntax."""

from __future__ import annotations

from enum import StrEnum


class BadRecords(StrEnum):
    """`dataset.bad_records`: what broken syntax does."""

    FAIL = "fail"  # stop at the first broken record
    REJECT = "reject"  # put it into rejects.parquet and go on behind it, where the format allows


class RejectReason(StrEnum):
    """Every reason there is. The first group is broken syntax: `bad_records: fail` stops at it, and at no other."""

    INVALID_JSON = "invalid_json"  # not JSON from this byte on, up to the next whole record
    CUT_OFF = "cut_off"  # the file, or its last line, ends inside a record, an array or a compressed frame
    TOO_LARGE = "too_large"  # no end within cursor.MAX_RECORD bytes (128 MiB)
    DAMAGED_FILE = "damaged_file"  # the compressed or Parquet file is damaged, and nothing behind that can be read

    # A whole record that can't be taken up.
    INVALID_UTF8 = "invalid_utf8"  # a text holds bytes that are not UTF-8
    TOO_DEEP = "too_deep"  # nested deeper than the parser goes (1,024 levels)
    NOT_AN_OBJECT = "not_an_object"  # the record is an array, a text, a number or null
    NO_CONVERSATIONS = "no_conversations"  # none of the fields that hold turns is there
    TURNS_NOT_A_LIST = "turns_not_a_list"  # the field of the turns holds something else than a list
    EMPTY_CONVERSATION = "empty_conversation"  # the list of turns is empty
    TURN_NOT_AN_OBJECT = "turn_not_an_object"  # a turn is a text, a number, null or a list
    MISSING_ROLE = "missing_role"  # a turn doesn't say who speaks
    UNKNOWN_ROLE = "unknown_role"  # a turn's role is in no row of the table of aliases; the detail names it
    BAD_CONTENT = "bad_content"  # a turn's content is neither text, number, null nor a list of parts
    NON_TEXT_PART = "non_text_part"  # a content part is an image, a sound, a file …; the detail names its type
    BAD_TOOLS = "bad_tools"  # the tool declarations are no JSON list of objects
    BAD_TOOL_CALL = "bad_tool_call"  # a tool call is no JSON object with a name
    EMPTY_USER = "empty_user"  # every user turn is null, empty or blank
    NO_USER_TURN = "no_user_turn"  # nobody asks anything

    # A conversation that can't be rendered.
    SYSTEM_NOT_SUPPORTED = "system_not_supported"  # the chat template refuses a system turn
    TOOLS_NOT_SUPPORTED = "tools_not_supported"  # the chat template knows no tool declarations, calls or results
    TEMPLATE_ERROR = "template_error"  # the chat template raised; the detail is its message
    PROMPT_TOO_LONG = "prompt_too_long"  # longer than prompts.max_prompt_tokens; the detail gives the length
    NO_ROOM = "no_room"  # the prompt leaves no room in model.context for one new token
    EMPTY_ASSISTANT = "empty_assistant"  # turns: final needs an earlier answer, and it is null, empty or blank


# What `bad_records: fail` stops at.
BROKEN_SYNTAX = frozenset(
    {RejectReason.INVALID_JSON, RejectReason.CUT_OFF, RejectReason.TOO_LARGE, RejectReason.DAMAGED_FILE}
)


class Unreadable(Exception):
    """The record makes no conversation."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

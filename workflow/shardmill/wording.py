"""Counts as a person writes them, and what the names of some mean."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 file`, `2,000 files`: for nouns whose plural ends in s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# What was mended in records or stands out, by its name in build.json. Of copies
# that dedupe made one, what is said is that of the first.
NOTES = {
    "lone_surrogates": "lone surrogates that became U+FFFD",
    "nan_values": "NaN and Infinity that became null",
    "gaps": "neighbouring parts of one id with turns missing between them, kept apart",
    "mismatched_parts": "neighbouring parts of one id that overlap without repeating a turn, kept apart",
    "ambiguous_parts": "parts that fit more than one other part, kept apart",
    "overlaps_dropped": "turns that a later part repeated, dropped on rejoining",
    "blank_user_turns": "user turns that are null, empty or blank, dropped",
    "blank_assistant_turns": "assistant turns that are null, empty or blank",
    "leading_assistant_turns": "assistant and tool turns before the first user turn, dropped",
    "repeated_leading_turns": "of these: the repeated first turn of a part whose id says that it is not the first",
    "consecutive_user": "conversations with two user turns in a row",
    "consecutive_assistant": "conversations with two assistant turns in a row",
    "ends_with_user": "conversations that end with a user turn",
    "system_in_the_middle": "conversations with a system turn behind another turn",
    "system_merged": "records whose system field joined their first system turn",
    "several_turn_fields": "records with turns in more than one field: the first of the table was taken",
    "stray_think_markers": "conversations with an answer that closes thinking it never opened, or the other way round",
    "merged_users": "conversations whose neighbouring user turns were joined: the template takes no two in a row",
    "with_tools": "conversations with tool declarations, calls or results",
}

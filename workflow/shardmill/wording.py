"""Counts as a person writes them."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 file`, `2,000 files`: for nouns whose plural ends in s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

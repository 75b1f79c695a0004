"""Which rows go out, and how long: the user's policy for long rows, and what a trainer would drop without a word."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from shardmill.export.source import Row

Longer = Literal["drop", "cut", "keep"]
Dropped = Literal["longer", "too_few_supervised", "no_two_supervised_in_a_row"]


@dataclass(frozen=True, slots=True)
class Rules:
    """`max_length`: the trainer's window in tokens; None for none. `longer`: what becomes of rows beyond it.

    A row is dropped when fewer than `min_supervised` of its tokens inside the window have loss mask 1, or, with
    `pair`, no two of them in a row do: SpecForge's DFlash family predicts a supervised token from a supervised anchor
    and leaves such rows out in silence (`has_consecutive_supervised_tokens`, specforge/data/loss_mask.py).
    """

    max_length: int | None
    longer: Longer
    min_supervised: int
    pair: bool

    def apply(self, row: Row) -> Row | Dropped:
        """The row as it goes out, or why it doesn't."""
        shown = row
        if self.max_length is not None and len(row.input_ids) > self.max_length:
            if self.longer == "drop":
                return "longer"
            end = self.max_length
            shown = replace(row, input_ids=row.input_ids[:end], loss_mask=row.loss_mask[:end])
        if np.count_nonzero(shown.loss_mask) < self.min_supervised:
            return "too_few_supervised"
        if self.pair and not np.any(shown.loss_mask[1:] & shown.loss_mask[:-1]):
            return "no_two_supervised_in_a_row"
        return row if self.longer == "keep" else shown

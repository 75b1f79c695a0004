"""How far a degenerate answer is believed to be the prompt's own fault."""

from __future__ import annotations

import math

from shardmill.generate.asked import History, Prompt
from shardmill.generate.audit import Kept, endless

CONTROL_TOKENS = 64  # of a control's answer: enough to tell a looping server from one that is well


class Trust:
    """What the good and degenerate answers of all prompts of a job teach about the next degenerate one."""

    def __init__(self, attempts: int, answered: bool) -> None:
        self.control: Prompt | None = None
        self.answered = answered  # whether any prompt has had a good answer
        self._attempts = attempts
        self._control_tokens = 0
        self._audited = 0
        self._passing = 0  # degenerate answers to prompts that had a good one later

    def seen(self) -> None:
        """Counts an audited answer, good or degenerate."""
        self._audited += 1

    def learn(self, prompt: Prompt, history: History, kept: Kept) -> None:
        """From a good answer. The prompt with the shortest one becomes the control."""
        self._passing += history.useless.total()
        self.answered = True
        tokens = len(kept.output_ids)
        known = self.control is not None and self._control_tokens <= tokens
        if not known and not endless(kept.output_ids[:CONTROL_TOKENS], "length"):
            self.control, self._control_tokens = prompt, tokens

    def needed(self) -> int:
        """How many degenerate answers of one kind make a prompt's own fault.

        `generate.attempts`, unless degenerate answers keep passing away: when a share q of all answers is degenerate by
        chance, so many that chance alone (q^n) gives less than one in 100,000. And twice as many while no prompt of the
        shard has had a good answer, since nothing tells the prompt's fault from the server's then.
        """
        needed = self._attempts
        passing = self._passing / max(self._audited, 1)
        if self._passing >= 3 and 0.01 < passing < 1:
            needed = min(4 * needed, max(needed, math.ceil(math.log(1e-5) / math.log(passing))))
        return needed if self.control is not None else 2 * needed

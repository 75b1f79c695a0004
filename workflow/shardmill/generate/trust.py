"""How far trouble with a prompt is believed to be the prompt's own, by what the other prompts of the job have met."""

from __future__ import annotations

import math

from shardmill.generate.asked import History, Prompt
from shardmill.generate.audit import Kept, endless

_CHANCE = 1e-6  # what happens to one prompt in a million is not chance
_FAULTS, _MOST_FAULTS = 100, 1000
CONTROL_TOKENS = 64  # of a control's answer: enough to tell a looping server from one that is well


class Trust:
    """What the good and degenerate answers of all prompts of a job teach about the next degenerate one."""

    def __init__(self, attempts: int, answered: bool) -> None:
        self.control: Prompt | None = None
        self.answered = answered  # whether any prompt has had a good answer
        self._attempts = attempts
        self._control_tokens = 0
        self._audited = 0
        self._sound = 0  # answers that count for or against their prompt
        self._faults = 0
        self._passing = 0  # degenerate answers to prompts that had a good one later

    def seen(self) -> None:
        """Counts an audited answer, good or degenerate."""
        self._audited += 1

    def counts(self) -> None:
        """A degenerate answer counts against its prompt."""
        self._sound += 1

    def faulted(self) -> None:
        """Counts a server's fault, or a degenerate answer that is one."""
        self._faults += 1

    def learn(self, prompt: Prompt, history: History, kept: Kept) -> None:
        """From a good answer. The prompt with the shortest one becomes the control."""
        self._passing += history.useless.total()
        self._sound += 1
        self.answered = True
        tokens = len(kept.output_ids)
        known = self.control is not None and self._control_tokens <= tokens
        if not known and not endless(kept.output_ids[:CONTROL_TOKENS], "length"):
            self.control, self._control_tokens = prompt, tokens

    def needed(self) -> int:
        """How many degenerate answers of one kind make a prompt's own fault.

        `generate.attempts`, unless degenerate answers keep passing away: when a share q of all answers is degenerate by
        chance, so many that chance alone gives q^n < 1e-6. And twice as many while no prompt of the shard has had a
        good answer, since nothing tells the prompt's fault from the server's then.
        """
        needed = self._attempts
        if self._passing >= 3:
            needed = _beyond_chance(self._passing / max(self._audited, 1), needed, 4 * needed)
        return needed if self.control is not None else 2 * needed

    def too_many_faults(self) -> int:
        """How many server faults of one prompt in a row are for a person to look at: more where all meet many."""
        share = self._faults / max(self._faults + self._sound, 1)
        return _beyond_chance(share, _FAULTS, _MOST_FAULTS)


def _beyond_chance(share: float, least: int, most: int) -> int:
    """The n with share^n < 1e-6, between `least` and `most`."""
    if share <= 0:
        return least
    return most if share >= 1 else min(most, max(least, math.ceil(math.log(_CHANCE) / math.log(share))))

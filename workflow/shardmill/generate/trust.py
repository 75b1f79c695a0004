"""How far trouble with a prompt is believed to be the prompt's own, by what the other prompts of the job have met."""

from __future__ import annotations

import math
import time

from shardmill.generate.asked import History, Prompt
from shardmill.generate.audit import Kept, endless

_CHANCE = 1e-6  # what happens to one prompt in a million is not chance
_FAULTS = 30  # in a row, before a prompt is left alone: about five minutes of backoff
_GAP_S = 60.0  # between two faults, at most, counts: in a longer one the job waited for a server
CONTROL_TOKENS = 64  # of a control's answer: enough to tell a looping server from one that is well


class Trust:
    """What the good and degenerate answers of all prompts of a job teach about the next degenerate one."""

    def __init__(self, attempts: int, patience_s: float, answered: bool) -> None:
        self.control: Prompt | None = None
        self.answered = answered  # whether any prompt has had a good answer
        self._attempts = attempts
        self._patience_s = patience_s
        self._barren = 0  # faults since the last good answer
        self._barren_s = 0.0
        self._faulted_at = 0.0
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
        now = time.monotonic()
        self._barren_s += min(now - self._faulted_at, _GAP_S) if self._barren else 0.0
        self._barren, self._faulted_at = self._barren + 1, now

    def learn(self, prompt: Prompt, history: History, kept: Kept) -> None:
        """From a good answer. The prompt with the shortest one becomes the control."""
        self._passing += history.useless.total()
        self._sound += 1
        self.answered = True
        self._barren, self._barren_s = 0, 0.0
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

    def beyond_chance(self, faults: int) -> bool:
        """Whether so many server faults of one prompt in a row are more than what all prompts of the job meet."""
        share = self._faults / max(self._faults + self._sound, 1)
        return faults >= _FAULTS and share**faults < _CHANCE

    def barren(self) -> bool:
        """Whether for `patience_s` there were faults and not one good answer, so that nothing tells whose they are."""
        return self._barren >= _FAULTS and self._barren_s >= self._patience_s


def _beyond_chance(share: float, least: int, most: int) -> int:
    """The n with share^n < 1e-6, between `least` and `most`."""
    if share <= 0:
        return least
    return most if share >= 1 else min(most, max(least, math.ceil(math.log(_CHANCE) / math.log(share))))

"""Which split a row belongs to: by its conversation, so that none is both trained on and validated with."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardmill.errors import UsageError
from shardmill.export.source import Row
from shardmill.identity import split_id

REST = "train"
Ids = Literal["stem", "whole"]
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Splits:
    """Named shares of the conversations, `train` first. A conversation's place follows from its id alone: another
    build, another machine or a larger dataset doesn't move it, and a split that grows keeps what it had.

    `ids`: with "stem", `abc_0` and `abc_5` are parts of one conversation (CONTRACTS.md, Rows); "whole" takes them for
    two, as they are where a dataset numbers its records behind one word.
    """

    shares: tuple[tuple[str, float], ...]
    ids: Ids = "stem"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.shares)

    def of(self, row: Row) -> str:
        if len(self.shares) == 1:
            return REST
        digest = hashlib.sha256(b"split\0" + self._conversation(row.source_id).encode()).digest()
        place = int.from_bytes(digest[:8], "big") / 2**64
        # From the last one: `train` takes what the others leave.
        for name, share in reversed(self.shares[1:]):
            if place < share:
                return name
            place -= share
        return REST

    def _conversation(self, source_id: str) -> str:
        parts = split_id(source_id) if self.ids == "stem" else None
        return parts[0] if parts is not None else source_id


def parse_splits(texts: Sequence[str], ids: Ids) -> Splits:
    """From `NAME=FRACTION` texts. What they leave of 1 is `train`; naming it is fine when all of them make 1."""
    shares: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        share = _fraction(number)
        if not _NAME.fullmatch(name) or share is None:
            raise UsageError(f"--split {text} is not like validation=0.05: a name, and a share between 0 and 1.")
        if name in shares:
            raise UsageError(f"--split {name} is given twice.")
        shares[name] = share
    named = shares.pop(REST, None)
    rest = 1 - sum(shares.values())
    if rest <= 0 or (named is not None and not math.isclose(named, rest, abs_tol=1e-9)):
        raise UsageError(f"The shares of --split leave {rest:.3g} for `{REST}`: they must make 1 with it.")
    return Splits(((REST, rest), *shares.items()), ids)


def _fraction(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < 1 else None

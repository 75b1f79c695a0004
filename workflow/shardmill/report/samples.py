"""A few training rows as text, each token marked as supervised or not, the way a trainer will see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardmill.catalog import connect
from shardmill.errors import ShardmillError
from shardmill.paths import BuildPaths
from shardmill.settings import Settings

Decode = Callable[[Sequence[int]], str]

_ROWS = 6
# Tokens shown of each part: so many of its beginning and its end.
_PROMPT_ENDS = (60, 120)
_ANSWER_ENDS = (220, 60)
# A character of UTF-8 can be spread over so many tokens.
_LONGEST_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one or more tokens. `left_out`: this many tokens that are not shown, and no text."""

    text: str
    supervised: bool
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    conversation_id: str
    turn: int
    finish_reason: str
    prompt_len: int
    seq_len: int
    pieces: list[Piece]


def decoder(settings: Settings) -> Decode | None:
    """The model's tokenizer, or None where it is not on this machine (a restored build needs none)."""
    from shardmill.rendering.decode import Decoder
    from shardmill.rendering.files import tokenizer_folder

    try:
        return Decoder(tokenizer_folder(settings.model)).decode
    except ShardmillError:
        return None


def read_samples(build: BuildPaths, shards: Sequence[str], decode: Decode) -> list[Sample]:
    """The first row of each of up to six shards, evenly spaced."""
    step = max(len(shards) // _ROWS, 1)
    with connect(build, list(shards[::step][:_ROWS])) as connection:
        rows = connection.execute("""
            SELECT conversation_id, turn, finish_reason, prompt_len, seq_len, input_ids, loss_mask
            FROM tokens QUALIFY row_number() OVER (PARTITION BY shard ORDER BY conversation_id, turn) = 1 ORDER BY shard
        """).fetchall()
    return [
        Sample(conversation, turn, finish, prompt_len, seq_len, pieces(ids, mask, decode))
        for conversation, turn, finish, prompt_len, seq_len, ids, mask in rows
    ]


def pieces(ids: Sequence[int], mask: Sequence[int], decode: Decode) -> list[Piece]:
    """Tokens as text, in order; runs of one mask value are shortened in their middle."""
    shown: list[Piece] = []
    start = 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and mask[end] == mask[start]:
            continue
        supervised = bool(mask[start])
        head, tail = _ANSWER_ENDS if supervised else _PROMPT_ENDS
        run = ids[start:end]
        if len(run) <= head + tail:
            shown += _texts(run, supervised, decode)
        else:
            shown += _texts(run[:head], supervised, decode)
            shown.append(Piece("", supervised, len(run) - head - tail))
            shown += _texts(run[-tail:], supervised, decode)
        start = end
    return shown


def _texts(ids: Sequence[int], supervised: bool, decode: Decode) -> list[Piece]:
    """A piece a token, but tokens that only together make a character make one piece."""
    found: list[Piece] = []
    start = 0
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        if "�" in text and end - start < _LONGEST_CHARACTER and end < len(ids):
            continue
        found.append(Piece(text, supervised))
        start = end
    return found

"""Special tokens that are written inside messages, kept from becoming special ids.

A tokenizer finds special tokens in the text it is given, whoever wrote them, so a user who writes `<|im_end|>` would
end the turn. What the template wrote and what a message brought in is told apart by rendering the messages a second
time with every character that can begin or end a special token replaced by a stand-in (`Veil`): a special token that is
still whole in that text is the template's own, and one that is not was written, wholly or in part, by a message. When
there are such, the text is encoded by a twin of the tokenizer whose special tokens have other names (`Guard.encode`):
the template's own are renamed in the text, and the others are text to it like any other. Everything else about the twin
is the tokenizer's, so all other text becomes the very ids that it always becomes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from shardmill.errors import ShardmillError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Stand-ins come from a private-use plane of Unicode, from the first run of this many that the text does not use.
_PLANE, _PLANE_SIZE = 0xF0000, 0xFF00
_RUN = 256
_PRIVATE = re.compile(f"[{chr(_PLANE)}-{chr(_PLANE + _PLANE_SIZE - 1)}]")
# Templates compare these with words of their own; they come from closed lists, not from a user.
_CLOSED = frozenset({"role", "type"})
# Templates put these between words of their own as they are: `<|{{ name }}|>`.
_ALONE = frozenset({"content", "text", "name"})


class Veil:
    """Stand-ins for the characters of one conversation that could be part of a special token.

    text: all that the conversation and its rendering hold; the stand-ins are characters that it does not.
    """

    def __init__(self, guard: Guard, text: str) -> None:
        used = {ord(char) // _RUN for char in _PRIVATE.findall(text)}
        self._guard = guard
        self._first = _RUN * next(
            run for run in range(_PLANE // _RUN, (_PLANE + _PLANE_SIZE) // _RUN) if run not in used
        )
        self._stand_ins: dict[str, str] = {}
        self._originals: dict[int, str] = {}

    def over(self, value: Any, key: str | None = None) -> Any:
        """`value` with stand-ins in all its strings, those of lists and mappings too."""
        if isinstance(value, str):
            return value if key in _CLOSED else self._text(value, alone=key in _ALONE)
        if isinstance(value, Mapping):
            return {self._text(name, alone=False): self.over(item, name) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.over(item, key) for item in value]
        return value

    def lift(self, text: str) -> str:
        """The text with the original characters back in their places."""
        return text.translate(self._originals)

    def is_torn(self, text: str) -> bool:
        """Whether a stand-in was written as an escape, so that it can't be lifted."""
        return any(json.dumps(stand_in)[1:-1] in text for stand_in in self._stand_ins.values())

    def _text(self, text: str, alone: bool) -> str:
        guard = self._guard
        if alone and guard.is_inside_special(text):
            at = len(text) - len(text.lstrip())
            text = text[:at] + self._stand_in(text[at]) + text[at + 1 :]
        if guard.suspect.search(text) is None:
            return text
        return "".join(self._pieces(text))

    def _pieces(self, text: str) -> Iterator[str]:
        """What the template looks for stays readable, unless it is part of a special token."""
        guard, end = self._guard, 0
        for match in guard.special.finditer(text):
            yield from self._outside(text[end : match.start()])
            whole = match.group()
            yield self._stand_in(whole[0]) + self._all(whole[1:])
            end = match.end()
        yield from self._outside(text[end:])

    def _outside(self, text: str) -> Iterator[str]:
        end = 0
        for match in self._guard.readable.finditer(text):
            yield self._all(text[end : match.start()])
            yield match.group()
            end = match.end()
        yield self._all(text[end:])

    def _all(self, text: str) -> str:
        return self._guard.chars.sub(lambda match: self._stand_in(match.group()), text)

    def _stand_in(self, char: str) -> str:
        if char not in self._stand_ins:
            code = self._first + len(self._stand_ins)
            self._stand_ins[char] = chr(code)
            self._originals[code] = char
        return self._stand_ins[char]


class Guard:
    """What a tokenizer's special tokens look like, and the twin that encodes text without finding them.

    special: text to id of the tokens to guard. literals: strings that the templates may look for in messages.
    """

    def __init__(self, tokenizer: Tokenizer, special: Mapping[str, int], literals: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._ids = dict(special)
        self._names = "\0".join(special)
        self._twins: dict[int, _Twin] = {}
        added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
        # Leftmost and longest first, as tokenizers finds them.
        self._added = _any_of(added)
        self.special = _any_of(special)
        chars = {char for text in special for char in (text[0], text[-1]) if not char.isalnum() and not char.isspace()}
        self.chars = _any_of(chars)
        # A special token that neither begins nor ends with such a character is looked for as a whole.
        self.suspect = _any_of([*chars, *(text for text in special if not chars.intersection((text[0], text[-1])))])
        self.readable = _any_of(text for text in literals if self._is_readable(text))
        # A token that is matched in normalized text can be written in ways that no search of the raw text finds.
        self.always = tokenizer.normalizer is not None and any(
            token.normalized for text, token in added.items() if text in special
        )

    def is_risky(self, value: Any, key: str | None = None) -> bool:
        """Whether some string in `value` could be part of a special token."""
        if isinstance(value, str):
            return self.suspect.search(value) is not None or (key in _ALONE and self.is_inside_special(value))
        if isinstance(value, Mapping):
            return any(
                key not in _CLOSED and (self.is_risky(item, key) or self.suspect.search(key) is not None)
                for key, item in value.items()
            )
        if isinstance(value, list | tuple):
            return any(self.is_risky(item, key) for item in value)
        return False

    def is_inside_special(self, value: str) -> bool:
        core = value.strip()
        return bool(core) and len(core) < 64 and core in self._names

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where special tokens stand in `text`."""
        return [match.span() for match in self._added.finditer(text) if match.group() in self._ids]

    def encode(self, veiled: str, veil: Veil) -> list[int] | None:
        """Ids of the text under the veil, where only what is whole in `veiled` is a special token.

        None when the tokenizer does not take one of the template's own special tokens as such.
        """
        twin = self._twin(veil.lift(veiled))
        pieces, own, end = [], [], 0
        for start, stop in self.spans(veiled):
            token = veiled[start:stop]
            pieces += [veil.lift(veiled[end:start]), twin.names[token]]
            own.append(self._ids[token])
            end = stop
        pieces.append(veil.lift(veiled[end:]))
        return twin.encode("".join(pieces), own)

    def _is_readable(self, literal: str) -> bool:
        """Whether a message may hold `literal` without a part of a special token being in it."""
        if len(literal) < 2 or self.chars.search(literal) is None:
            return False
        return not any(
            text in literal
            or literal in text
            or any(text.endswith(literal[:n]) or text.startswith(literal[-n:]) for n in range(1, len(literal)))
            for text in self._ids
        )

    def _twin(self, text: str) -> _Twin:
        """A twin whose names do not occur in `text`: the first one, but for a text that was made to break it."""
        number = next(number for number in itertools.count() if _prefix(number) not in text)
        if number not in self._twins:
            self._twins = {number: _Twin(self._tokenizer, self._ids, _prefix(number))}
        return self._twins[number]


class _Twin:
    """The same tokenizer with other names for its special tokens."""

    def __init__(self, tokenizer: Tokenizer, special: Mapping[str, int], prefix: str) -> None:
        from tokenizers import Tokenizer

        self.names = {text: f"{prefix}{index}|>" for text, index in special.items()}
        described = orjson.loads(tokenizer.to_str())
        described["post_processor"] = described["truncation"] = described["padding"] = None
        for token in described["added_tokens"]:
            token["content"] = self.names.get(token["content"], token["content"])
        _rename(described["model"], self.names)
        self._tokenizer = Tokenizer.from_str(orjson.dumps(described).decode())
        self._original: dict[int, int] = {}
        for index, token in tokenizer.get_added_tokens_decoder().items():
            here = self._tokenizer.token_to_id(self.names.get(token.content, token.content))
            if here is None:
                raise ShardmillError(f"The tokenizer can't be copied: its token {token.content!r} got lost.")
            self._original[here] = index
        unknown = getattr(tokenizer.model, "unk_token", None)
        # Unknown characters become the unknown token, which then says nothing about special tokens.
        self._counted = frozenset(index for text, index in special.items() if text != unknown)

    def encode(self, text: str, own: Sequence[int]) -> list[int] | None:
        """Ids of `text`, where the special ids `own` stand under their other names; None when others came out."""
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        ids = [self._original.get(index, index) for index in encoded]
        counted = self._counted
        if [index for index in ids if index in counted] != [index for index in own if index in counted]:
            return None
        return ids


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Gives special tokens their new names in the vocabulary too, where a model could find them as a piece of text."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    else:
        model["vocab"] = {names.get(piece, piece): index for piece, index in vocabulary.items()}
        # What could build such a token out of text, or build on it, would name what is no longer there.
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_parts(merge))]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]


def _parts(merge: str | list[str]) -> tuple[str, str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right


def _prefix(number: int) -> str:
    return f"<|twin{number}-"


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    ordered = sorted(set(texts), key=lambda text: (-len(text), text))
    return re.compile("|".join(re.escape(text) for text in ordered) or r"(?!)")

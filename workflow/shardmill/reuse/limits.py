"""When an answer that was made under other limits is still the one that would be made under ours. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the length of an answer: a setting, and the room that the context leaves after the prompt."""

    max_new_tokens: int
    context: int

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> Limits:
        """Of a build's identity, as build.json has it."""
        return cls(int(identity["sampling"]["max_new_tokens"]), int(identity["model"]["context"]))

    def most(self, prompt_tokens: int) -> int:
        """The most new tokens that an answer to so long a prompt may have."""
        return min(self.max_new_tokens, self.context - prompt_tokens)


def still_right(old: Limits, new: Limits, prompt_tokens: int, completion_tokens: int, finish: str | None) -> bool:
    """Whether an ok row of a build under `old` is what a build under `new` would make of the same prompt.

    An answer that stopped by itself is right wherever it fits. One that was cut is right where it has just as many ids
    as we allow, and where both builds allow the same number: a server that keeps room for speculation cuts a little
    earlier, and would do so again. It doesn't matter whether the setting or the context did the cutting. A longer
    answer is never shortened.
    """
    most = new.most(prompt_tokens)
    if not 0 < completion_tokens <= most:
        return False
    if finish == "stop":
        return True
    return finish == "length" and (completion_tokens == most or old.most(prompt_tokens) == most)


def same_answers(identity: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two builds' equal prompts can have the same `prompt_id`: same model, revision and sampling.

    A necessary condition, to leave out builds that have nothing to give: the model's own stop ids, which are part of a
    `prompt_id` too, are not in a build's identity by themselves. Raises KeyError or TypeError for what is no identity.
    """
    return _decides_answers(identity) == _decides_answers(other)


def _decides_answers(identity: Mapping[str, Any]) -> tuple[object, object, dict[str, Any]]:
    sampling = {name: value for name, value in identity["sampling"].items() if name != "max_new_tokens"}
    return identity["model"]["name"], identity["model"]["revision"], sampling

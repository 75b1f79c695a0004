"""Later turns: the prompt of a turn that stands on the model's own earlier answers.

An earlier answer goes back into the history as it would be served: its ids decoded without the final stop id, with all
that the model wrote, thinking included. What of it the next prompt shows is the chat template's business: Qwen3's, for
one, drops everything up to `</think>` from earlier answers. So each turn is a row of its own, and the rows of a
conversation are not prefixes of one another.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill.generate.asked import Prompt
from shardmill.generate.prompts import Key, ShardPrompts
from shardmill.generate.reasons import FailReason
from shardmill.identity import prompt_id, sampling_identity
from shardmill.settings import Settings

if TYPE_CHECKING:
    from shardmill.rendering.render import Renderer


class Dialogue:
    """Renders later turns. The renderer, which costs seconds to load, is loaded when the first of them is due."""

    def __init__(self, settings: Settings, prompts: ShardPrompts, folder: Path, stop_ids: frozenset[int]) -> None:
        self._settings = settings
        self._prompts = prompts
        self._folder = folder
        self._sampling = sampling_identity(settings, stop_ids)
        self._renderer: Renderer | None = None

    def prompt(self, keys: list[Key], answers: list[str]) -> tuple[Prompt, FailReason | None]:
        """The prompt of turn `len(answers)` of a conversation whose turns are `keys`; `answers` are the texts so far.

        With a reason the prompt can't be asked: the template refuses it, or it leaves no room for an answer.
        """
        from shardmill.rendering.render import RenderError

        messages: list[dict[str, Any]] = []
        for index, key in enumerate(keys[: len(answers) + 1]):
            messages += self._prompts.messages(key)
            if index < len(answers):
                messages.append({"role": "assistant", "content": answers[index]})
        try:
            ids = list(self._load().render(messages, self._prompts.tools(keys[0])).ids)
        except RenderError:
            return Prompt(prompt_id([], self._sampling), [], 0), FailReason.TEMPLATE
        room = self._settings.model.context - len(ids)
        prompt = Prompt(prompt_id(ids, self._sampling), ids, min(self._settings.sampling.max_new_tokens, room))
        too_long = room < 1 or len(ids) > self._settings.prompts.max_prompt_tokens
        return prompt, FailReason.TOO_LONG if too_long else None

    def _load(self) -> Renderer:
        if self._renderer is None:
            from shardmill.rendering.render import Renderer

            template = self._settings.model.chat_template
            self._renderer = Renderer(self._folder, Path(template) if template else None, self._settings.model.thinking)
        return self._renderer

"""Answers as text, for the `text` column and for the history of later turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from shardmill.rendering.files import tokenizer_folder
from shardmill.settings import Settings


class Text:
    """Ids to text. `load` runs beside the first requests, so that a broken tokenizer is found before hours of work."""

    def __init__(self, settings: Settings) -> None:
        self.folder: Path = tokenizer_folder(settings.model)
        self._decode: Callable[[list[int]], str] | None = None

    async def load(self) -> None:
        await asyncio.to_thread(self._load)

    def decode(self, ids: list[int]) -> str:
        return self._load()(ids)

    def _load(self) -> Callable[[list[int]], str]:
        if self._decode is None:
            from shardmill.rendering.decode import Decoder

            self._decode = Decoder(self.folder).decode
        return self._decode

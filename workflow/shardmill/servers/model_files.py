"""Where a model's files lie on this machine: a folder, or a snapshot in the hub's cache."""

from __future__ import annotations

import asyncio
import re
import sys
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


async def download(name: str, revision: str | None) -> Path:
    """The model's snapshot from the hub, through its cache. Raises ShardmillError where it can't be had.

    In a process of its own: a thread could not be stopped, and would keep the fleet here for as long as 55 GB take.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "shardmill.servers.model_files",
        name,
        *([revision] if revision is not None else []),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise ShardmillError(
            f"The model {name} can't be downloaded ({lines[-1][:200] if lines else 'no reason given'}): put it into a "
            "folder and name that in model.name."
        )
    return Path(output.decode().strip().splitlines()[-1])


def facts(name: str, folder: Path | None) -> ModelFacts:
    """From the config.json in `folder`; without one, from the family's name."""
    if folder is not None:
        try:
            return read_model_facts(folder)
        except (OSError, ValueError, KeyError) as error:
            raise ShardmillError(f"The config.json of the model in {folder} can't be read: {error}.") from None
    known = bool(_QWEN_MTP.search(name))
    return ModelFacts(mtp=known, hybrid=known)


def main() -> None:
    from huggingface_hub import snapshot_download

    revision = sys.argv[2] if len(sys.argv) > 2 else None
    sys.stdout.write(snapshot_download(sys.argv[1], revision=revision, allow_patterns=_PATTERNS) + "\n")


if __name__ == "__main__":
    main()

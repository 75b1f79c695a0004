"""The URLs of servers that others started: from the config, and from a file that is read again while a build runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from shardmill.errors import SettingsError
from shardmill.settings import Settings


@dataclass(frozen=True, slots=True)
class Endpoint:
    name: str  # host:port, and the path where there is one
    url: str  # without a trailing slash


def endpoints(settings: Settings) -> list[Endpoint]:
    """All endpoints as they are given now, each once, in order. A file that isn't there (yet) counts as empty.

    Raises SettingsError for a line that is no URL, which names the file and the line.
    """
    urls = list(settings.servers.endpoints)
    if settings.servers.endpoints_file is not None:
        urls += read_file(Path(settings.servers.endpoints_file))
    found: dict[str, Endpoint] = {}
    for url in urls:
        endpoint = _endpoint(url)
        found.setdefault(endpoint.name, endpoint)
    return list(found.values())


def read_file(path: Path) -> list[str]:
    """A URL a line; `#` begins a comment."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"The endpoints file {path} can't be read: {error}.") from None
    urls = []
    for number, line in enumerate(lines, start=1):
        url = line.partition("#")[0].strip()
        if not url:
            continue
        # The line itself is not shown: what makes it wrong may be a password in it.
        if not url.startswith(("http://", "https://")) or not urlsplit(url).hostname or "@" in url:
            raise SettingsError(
                f"Line {number} of the endpoints file {path} is no server's URL (http://host:port, no user name)."
            )
        urls.append(url)
    return urls


def _endpoint(url: str) -> Endpoint:
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    return Endpoint(name=f"{parts.netloc}{path}", url=f"{parts.scheme}://{parts.netloc}{path}")

"""A build's files as DuckDB views: `connect` from anywhere, at any moment; `catalog.duckdb` for DuckDB on its own.

Views: prompts, rejects, completions, tokens (columns as in schemas.py, and `shard`, told from the file's name; rejects
has none) and manifests (a row a published shard). A kind with no file yet is an empty view of the right types.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from shardmill.files import atomic_path
from shardmill.paths import BuildPaths
from shardmill.schemas import COMPLETIONS, PROMPTS, REJECTS, TOKENS

if TYPE_CHECKING:
    import duckdb

SHARDED = {"prompts": PROMPTS, "completions": COMPLETIONS, "tokens": TOKENS}

_MANIFEST_COLUMNS = {
    "build": "VARCHAR",
    "shard": "VARCHAR",
    "rows": "STRUCT(prompts BIGINT, ok BIGINT, failed BIGINT)",
    "objects": "STRUCT(kind VARCHAR, path VARCHAR, key VARCHAR, size BIGINT, sha256 VARCHAR, rows BIGINT)[]",
    "created_at": "VARCHAR",
}
_MOST_THREADS = 8
_MEMORY = "3GB"
_TYPES = {
    pa.string(): "VARCHAR",
    pa.int16(): "SMALLINT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.uint8(): "UTINYINT",
    pa.float64(): "DOUBLE",
    pa.timestamp("ms", tz="UTC"): "TIMESTAMPTZ",
}

# DuckDB takes a view's relative path from the working directory. A database file's default temp_directory, though, is
# the file's own path with ".tmp" after it, and a setting is a constant to the binder: so a view can find the folder
# that its database lies in, wherever that is now. When another database attaches the catalog, or temp_directory was
# set by hand, the path is relative to the working directory. Characters that a glob would read are put in brackets.
_CATALOG_TEMP = "catalog.duckdb.tmp"
_FOLDER = (
    f"CASE WHEN suffix(current_setting('temp_directory'), '{_CATALOG_TEMP}') "
    f"THEN regexp_replace(left(current_setting('temp_directory'), -{len(_CATALOG_TEMP)}), '([*?\\[])', '[\\1]', 'g') "
    f"ELSE '' END"
)


def connect(
    build: BuildPaths,
    shards: Sequence[str] | None = None,
) -> duckdb.DuckDBPyConnection:
    """An in-memory database with the views over what of `build` is there now (of `shards` alone, when given).

    It works from any working directory and never writes to the build's data; what doesn't fit 3 GB of memory spills
    to a folder under run/. The caller closes it (it is a context manager).
    """
    import duckdb

    connection = duckdb.connect(":memory:", config={"memory_limit": _MEMORY})
    # Times are shown as UTC, on whatever machine.
    connection.execute("SET TimeZone = 'UTC'")
    # Drawn on stdout by long queries, where `shardmill query --format json` writes.
    connection.execute("SET enable_progress_bar = false")
    # Each thread holds row groups of long lists: on a large machine, all cores would not fit the memory limit.
    connection.execute(f"SET threads = {min(os.cpu_count() or 1, _MOST_THREADS)}")
    connection.execute(f"SET temp_directory = {quoted(str((build.run / 'spill').absolute()))}")
    for kind in SHARDED:
        files = _files(build.root / kind, "shard-*.parquet", shards)
        _create(connection, kind, _parquet(kind, _listed(files)) if files else None)
    _create(connection, "rejects", _parquet("rejects", _listed([build.rejects])) if build.rejects.exists() else None)
    manifests = _files(build.root / "manifests", "shard-*.json", shards)
    _create(connection, "manifests", _json(_listed(manifests)) if manifests else None)
    return connection


def write_catalog(build: BuildPaths) -> None:
    """Writes catalog.duckdb: views with paths relative to the build's folder, wherever that is and DuckDB was started.

    The folder can be moved or copied. (From a database that attaches the catalog, start DuckDB in the build's folder.)
    """
    import duckdb

    with atomic_path(build.catalog) as temporary, duckdb.connect(temporary) as connection:
        # The binder looks at the files once, while a view is made: let it find them as a reader of the catalog will.
        connection.execute(f"SET temp_directory = {quoted(str(build.root.absolute() / _CATALOG_TEMP))}")
        for kind in SHARDED:
            there = _files(build.root / kind, "shard-*.parquet", None)
            _create(connection, kind, _parquet(kind, _relative(f"{kind}/shard-*.parquet")) if there else None)
        rejects = _parquet("rejects", _relative("prompts/rejects.parquet")) if build.rejects.exists() else None
        _create(connection, "rejects", rejects)
        manifests = _files(build.root / "manifests", "shard-*.json", None)
        _create(connection, "manifests", _json(_relative("manifests/shard-*.json")) if manifests else None)


def quoted(text: str) -> str:
    """`text` as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def _create(connection: duckdb.DuckDBPyConnection, kind: str, source: str | None) -> None:
    connection.execute(f"CREATE VIEW {kind} AS {source or _empty(kind)}")


def _parquet(kind: str, source: str) -> str:
    if kind not in SHARDED:
        return f"SELECT * FROM read_parquet({source})"
    return f"SELECT *, parse_filename(filename, true) AS shard FROM read_parquet({source})"


def _json(source: str) -> str:
    columns = ", ".join(f"{name}: {quoted(kind)}" for name, kind in _MANIFEST_COLUMNS.items())
    return f"SELECT * FROM read_json({source}, format = 'unstructured', columns = {{{columns}}})"


def _listed(files: Iterable[Path]) -> str:
    return "[" + ", ".join(quoted(str(path.absolute())) for path in files) + "]"


def _relative(pattern: str) -> str:
    return f"{_FOLDER} || {quoted(pattern)}"


def _files(folder: Path, pattern: str, shards: Sequence[str] | None) -> list[Path]:
    files = sorted(folder.glob(pattern))
    if shards is None:
        return files
    wanted = set(shards)
    return [path for path in files if path.stem in wanted]


def _empty(kind: str) -> str:
    if kind == "manifests":
        columns = dict(_MANIFEST_COLUMNS)
    elif kind == "rejects":
        columns = {field.name: _sql_type(field.type) for field in REJECTS}
    else:
        columns = {field.name: _sql_type(field.type) for field in SHARDED[kind]} | {"shard": "VARCHAR"}
    return "SELECT " + ", ".join(f"NULL::{kind} AS {name}" for name, kind in columns.items()) + " WHERE false"


def _sql_type(arrow: pa.DataType) -> str:
    return f"{_TYPES[arrow.value_type]}[]" if isinstance(arrow, pa.ListType) else _TYPES[arrow]

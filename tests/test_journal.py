"""The journal: whatever is cut off or flipped, nothing else is lost and nothing is there twice (case 121)."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import ShardmillError
from shardmill.journal import open_journal, read_records

Records = list[dict[str, Any]]

records_strategy = st.lists(
    st.fixed_dictionaries({"text": st.text(max_size=20), "ids": st.lists(st.integers(0, 300000), max_size=8)}),
    min_size=1,
    max_size=8,
).map(lambda bodies: [{"number": number, **body} for number, body in enumerate(bodies)])


def written(path: Path, records: Records) -> list[int]:
    with open_journal(path) as journal:
        assert list(journal.replay()) == []
        return [journal.append(record) for record in records]


def replayed(path: Path) -> tuple[Records, tuple[int, int]]:
    with open_journal(path) as journal:
        found = [record for _, record in journal.replay()]
        return found, (journal.damage.torn, journal.damage.bad)


def test_what_was_written_is_read_back_at_its_offset(tmp_path: Path) -> None:
    path, records = tmp_path / "journals" / "shard.jsonl", [{"text": "a\nb\u2028", "ids": [1, 2]}, {"text": "ü"}]
    offsets = written(path, records)
    with open_journal(path) as journal:
        assert list(journal.replay()) == list(zip(offsets, records, strict=True))
        assert [journal.read(offset) for offset in offsets] == records
        assert (journal.damage.torn, journal.damage.bad) == (0, 0)
    assert list(read_records(path)) == records
    assert list(read_records(tmp_path / "none.jsonl")) == []


@settings(max_examples=60, deadline=None)
@given(records_strategy, st.data())
def test_a_torn_tail_costs_the_torn_record_alone(records: Records, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.jsonl"
        ends = [*written(path, records)[1:], path.stat().st_size]
        cut = data.draw(st.integers(0, path.stat().st_size))
        os.truncate(path, cut)
        whole = sum(end <= cut for end in ends)
        found, (torn, bad) = replayed(path)
        assert found == records[:whole]
        assert (torn > 0) == (cut not in (0, *ends)) and bad == 0
        with open_journal(path) as journal:  # what is appended next is not joined to what was torn
            assert len(list(journal.replay())) == whole
            journal.append({"new": True})
        assert replayed(path) == ([*records[:whole], {"new": True}], (0, 0))


@settings(max_examples=150, deadline=None)
@given(records_strategy, st.data())
def test_a_flipped_bit_costs_its_own_record_at_most(records: Records, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.jsonl"
        offsets = written(path, records)
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        hit = max(index for index, offset in enumerate(offsets) if offset <= place)
        found, (torn, bad) = replayed(path)
        others = [record for index, record in enumerate(records) if index != hit]
        assert [record for record in found if record["number"] != hit] == others
        lost = records[hit] not in found
        assert lost == (torn + bad > 0), "a lost record is always counted"
        assert not lost or place != (*offsets, len(content))[hit + 1] - 1, "a flipped newline loses nothing"
        with open_journal(path) as journal:
            list(journal.replay())
            journal.append(records[hit])
        again, _ = replayed(path)
        assert [record for record in again if record["number"] != hit] == others
        assert records[hit] in again


def test_garbage_is_skipped_and_said(tmp_path: Path) -> None:
    path = tmp_path / "shard.jsonl"
    written(path, [{"a": 1}])
    sound = path.read_bytes()
    path.write_bytes(b"\x00\xff garbage\n" + sound + b'deadbeef 7 {"a":2}\n' + sound + b"00000000 9999999999 {")
    found, (torn, bad) = replayed(path)
    assert found == [{"a": 1}, {"a": 1}]
    assert torn == len(b"00000000 9999999999 {") and bad == 2


def test_two_jobs_never_share_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "shard.jsonl"
    hold = (
        "import sys, time; from pathlib import Path; from shardmill.journal import open_journal\n"
        "with open_journal(Path(sys.argv[1])) as journal:\n"
        "    journal.append({'by': 'other'}); print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", hold, str(path)], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(ShardmillError, match="Another job is writing the journal"):
            open_journal(path, wait_s=0.2)
    finally:
        other.kill()
        other.wait()
    with open_journal(path, wait_s=5) as journal:  # its lock dies with it, what it wrote does not
        assert [record for _, record in journal.replay()] == [{"by": "other"}]


def test_a_deleted_journal_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "shard.jsonl"
    with open_journal(path) as journal:
        path.unlink()
        journal.append({"lost": True})
        with open_journal(path, wait_s=1) as other:
            assert list(other.replay()) == []


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shard.jsonl"
    written(path, [{"a": 1}])
    really = os.pwrite

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if len(data) > 10:
            return really(descriptor, bytes(data)[:10], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_journal(path) as journal:
        list(journal.replay())
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(ShardmillError, match=r"No space is left for the journal .* run again\."):
            journal.append({"a": 2, "text": "x" * 100})
        monkeypatch.undo()
        journal.append({"a": 3})
    assert replayed(path) == ([{"a": 1}, {"a": 3}], (0, 0))


def test_appending_is_cheap(tmp_path: Path) -> None:
    record = {"output_ids": list(range(1800))}
    with open_journal(tmp_path / "shard.jsonl") as journal:
        started = time.process_time()
        for _ in range(200):
            journal.append(record)
        assert (time.process_time() - started) / 200 < 0.001

"""The knowledge base for network file systems: a file per writer, removals without an order, merging files."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tunewright import DatabaseError
from tunewright.knowledge import shared
from tunewright.knowledge.record import AnyRecord, Measurement, to_line
from tunewright.knowledge.shared import SharedDatabase
from tunewright.testing.database import random_records


def files(folder: Path) -> list[Path]:
    return sorted((folder / "writers").glob("*.jsonl"))


def digests(database: SharedDatabase) -> set[str]:
    return {record.digest for record in database}


def test_reading_makes_nothing(tmp_path: Path) -> None:
    database = SharedDatabase(tmp_path / "kb")
    assert not list(database) and not database.family("x") and not database.faults() and not database.events()
    assert not database.damage() and database.read_only is None and database.compact() == 0
    assert database.add([]) == 0 and database.remove(["x"]) == 0
    assert not (tmp_path / "kb").exists()


def test_each_writer_has_one_file_with_its_name(tmp_path: Path) -> None:
    one, other = SharedDatabase(tmp_path, "host-1/é"), SharedDatabase(tmp_path, "b")
    for k, record in enumerate(random_records(0, 6)):
        (one, other)[k % 2].add([record])
    names = [path.name for path in files(tmp_path)]
    assert [name.split("-")[:2] for name in names] == [["b", str(os.getpid())], ["host_1__", str(os.getpid())]]
    assert [path.read_text().count("\n") for path in files(tmp_path)] == [3, 3]
    assert list(one) == list(other) == sorted(random_records(0, 6), key=lambda r: r.digest)


def test_lines_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = SharedDatabase(tmp_path), SharedDatabase(tmp_path)
    taken: list[int] = []
    take = shared.Lines.take
    monkeypatch.setattr(shared.Lines, "take", lambda self, data: taken.append(len(data)) or take(self, data))
    for record in random_records(0, 5):
        writer.add([record])
        taken.clear()
        assert record in set(reader) and record in set(reader)
        assert [n for n in taken if n] == [len(to_line(record)) + 1]


def test_a_torn_last_line_counts_for_nothing_until_it_is_whole(tmp_path: Path) -> None:
    database, records = SharedDatabase(tmp_path), random_records(0, 3)
    database.add(records[:2])
    line = to_line(records[2]).encode()
    path = tmp_path / "writers" / "other-1-1.jsonl"
    path.write_bytes(line[:100])
    assert len(list(database)) == 2 and database.family("x") == ()
    assert ["the last line is not complete" in text for text in database.damage()] == [True]
    path.write_bytes(line)
    assert len(list(database)) == 2
    path.write_bytes(line + b"\n")
    assert len(list(database)) == 3 and not database.damage()


def test_files_that_shrink_change_or_go_are_read_again(tmp_path: Path) -> None:
    records = random_records(0, 9)
    for k in range(3):
        SharedDatabase(tmp_path).add(records[3 * k : 3 * k + 3])
    reader = SharedDatabase(tmp_path)
    assert len(list(reader)) == 9
    one, two, three = files(tmp_path)
    one.write_bytes(b"".join(one.read_bytes().splitlines(keepends=True)[:1]))
    assert len(list(reader)) == 7
    two.unlink()
    assert len(list(reader)) == 4
    data = bytearray(three.read_bytes())
    data[200] ^= 1
    three.write_bytes(data)
    os.utime(three, (0, 0))
    assert len(list(reader)) == 3 and len(reader.damage()) == 1


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    SharedDatabase(tmp_path).add(random_records(0, 3))
    (path,) = files(tmp_path)
    lines = path.read_text().splitlines()
    lines[1] = lines[1].replace('"kind"', '"Kind"')
    path.write_text("\n".join([*lines, "nonsense", '{"digest":"","note":{}}']) + "\n")
    reader = SharedDatabase(tmp_path)
    assert len(list(reader)) == 2
    told = reader.damage()
    assert [text.split(":")[0] for text in told] == [f"{path.name}, line {k}" for k in (2, 4, 5)]
    assert "digest does not match" in told[0]


def test_the_right_line_wins_over_a_wrong_one_with_its_digest(tmp_path: Path) -> None:
    good, other = random_records(0, 2)
    path = tmp_path / "writers" / "a-1-1.jsonl"
    path.parent.mkdir()
    path.write_text(to_line(other).replace(other.digest, good.digest) + "\n")
    database = SharedDatabase(tmp_path)
    assert not list(database) and database.add([good]) == 1
    assert list(database) == list(SharedDatabase(tmp_path)) == [good]


# ---- removing -------------------------------------------------------------------------------------------------------


def test_removing_beats_adding_at_the_same_time(tmp_path: Path) -> None:
    """Two machines that do not see each other: one removes, the other adds what is there already or was never seen."""
    (record,) = random_records(0, 1)
    SharedDatabase(tmp_path, "a").add([record])
    blind = tmp_path / "blind"
    SharedDatabase(blind, "b").add([record])
    assert SharedDatabase(tmp_path, "c").remove([record.digest]) == 1
    (line,) = files(blind)
    line.rename(tmp_path / "writers" / line.name)
    database = SharedDatabase(tmp_path)
    assert not list(database)
    assert database.add([record]) == 1 and list(database) == [record]  # who knows of it may bring it back
    assert SharedDatabase(tmp_path).remove([record.digest]) == 1 and not list(database)


def test_the_order_of_lines_means_nothing(tmp_path: Path) -> None:
    records = random_records(0, 4)
    database = SharedDatabase(tmp_path / "first")
    database.add(records)
    database.remove([records[0].digest, records[1].digest])
    database.add([records[1]])
    database.remove([records[2].digest])
    database.add([records[2]])
    database.remove([records[2].digest])
    expected = {records[1].digest, records[3].digest}
    assert digests(database) == expected
    lines = [line for path in files(tmp_path / "first") for line in path.read_text().splitlines()]
    rng = random.Random(0)
    for k in range(20):
        shuffled = rng.sample(lines, len(lines)) + rng.sample(lines, 3)
        folder = tmp_path / str(k) / "writers"
        folder.mkdir(parents=True)
        for n in range(3):
            (folder / f"w{n}.jsonl").write_text("".join(f"{line}\n" for line in shuffled[n::3]))
        assert digests(SharedDatabase(tmp_path / str(k))) == expected


# ---- merging files --------------------------------------------------------------------------------------------------


def many(folder: Path, count: int = 6) -> tuple[list[AnyRecord], set[str]]:
    """Files of several writers, with things removed and restored; all that was there and what is there now."""
    records = random_records(0, 5 * count)
    for k in range(count):
        writer = SharedDatabase(folder, f"host{k}")
        writer.add(records[5 * k : 5 * k + 5])
        writer.note("tuned", f"by {k}")
        writer.remove([records[5 * k].digest])
    SharedDatabase(folder).add([records[0]])
    return records, {r.digest for k, r in enumerate(records) if k % 5 or not k}


def test_compact_keeps_everything(tmp_path: Path) -> None:
    records, expected = many(tmp_path)
    before = SharedDatabase(tmp_path)
    events = before.events()
    assert digests(before) == expected and len(events) == 6
    size = sum(path.stat().st_size for path in files(tmp_path))
    compactor = SharedDatabase(tmp_path)
    assert compactor.compact() == 0, "files that were written a moment ago are left alone"
    assert compactor.compact(stale_seconds=0) == 7 and len(files(tmp_path)) == 1
    assert sum(path.stat().st_size for path in files(tmp_path)) < size, "what was removed takes no room"
    for database in (before, compactor, SharedDatabase(tmp_path)):
        assert digests(database) == expected and database.events() == events and not database.damage()
    assert compactor.compact(stale_seconds=0) == 0, "one file is enough"
    assert compactor.add(records) == 5 and digests(before) == {r.digest for r in records}


def test_compact_leaves_the_own_file_and_active_ones_alone(tmp_path: Path) -> None:
    _, expected = many(tmp_path)
    old = time.time() - 2 * shared.STALE_SECONDS
    for path in files(tmp_path):
        os.utime(path, (old, old))
    active = SharedDatabase(tmp_path, "active")
    active.add(random_records(1, 1))
    mine = SharedDatabase(tmp_path, "mine")
    mine.add(random_records(2, 1))
    assert mine.compact() == 7
    assert active.add(random_records(3, 1)) == 1 and mine.add(random_records(4, 1)) == 1
    more = {r.digest for seed in (1, 2, 3, 4) for r in random_records(seed, 1)}
    assert digests(SharedDatabase(tmp_path)) == expected | more and len(files(tmp_path)) == 3


def test_compact_puts_damaged_files_aside(tmp_path: Path) -> None:
    _, expected = many(tmp_path)
    path = files(tmp_path)[2]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1].replace(b'"digest"', b'"Digest"'), *lines[2:], b"half a line"]))
    reader = SharedDatabase(tmp_path)
    left = digests(reader)
    assert left < expected and len(reader.damage()) == 2
    assert reader.compact(stale_seconds=0) == 7
    assert digests(reader) == left and not reader.damage()
    assert [p.name for p in (tmp_path / "writers").glob("*.damaged")] == [f"{path.name}.damaged"]


STOP = """
import itertools, os, sys
from pathlib import Path
from tunewright.knowledge import shared

def child(folder, owner, name, number):
    count, real = itertools.count(), getattr(owner, name)
    def stop(*arguments, **options):
        if next(count) >= number:
            os._exit(9)
        return real(*arguments, **options)
    setattr(owner, name, stop)
    shared.SharedDatabase(folder).compact(stale_seconds=0)
    os._exit(0)

folder = Path(sys.argv[1])
calls = [(os, "open"), (os, "rename"), (os, "fsync"), (shared, "write_all"), (shared, "sync_folder"), (Path, "unlink")]
for k, (owner, name) in enumerate(calls):
    for number in range(5):
        pid = os.fork()
        if pid == 0:
            child(folder / f"{k}-{number}", owner, name, number)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), end=" ")
"""


def test_compact_may_be_killed_anywhere(tmp_path: Path) -> None:
    """Whatever the last step was that got done, everything is there, and the next one finishes it."""
    _, expected = many(tmp_path / "0-0")
    places = [tmp_path / f"{k}-{n}" for k in range(6) for n in range(5)]
    for place in places[1:]:
        shutil.copytree(places[0], place)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    done = subprocess.run([sys.executable, "-c", STOP, str(tmp_path)], capture_output=True, text=True, env=environment)
    codes = done.stdout.split()
    assert len(codes) == 30 and codes.count("9") >= 10 and set(codes) <= {"0", "9"}, done
    for place in places:
        database = SharedDatabase(place)
        assert digests(database) == expected and len(database.events()) == 6 and not database.damage()
        database.compact(stale_seconds=0)
        assert digests(database) == digests(SharedDatabase(place)) == expected
        assert len(list((place / "writers").iterdir())) == 1, "the next one clears what was left"


def test_two_compact_at_once(tmp_path: Path) -> None:
    """Both have read the folder; then both go on."""
    _, expected = many(tmp_path)
    one, other = SharedDatabase(tmp_path), SharedDatabase(tmp_path)
    retire = one._retire

    def late(name: str, status: os.stat_result) -> int:
        if files(tmp_path) and not getattr(one, "met", False):
            one.met = True  # type: ignore[attr-defined]
            other.compact(stale_seconds=0)
        return retire(name, status)

    one._retire = late  # type: ignore[method-assign]
    one.compact(stale_seconds=0)
    assert digests(SharedDatabase(tmp_path)) == digests(one) == digests(other) == expected


def test_a_new_writer_tidies_up_where_there_are_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MANY_FILES", 5)
    _, expected = many(tmp_path, 4)
    old = time.time() - 2 * shared.STALE_SECONDS
    for path in files(tmp_path):
        os.utime(path, (old, old))
    database = SharedDatabase(tmp_path)
    (extra,) = random_records(1, 1)
    database.add([extra])
    assert len(files(tmp_path)) == 2 and digests(database) == expected | {extra.digest}


def test_a_writer_that_slept_starts_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its old one may have been merged away meanwhile."""
    records = random_records(0, 4)
    database = SharedDatabase(tmp_path)
    database.add(records[:1])
    files(tmp_path)[0].unlink()
    database.add(records[1:2])
    later = time.time() + shared.IDLE_SECONDS + 1
    monkeypatch.setattr(time, "time", lambda: later)
    database.add(records[2:3])
    monkeypatch.undo()
    database.add(records[3:])
    assert set(database) == set(records[1:]) and len(files(tmp_path)) == 3


# ---- when it cannot be written --------------------------------------------------------------------------------------

FULL = """
import resource, signal, sys
from pathlib import Path
from tunewright import DatabaseError
from tunewright.testing.database import random_records
from tunewright.knowledge.shared import SharedDatabase
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
database, added, errors = SharedDatabase(Path(sys.argv[1])), [], []
for record in random_records(0, 60):
    try:
        database.add([record])
        added.append(record)
    except DatabaseError as error:
        errors.append(str(error))
assert set(added) <= set(database) and set(database) == set(SharedDatabase(Path(sys.argv[1])))
print(len(added), len(errors), errors[0])
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files: what does not fit is refused, and half a line harms nobody."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    added, errors, message = done.stdout.split(maxsplit=2)
    assert int(errors) > 2 and int(added) + int(errors) == 60
    assert "cannot be written: File too large (nothing that was there is lost; make room" in message
    database = SharedDatabase(tmp_path)
    assert len(list(database)) == int(added) and all("last line" in text for text in database.damage())
    assert database.add(random_records(0, 60)) == int(errors)


def test_a_folder_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "kb").mkdir()
    (tmp_path / "kb" / "writers").write_text("text")
    for folder in (tmp_path / "file" / "kb", tmp_path / "kb"):
        database = SharedDatabase(folder)
        assert not list(database) and not database.family("x") and database.damage()
        assert database.read_only is not None and "is not a folder" in database.read_only
        with pytest.raises(DatabaseError, match="cannot be written"):
            database.add(random_records(0, 1))


def test_what_lies_around_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "writers"
    (folder / "folder.jsonl").mkdir(parents=True)
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "note.txt").write_text("x")
    (folder / "gone.jsonl").symlink_to(folder / "nowhere")
    database = SharedDatabase(tmp_path)
    assert database.add(random_records(0, 2)) == 2 and len(list(database)) == 2 and not database.damage()


def test_unchanged_families_stay_the_same_object(tmp_path: Path) -> None:
    database, other = SharedDatabase(tmp_path), SharedDatabase(tmp_path)
    other.add(random_records(0, 40))
    families = {r.family: database.family(r.family) for r in database if isinstance(r, Measurement)}
    record = next(r for r in random_records(1, 9) if isinstance(r, Measurement))
    other.add([record])
    for family, found in families.items():
        assert (database.family(family) is found) == (family != record.family)

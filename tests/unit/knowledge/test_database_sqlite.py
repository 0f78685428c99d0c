"""The user's knowledge base in SQLite: what is made when, who waits for whom, and what is not believed."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunewright import DatabaseError
from tunewright.knowledge import sqlite
from tunewright.knowledge.record import Fault, Measurement
from tunewright.knowledge.sqlite import SqliteDatabase
from tunewright.testing.database import random_records


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "a folder" / "kb?#%41"  # characters that mean something in a URI


def filled(folder: Path, count: int = 12) -> SqliteDatabase:
    database = SqliteDatabase(folder)
    database.add(random_records(0, count))
    return database


def test_reading_makes_nothing(folder: Path) -> None:
    database = SqliteDatabase(folder)
    assert not list(database) and not database.family("x") and not database.faults() and not database.events()
    assert not database.damage() and database.read_only is None
    assert database.add([]) == 0 and database.remove(["x"]) == 0
    assert not folder.parent.exists()


def test_the_first_write_makes_a_private_folder(folder: Path) -> None:
    filled(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [p.name for p in folder.iterdir()] == ["kb.sqlite"]


def test_what_is_in_the_file(folder: Path) -> None:
    filled(folder)
    connection = sqlite3.connect(folder / "kb.sqlite")
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("SELECT count(*) FROM records").fetchone() == (12,)
    connection.close()


def test_asking_again_reads_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = filled(folder)
    family = next(r.family for r in database if isinstance(r, Measurement))
    first, faults = database.family(family), database.faults()
    monkeypatch.setattr(sqlite, "from_text", None)
    assert database.family(family) is first and database.faults() is faults
    monkeypatch.undo()
    SqliteDatabase(folder).add(random_records(1, 90))  # another connection
    assert len(database.family(family)) > len(first)


def test_a_family_that_has_not_changed_stays_the_same_object(folder: Path) -> None:
    database, other = filled(folder, 40), SqliteDatabase(folder)
    families = {r.family: database.family(r.family) for r in database if isinstance(r, Measurement)}
    record = next(r for r in random_records(1, 9) if isinstance(r, Measurement))
    other.add([record])
    for family, found in families.items():
        assert (database.family(family) is found) == (family != record.family)


def test_a_bad_row_is_a_miss_until_it_is_added_again(folder: Path) -> None:
    database = filled(folder)
    records = list(database)
    connection = sqlite3.connect(folder / "kb.sqlite")
    connection.execute("UPDATE records SET text = replace(text, '0', '1') WHERE digest = ?", (records[3].digest,))
    connection.execute("UPDATE records SET text = NULL || text WHERE 0")
    connection.commit()
    connection.close()
    assert list(database) == records[:3] + records[4:]
    (told,) = database.damage()
    assert records[3].digest[:16] in told and "digest does not match" in told
    assert database.add(records) == 1
    assert list(database) == records and not database.damage()


@pytest.mark.parametrize("value", [b"\xff\xfe", 17, 1.5, b"", "{}", "[" * 100_000])
def test_rows_that_are_no_records(folder: Path, value: object) -> None:
    database = filled(folder)
    connection = sqlite3.connect(folder / "kb.sqlite")
    connection.execute("INSERT INTO records VALUES (?, 'fault', '', ?)", (value, value))
    connection.execute("INSERT INTO events VALUES (?, ?, ?)", (b"\xff", 1, "x"))
    connection.commit()
    connection.close()
    assert len(list(database)) == 12 and all(isinstance(f, Fault) for f in database.faults())
    assert len(database.damage()) == 1 and not database.events()
    assert database.add(random_records(1, 1)) == 1


# ---- files that are not ours ----------------------------------------------------------------------------------------


def hostile(folder: Path, *statements: str) -> None:
    folder.mkdir(parents=True)
    connection = sqlite3.connect(folder / "kb.sqlite")
    for sql in (*sqlite._TABLES.values(), "PRAGMA user_version = 1", *statements):
        connection.execute(sql)
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    "statements",
    [
        ("CREATE TRIGGER t AFTER INSERT ON records BEGIN DELETE FROM records; END",),
        ("CREATE VIEW v AS SELECT 1",),
        ("DROP TABLE events", "CREATE VIEW events AS SELECT '' AS date, '' AS action, '' AS what"),
        (
            "DROP TABLE records",
            "CREATE VIEW records AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
            " SELECT '' AS digest, '' AS kind, '' AS family, '' AS text FROM n",
        ),
        ("ALTER TABLE records ADD COLUMN more TEXT DEFAULT (hex(randomblob(9)))",),
        ("CREATE TABLE more (x)",),
        ("DROP INDEX records_of_family",),
        ("PRAGMA user_version = 2",),
        ("PRAGMA user_version = 0",),
        ("PRAGMA journal_mode = WAL",),
    ],
    ids=lambda s: s[-1][:30],
)
def test_a_file_with_other_tables_is_not_believed(folder: Path, statements: tuple[str, ...]) -> None:
    hostile(folder, *statements)
    database = SqliteDatabase(folder)
    assert not list(database) and not database.family("x") and not database.faults() and not database.events()
    assert len(database.damage()) == 1 and database.read_only is None
    assert database.add(random_records(0, 3)) == 3
    assert list(SqliteDatabase(folder)) == sorted(random_records(0, 3), key=lambda r: r.digest)
    assert not database.damage() and [e.action for e in database.events()] == ["repaired"]
    assert len(list(folder.glob("kb.sqlite.damaged-*-1"))) == 1


def test_a_later_format_is_left_alone(folder: Path) -> None:
    hostile(folder, "PRAGMA user_version = 2", "CREATE TABLE more (x)")
    before = (folder / "kb.sqlite").read_bytes()
    database = SqliteDatabase(folder)
    assert not list(database) and not database.family("x")
    assert database.read_only is not None and "format 2 of a later Tunewright" in database.read_only
    assert "format 2" in database.damage()[0]
    with pytest.raises(DatabaseError, match=r"format 2 .*\(use a newer Tunewright"):
        database.add(random_records(0, 1))
    assert (folder / "kb.sqlite").read_bytes() == before and len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("make", ["folder", "pipe", "text", "empty", "link"])
def test_what_is_no_database_at_all(folder: Path, make: str) -> None:
    folder.mkdir(parents=True)
    file = folder / "kb.sqlite"
    {
        "folder": lambda: (file / "more").mkdir(parents=True), "pipe": lambda: os.mkfifo(file),
        "text": lambda: file.write_text("SQLite format 3, so I say" * 1000), "empty": file.touch,
        "link": lambda: file.symlink_to(folder / "text"),
    }[make]()  # fmt: skip
    (folder / "text").write_text("text")
    database = SqliteDatabase(folder)
    assert not list(database) and not database.family("x") and len(database.damage()) == 1
    assert database.read_only is None
    assert database.add(random_records(0, 3)) == 3 and len(list(database)) == 3 and not database.damage()
    assert (folder / "text").read_text() == "text"


def test_a_folder_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    database = SqliteDatabase(tmp_path / "file" / "kb")
    assert not list(database) and not database.family("x") and database.damage()
    assert database.read_only == f"{tmp_path / 'file'} is not a folder"
    with pytest.raises(DatabaseError, match="cannot be written"):
        database.add(random_records(0, 1))


def test_a_second_damage_has_a_name_of_its_own(folder: Path) -> None:
    database = filled(folder)
    for _ in range(2):
        (folder / "kb.sqlite").write_bytes(b"x" * 9000)
        database.add(random_records(0, 1))
    assert sorted(p.name[-2:] for p in folder.glob("kb.sqlite.damaged-*")) == ["-1", "-2"]


def test_a_journal_of_a_damaged_file_is_not_applied_to_the_new_one(folder: Path) -> None:
    filled(folder)
    (folder / "kb.sqlite").write_bytes(b"x" * 9000)
    (folder / "kb.sqlite-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + b"\0" * 9000)
    database = SqliteDatabase(folder)
    assert database.add(random_records(0, 5)) == 5
    assert len(list(SqliteDatabase(folder))) == 5 and not (folder / "kb.sqlite-journal").exists()


# ---- when it cannot be written --------------------------------------------------------------------------------------


SCRIPT = """
import os, resource, signal, sys, tempfile
from pathlib import Path
from tunewright import DatabaseError
from tunewright.testing.database import random_records
from tunewright.knowledge.{module} import {kind}

def everything(folder):
    database, records = {kind}(folder), random_records(5, 400)
    print(len(list(database)), database.read_only)
    try:
        print("added", sum(database.add([record]) for record in records))
    except DatabaseError as error:
        print(error)
    print(len(list(database)), len(list({kind}(folder))), database.damage())

with tempfile.TemporaryDirectory() as folder:  # what is imported on first use
    {kind}(Path(folder)).add(random_records(0, 1))
    {kind}(Path(folder)).damage()
resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
everything(Path(sys.argv[1]))
"""


def as_nobody(module: str, kind: str, folder: Path) -> list[str]:
    """What a process says that lacks the rights of root, if we have them, and may make no file above 150,000 bytes."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    script = SCRIPT.format(module=module, kind=kind)
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that others can reach, which pytest's own do not let them."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        filled(Path(place) / "kb")
        yield Path(place) / "kb"


def allow(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    (folder / "kb.sqlite").chmod(mode & 0o666)


def test_a_folder_that_is_only_read(open_folder: Path) -> None:
    if os.getuid():
        pytest.skip("only root can become somebody else")
    allow(open_folder, 0o555)
    said = as_nobody("sqlite", "SqliteDatabase", open_folder)
    assert said[0] == f"12 {open_folder / 'kb.sqlite'} cannot be written to"
    assert "cannot be written: attempt to write a readonly database" in said[1] and "USER_DB_PATH" in said[1]
    assert said[2] == "12 12 []"


def test_a_full_disk(open_folder: Path) -> None:
    """A limit on the size of files is as good as a disk that is full."""
    allow(open_folder, 0o777)
    said = as_nobody("sqlite", "SqliteDatabase", open_folder)
    assert said[0] == "12 None"
    assert "kb.sqlite: cannot be written:" in said[1] and "make room" in said[1]
    one, other, damage = said[2].split(maxsplit=2)
    assert one == other and int(one) >= 12 and damage == "[]", said[2]
    database = SqliteDatabase(open_folder)
    before = len(list(database))
    assert before == int(one) and database.add(random_records(5, 400)) == 400 - (before - 12)


# ---- others ---------------------------------------------------------------------------------------------------------


def test_a_reader_waits_for_a_writer_and_then_goes_on_without_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.2)
    database = filled(folder)
    family = next(r.family for r in database if isinstance(r, Measurement))
    database = SqliteDatabase(folder)
    blocker = sqlite3.connect(folder / "kb.sqlite", isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    begin = time.monotonic()
    assert database.family(family) == ()
    assert 0.15 < time.monotonic() - begin < 5
    assert any("locked" in text for text in database.damage())
    blocker.execute("COMMIT")
    blocker.close()
    assert database.family(family) and not database.damage()


def test_questions_together_wait_less_than_five_seconds() -> None:
    assert sqlite.BUSY_SECONDS + sqlite.QUEUE_SECONDS <= 4.0


def test_a_writer_gives_up_in_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "LOCK_SECONDS", 0.2)
    database = filled(folder)
    with database._locked(), pytest.raises(DatabaseError, match="other processes held its lock"):
        SqliteDatabase(folder).add(random_records(1, 1))
    assert database.add(random_records(1, 1)) == 1


def test_another_process_may_replace_the_file(folder: Path) -> None:
    one, other = filled(folder), SqliteDatabase(folder)
    assert len(list(other)) == 12 and other.faults() is not None
    (folder / "kb.sqlite").unlink()
    assert not list(other) and not other.faults()
    one.add(random_records(1, 5))
    assert len(list(other)) == 5
    (folder / "kb.sqlite").write_bytes(b"x" * 9000)
    one.add(random_records(2, 5))
    other.add(random_records(3, 5))
    assert set(one) == set(other) == {*random_records(2, 5), *random_records(3, 5)}


def test_what_a_killed_repair_left_is_cleared(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "kb.sqlite.new-1-2").write_text("half")
    filled(folder)
    assert [p.name for p in folder.iterdir()] == ["kb.sqlite"]


def test_the_log_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "MOST_EVENTS", 5)
    database = SqliteDatabase(folder)
    for k in range(9):
        database.note("tuned", str(k))
    assert [e.what for e in database.events()] == list("45678")


FORK = """
import os, sys, threading
from pathlib import Path
from tunewright.testing.database import random_records
from tunewright.knowledge.{module} import {kind}
records = random_records(0, 40)
database = {kind}(Path(sys.argv[1]))
database.add(records[:10])
family = records[0].family
assert len(list(database)) == 10 and database.family(family)
children = []
for k in range(1, 4):
    child = os.fork()
    if child == 0:
        assert database.family(family)
        for record in records[10 * k : 10 * k + 10]:
            database.add([record])
        os._exit(0 if set(records[10 * k : 10 * k + 10]) <= set(database) else 1)
    children.append(child)
database.note("tuned", "meanwhile")
print([os.waitpid(child, 0)[1] for child in children], len(list(database)), database.damage())
"""


@pytest.mark.parametrize(("module", "kind"), [("sqlite", "SqliteDatabase"), ("shared", "SharedDatabase")])
def test_a_forked_child_opens_it_for_itself(module: str, kind: str, folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    script = FORK.format(module=module, kind=kind)
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, env=environment)
    assert done.stdout.split("\n")[0] == "[0, 0, 0] 40 []", done.stderr


def test_a_long_question_does_not_block_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = filled(folder)
    family = next(r.family for r in database if isinstance(r, Measurement))
    inside, go_on = threading.Event(), threading.Event()

    def slow(connection: sqlite3.Connection) -> list[str]:
        inside.set()
        go_on.wait(30)
        return []

    monkeypatch.setattr(sqlite, "_faults_of", slow)
    thread = threading.Thread(target=database.damage)
    thread.start()
    assert inside.wait(30)
    assert database.family(family)
    go_on.set()
    thread.join()

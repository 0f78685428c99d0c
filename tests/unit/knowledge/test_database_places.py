"""The knowledge base that is only read, files of lines, and where everything is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunewright import DatabaseError, InputError, Settings
from tunewright.knowledge import open_databases, record_lines
from tunewright.knowledge.database import MemoryDatabase
from tunewright.knowledge.record import Measurement, to_line
from tunewright.knowledge.shared import SharedDatabase
from tunewright.knowledge.sqlite import SqliteDatabase
from tunewright.knowledge.system import SystemDatabase, write_lines
from tunewright.testing.database import random_records

# ---- system.jsonl ---------------------------------------------------------------------------------------------------


def test_a_missing_or_empty_file_holds_nothing(tmp_path: Path) -> None:
    for make in (lambda: None, (tmp_path / "system.jsonl").touch):
        make()
        database = SystemDatabase(tmp_path)
        assert not list(database) and not database.family("x") and not database.faults() and not database.damage()
        assert not database.events()


def test_lines_are_sorted_and_each_is_there_once(tmp_path: Path) -> None:
    records = random_records(0, 20)
    write_lines(tmp_path / "a.jsonl", [*records, *records[:5]])
    write_lines(tmp_path / "b.jsonl", reversed(records))
    data = (tmp_path / "a.jsonl").read_text()
    assert data == (tmp_path / "b.jsonl").read_text()
    assert data.splitlines() == sorted(to_line(record) for record in records)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="cannot be written: No such file"):
        write_lines(tmp_path / "nowhere" / "a.jsonl", random_records(0, 1))


def test_it_is_only_read(tmp_path: Path) -> None:
    write_lines(tmp_path / "system.jsonl", random_records(0, 3))
    database = SystemDatabase(tmp_path)
    more = random_records(1, 1)
    for write in (lambda: database.add(more), lambda: database.remove(["x"]), lambda: database.note("a", "b")):
        with pytest.raises(DatabaseError, match="user's knowledge base"):
            write()
    assert database.read_only and len(list(database)) == 3


def test_only_what_is_asked_for_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = random_records(0, 60)
    write_lines(tmp_path / "system.jsonl", records)
    parsed = []
    read = record_lines.read
    monkeypatch.setattr(record_lines, "read", lambda line: parsed.append(line) or read(line))
    family = next(r.family for r in records if isinstance(r, Measurement) and r.family.startswith("Relu"))
    database = SystemDatabase(tmp_path)
    found = database.family(family)
    assert len(parsed) == len(found) == sum(isinstance(r, Measurement) and r.family == family for r in records) > 0
    assert database.family(family) is found and len(parsed) == len(found)


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    database = SystemDatabase(tmp_path)
    for seed in range(3):
        write_lines(tmp_path / "system.jsonl", random_records(seed, 5))
        assert set(database) == set(random_records(seed, 5))
    (tmp_path / "system.jsonl").unlink()
    assert not list(database)


def test_bad_lines_are_named_and_left_out(tmp_path: Path) -> None:
    records = sorted(random_records(0, 5), key=lambda r: r.digest)
    texts = [to_line(r) for r in records]
    texts[1] = texts[1].replace('"config":', '"config": ')  # the same content, but not in the form that has this digest
    texts[3] = texts[3][:-30]
    (tmp_path / "system.jsonl").write_text("\n".join([*texts[:2], "", "# comment", *texts[2:]]))
    database = SystemDatabase(tmp_path)
    assert list(database) == [records[0], records[2], records[4]]
    assert [text.split(":")[0] for text in database.damage()] == [f"system.jsonl, line {k}" for k in (2, 4, 6)]


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "system.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in ("system.jsonl", "pipe.jsonl"):
        database = SystemDatabase(tmp_path, name)
        assert not list(database) and not database.family("x") and "not a file" in database.damage()[0]


# ---- where ----------------------------------------------------------------------------------------------------------


def test_the_folder_of_the_user(tmp_path: Path) -> None:
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    assert open_databases.user_folder(Settings(user_db_path=one)) == Path(one)
    assert open_databases.user_folder(Settings(tune_bank_path=other)) == Path(other)
    both = Settings(user_db_path=one, tune_bank_path=other)
    assert open_databases.user_folder(both) == Path(one)
    assert open_databases.warnings(both) == [
        f"USER_DB_PATH ({one}) and TUNE_BANK_PATH ({other}) differ: USER_DB_PATH is used"
    ]
    for fine in (Settings(), Settings(user_db_path=one), Settings(user_db_path=one, tune_bank_path=one + "/")):
        assert open_databases.warnings(fine) == []
    assert open_databases.user_folder(Settings(user_db_path="here")) == Path.cwd() / "here"


def test_the_folder_among_the_users_data(tmp_path: Path) -> None:
    script = (
        "from tunewright import Settings; from tunewright.knowledge.open_databases import user_folder;"
        "print(user_folder(Settings.make())); print(user_folder(Settings.make({'USER_DB_PATH': '~/kb'})))"
    )
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[3] / "src"), "HOME": str(tmp_path),
        "XDG_DATA_HOME": str(tmp_path / "d"), "PATH": os.environ.get("PATH", ""),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(tmp_path / "d" / "tunewright"), str(tmp_path / "kb")]
    assert not list(tmp_path.iterdir())


def test_the_folder_of_the_system(tmp_path: Path) -> None:
    assert open_databases.system_folder(Settings(system_db_path=str(tmp_path))) == tmp_path
    shipped = open_databases.open_system(Settings())
    assert open_databases.system_folder(Settings()) == open_databases.SHIPPED and shipped.path == str(
        open_databases.SHIPPED / "system.jsonl"
    )
    assert not shipped.damage()


def test_each_place_is_opened_once(tmp_path: Path) -> None:
    sqlite = Settings(user_db_path=str(tmp_path))
    shared = Settings(user_db_path=str(tmp_path), user_db_mode="SHARED")
    assert isinstance(open_databases.open_user(sqlite), SqliteDatabase) and isinstance(
        open_databases.open_user(shared), SharedDatabase
    )
    assert open_databases.open_user(sqlite) is open_databases.open_user(Settings(tune_bank_path=str(tmp_path)))
    assert open_databases.open_user(shared) is open_databases.open_user(shared)
    assert open_databases.open_system(Settings()) is open_databases.open_system(Settings())
    assert not list(tmp_path.iterdir())


def test_any_knowledge_base_by_its_path(tmp_path: Path) -> None:
    records = random_records(0, 5)
    SqliteDatabase(tmp_path / "a").add(records)
    SharedDatabase(tmp_path / "b").add(records)
    (tmp_path / "c").mkdir()
    write_lines(tmp_path / "c" / "system.jsonl", records)
    for name in ("a", "a/kb.sqlite", "b", "c", "c/system.jsonl"):
        assert set(open_databases.open_path(tmp_path / name)) == set(records)
    with pytest.raises(InputError, match="is no knowledge base"):
        open_databases.open_path(tmp_path)


def test_memory_is_a_place_too() -> None:
    assert MemoryDatabase(random_records(0, 3)).read_only is None

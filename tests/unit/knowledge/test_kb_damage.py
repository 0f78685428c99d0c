"""A damaged knowledge base is told: one warning where it is loaded, a line in the commands, and a remedy."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from onnx import TensorProto, helper

from tunewright import Core
from tunewright.knowledge import database, open_databases
from tunewright.knowledge.database import Database
from tunewright.knowledge.record import Measurement
from tunewright.knowledge.shared import SharedDatabase
from tunewright.knowledge.sqlite import SqliteDatabase
from tunewright.knowledge.system import SystemDatabase, write_lines
from tunewright.testing.database import random_records
from tunewright.tools import execute


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    """As in a process that has told nothing yet."""
    monkeypatch.setattr(database, "_told", set())
    monkeypatch.setattr(open_databases, "_OPEN", {})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "kb"))
    (tmp_path / "kb").mkdir()
    return tmp_path / "kb"


def model():
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"], name="s")], "g", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def filled(folder):
    found = SqliteDatabase(folder)
    found.add(random_records(0, 12))
    del found
    return folder / "kb.sqlite"


def test_a_load_warns_once_of_a_file_that_is_broken(folder, caplog):
    filled(folder).write_bytes(b"no database at all" * 100)
    with caplog.at_level(logging.WARNING, "tunewright"):
        for _ in range(2):
            Core().compile_model(model())({"x": np.ones((4, 8), np.float32)})
    told = [r.getMessage() for r in caplog.records if "damaged" in r.getMessage()]
    assert len(told) == 1 and str(folder / "kb.sqlite") in told[0] and "tunewright kb repair" in told[0]


def test_a_whole_file_gives_no_warning(folder, caplog):
    filled(folder)
    Core().compile_model(model())({"x": np.ones((4, 8), np.float32)})
    assert not [r for r in caplog.records if "damaged" in r.getMessage()]


def break_a_record(file):
    import sqlite3

    connection = sqlite3.connect(file)
    (digest,) = connection.execute("SELECT digest FROM records WHERE kind = 'measurement' LIMIT 1").fetchone()
    connection.execute("UPDATE records SET text = replace(text, '1', '2') WHERE digest = ?", (digest,))
    connection.commit()
    connection.close()
    return digest


def family_of(records: list, digest: str) -> str:
    return next(r.family for r in records if r.digest == digest)


def test_a_single_record_is_told_too(folder, caplog):
    digest = break_a_record(filled(folder))
    family = family_of(random_records(0, 12), digest)
    SqliteDatabase(folder).family(family)
    (record,) = caplog.records
    assert "1 of " in record.getMessage() and "kb stats" in record.getMessage()


@pytest.mark.parametrize("kind", [SystemDatabase, SharedDatabase])
def test_damaged_lines_are_told(tmp_path, kind: type[Database], caplog):
    records = [r for r in random_records(0, 12) if isinstance(r, Measurement)]
    if kind is SharedDatabase:
        SharedDatabase(tmp_path).add(records)
        (file,) = (tmp_path / "writers").iterdir()
    else:
        file = tmp_path / "system.jsonl"
        write_lines(file, records)
    data = file.read_bytes()
    at = data.index(records[0].digest.encode()) + 200
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    found = kind(tmp_path)
    for record in records:
        found.family(record.family)
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 1 and str(tmp_path) in told[0] and "kb path" in told[0]


@pytest.mark.parametrize("command", ["kb list", "kb stats", "kb path"])
def test_the_commands_mention_it_once(folder, command, capsys):
    filled(folder).write_bytes(b"no database at all" * 100)
    assert execute(command.split()) == 0
    captured = capsys.readouterr()
    assert captured.err.count("kb.sqlite") == 1, captured.err


@pytest.mark.parametrize("command", ["explain {} --no-time", "tune {} --budget 2s"])
def test_what_loads_a_model_mentions_it(folder, command, caplog, tmp_path):
    filled(folder).write_bytes(b"no database at all" * 100)
    (tmp_path / "m.onnx").write_bytes(model().SerializeToString())
    assert execute(command.format(tmp_path / "m.onnx").split()) == 0
    assert len([r for r in caplog.records if "is damaged" in r.getMessage()]) == 1


def test_repair_keeps_what_can_be_read(folder, capsys):
    file = filled(folder)
    break_a_record(file)
    assert execute(["kb", "repair"]) == 0
    out = capsys.readouterr()
    assert "1 fault found" in out.out and "11 records" in out.out
    assert len(list(folder.glob("kb.sqlite.damaged-*"))) == 1
    assert execute(["kb", "repair", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["damage"] == []
    assert len(list(SqliteDatabase(folder))) == 11
    assert [e.action for e in SqliteDatabase(folder).events()] == ["repaired"]


def test_repair_of_a_shared_folder_says_why_not(folder, capsys):
    assert execute(["kb", "repair", "--config", "USER_DB_MODE=SHARED"]) == 2
    assert "nothing to repair" in capsys.readouterr().err

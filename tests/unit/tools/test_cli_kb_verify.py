"""`tunewright kb verify`: real duels in a worker process, of answers that hold, drifted, or are none any more."""

from __future__ import annotations

import dataclasses
import json

import pytest

from helpers.kb_records import FOREIGN, exact, measurement, problem
from tunewright import tools
from tunewright.knowledge.key import Where
from tunewright.knowledge.open_databases import open_user
from tunewright.knowledge.system import write_lines
from tunewright.plugins.single import open_device
from tunewright.search.space import Config
from tunewright.settings import Settings
from tunewright.solvers.base import solvers
from tunewright.tools.kb.ask import AskedDevice

#: a few microseconds, so that there are rounds enough on a busy machine; and one where a kernel is far ahead of numpy
SHAPE, BIG = (64, 1000), (256, 4096)
UNBELIEVABLE = (50.0, 49.0, 51.0)


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "user"))
    monkeypatch.setenv("TUNEWRIGHT_SYSTEM_DB_PATH", str(tmp_path / "system"))
    (tmp_path / "system").mkdir()


@pytest.fixture
def user():
    return open_user(Settings.from_environment())


@pytest.fixture
def verify(capsys):
    """(exit code, rows by operation, stderr)."""

    def run(*arguments):
        code = tools.execute(["kb", "verify", "--json", "-c", "TUNE_SECONDS=20", *(str(a) for a in arguments)])
        captured = capsys.readouterr()
        rows = {row["problem"].partition("(")[0]: row for row in json.loads(captured.out)} if code < 2 else {}
        return code, rows, captured.err

    return run


def decided(verify):
    """The first of a few answers that noise does not leave open: an open one writes nothing, and one asks again."""
    for _ in range(4):
        code, rows, err = verify()
        if all(row["verdict"] != "open" for row in rows.values()):
            break
    return code, rows, err


def stored(op, gain=UNBELIEVABLE, **about):
    """A measurement that numpy is faster than the default kernel, which it is on no machine."""
    posed, device = problem(op, BIG), open_device("CPU")
    solver = AskedDevice("CPU", {}, Settings()).solvers(posed)[0]
    numpy = next(s for s in solvers() if s.id == "host.reference")
    default = Config(solver.default(posed, device.target))
    return exact(posed, Config(), "CPU", solver=numpy, gain=gain, default=(solver.id, default), **about)


def test_what_drifted_answers_no_more(verify, user, tmp_path):
    """Of the user and of the system alike: what is measured now is the user's, and the newest."""
    write_lines(tmp_path / "system" / "system.jsonl", [stored("Softmax")])
    asked = AskedDevice("CPU", {"user": user}, Settings())
    code, rows, err = decided(verify)
    assert code == 1 and not err
    row = rows["Softmax"]
    assert row["verdict"] == "drifted" and row["before"]["median"] == 50 and row["now"]["high"] < 49
    (record,) = user
    assert record.key == stored("Softmax").key and record.config == stored("Softmax").config
    assert not record.evidence.confirmed or record.evidence.gain.median < 49
    assert asked.answer(problem("Softmax", BIG)).best is None
    assert [(e.action, e.what) for e in user.events()][-1] == ("verified", "1 answer on CPU, 1 drifted")
    assert verify()[:2] == (0, {}), "it is no answer any more"


def test_what_is_still_faster_holds(verify, user, monkeypatch):
    """The kernel against numpy as the default: several times as fast on any machine."""
    solver = AskedDevice("CPU", {}, Settings()).solvers(problem("Softmax", BIG))[0]
    config = solver.default(problem("Softmax", BIG), open_device("CPU").target)
    user.add([exact(problem("Softmax", BIG), config, "CPU", gain=(1.2, 1.1, 1.3), date="2020-01-01T00:00:00Z")])
    monkeypatch.setattr(AskedDevice, "default", lambda self, problem: ("host.reference", Config()))
    code, rows, _ = decided(verify)
    assert code == 0
    assert rows["Softmax"]["verdict"] == "holds" and rows["Softmax"]["now"]["low"] > 1
    newest = max(user, key=lambda m: m.date)
    assert newest.evidence.confirmed and newest.evidence.default == ("host.reference", Config())
    assert len(list(user)) == 2, "nothing is overwritten"


def test_the_oldest_come_first_and_the_rest_is_counted(user, capsys):
    user.add([stored("Softmax", date="2026-02-01T00:00:00Z"), stored("LogSoftmax", date="2026-01-01T00:00:00Z")])
    code = tools.execute(["kb", "verify", "--count", "1", "-c", "TUNE_SECONDS=10"])
    out = capsys.readouterr().out
    found = "1 open" if "1 open" in out else "1 drifted"  # noise may leave it open
    assert code == (found == "1 drifted") and f"{found}; 1 answer not measured this time (--all)" in out, out
    assert "LogSoftmax(" in out and "\nSoftmax(" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_what_cannot_be_measured_is_named_and_nothing_is_written(verify, user):
    here = Where.of(open_device("CPU").target)
    user.add([
        measurement(problem("Relu"), here, "no.such"),
        measurement(problem("Abs"), here, "opencl.elementwise", {"warp": 9}),
        dataclasses.replace(measurement(problem("Neg"), here, "opencl.elementwise"), problem={"op": "Neg"}),
        measurement(problem("Exp"), FOREIGN),
        measurement(problem("Log"), here, "no.such", gain=(0.9, 0.8, 1.0)),
    ])  # fmt: skip
    before = {r.digest for r in user}
    code, rows, _ = verify("--all")
    assert code == 0
    assert {op: row["verdict"] for op, row in rows.items()} == {"Relu": "gone", "Abs": "gone", "Neg": "not checkable"}
    assert rows["Relu"]["why"] == "there is no such solver here"
    assert rows["Abs"]["why"] == "its config is not in the solver's space"
    assert {r.digest for r in user} == before


def test_the_default_needs_no_duel(verify, user):
    posed, device = problem("Softmax", SHAPE), open_device("CPU")
    solver = next(s for s in solvers() if s.id == "opencl.softmax")
    config = solver.default(posed, device.target)
    user.add([exact(posed, config, "CPU", gain=(1.0, 1.0, 1.0), default=(solver.id, config))])
    assert verify()[:2] == (0, {})


def test_without_time_nothing_is_decided(verify, user):
    user.add([stored("Softmax", gain=(1.5, 1.4, 1.6))])
    code, rows, _ = verify("-c", "TUNE_SECONDS=0")
    assert code == 0 and rows["Softmax"]["verdict"] in ("open", "not checkable")
    assert len(list(user)) == 1, "noise must not demote an answer"


def test_filters_and_devices(verify, user):
    user.add([stored("Softmax")])
    assert verify("--op", "Conv")[:2] == (0, {})
    assert verify("--solver", "opencl")[:2] == (0, {})
    assert verify("--device", "CPU.HOST")[:2] == (0, {}), "it is an answer of another device"

"""Tuning while a model is loaded, or meets a new shape: its result file, and the time that it may take."""

from __future__ import annotations

import json
import logging
import os

import numpy as np
import pytest
from onnx import TensorProto, helper

from tunewright import Core
from tunewright.errors import DeviceError
from tunewright.knowledge.record import Ratio
from tunewright.plugins.single import open_device
from tunewright.tools.tune.report import page
from tunewright.tuning import knowledge_layers, online, session
from tunewright.tuning.progress import Progress, listening

pytestmark = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    """As in a process that has tuned nothing yet."""
    monkeypatch.setattr(online, "_ONLINE", {})
    knowledge_layers.warn.cache_clear()


def model(count=3):
    """Poolings of as many kinds, over any number of rows."""
    dims = [1, 8, "rows", 16]
    types = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in ("v0", f"v{count}")]
    nodes = [
        helper.make_node("MaxPool", [f"v{n}"], [f"v{n + 1}"], kernel_shape=[2 * n + 1] * 2, pads=[n] * 4, name=f"p{n}")
        for n in range(count)
    ]
    graph = helper.make_graph(nodes, "g", types[:1], types[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def values(rows=16):
    return {"v0": np.ones((1, 8, rows, 16), np.float32)}


def core(tmp_path, **settings):
    return Core({
        "USER_DB_PATH": str(tmp_path / "kb"), "TUNING_MODE": "TUNING_CREATE", "TUNE_RESULT_PATH": str(tmp_path / "r"),
        "TUNE_SECONDS": 0.3, **settings,
    })  # fmt: skip


@pytest.fixture
def sessions(monkeypatch):
    """Sessions that find nothing, after the time that they were given on a clock of our own; those times."""
    return scripted(monkeypatch, lambda seconds: seconds)


def scripted(monkeypatch, takes):
    """The times that sessions are given, on a clock on which each takes what ``takes`` says of that."""
    given: list[float] = []
    clock = [0.0]

    def tune(subject, measurer, plan, earlier, hooks):
        seconds, report, default = plan.seconds, hooks.report, subject.default
        given.append(seconds)
        for part in (0.0, 0.5):
            clock[0] += part * takes(seconds)
            if report is not None:
                elapsed = part * takes(seconds)
                report(Progress("search", 3, 0, default, 1.0, 2.0, elapsed, seconds))
        clock[0] += 0.5 * takes(seconds)
        return session.Outcome(default, False, "made up", Ratio.one())

    monkeypatch.setattr(session, "tune", tune)
    monkeypatch.setattr(online.Searches.__init__, "__defaults__", (lambda: clock[0],))
    return given


def content(tmp_path):
    (file,) = (tmp_path / "r").glob("tune_result_*.json")
    assert file.name.endswith(f"_pid{os.getpid()}.json") and not list((tmp_path / "r").glob("*.unfinished"))
    return json.loads(file.read_text())


def test_a_load_that_tunes_writes_it_down(tmp_path):
    compiled = core(tmp_path, TUNE_SECONDS=1.0).compile_model(model(1))
    compiled(values())
    found = content(tmp_path)
    assert (found["kind"], found["state"], found["model"], found["device"]) == ("online", "finished", None, "CPU")
    (layer,) = found["layers"]
    assert layer["op"] == "MaxPool" and layer["trials"] and layer["reason"] and layer["budget"] == 1.0
    assert layer["seconds"] > 0 and layer["after"] > 0 and layer["spent"]["search"] > 0
    assert "float32[1,8,16,16]" in layer["command"]
    assert "Tuned while models were loaded" in page([found])


def test_problems_follow_each_other_in_one_file(tmp_path, sessions):
    compiled = core(tmp_path).compile_model(model(2))
    compiled(values())
    assert len(content(tmp_path)["layers"]) == len(sessions) == 2
    compiled(values(rows=24))  # a new shape
    core(tmp_path).compile_model(model(3))(values())  # and another load
    layers = content(tmp_path)["layers"]
    assert len(layers) == len(sessions) >= 5
    assert all(layer["reason"] == "made up" for layer in layers)


def test_it_is_there_while_a_problem_is_tuned(tmp_path, monkeypatch):
    seen = []

    def tune(subject, *_):
        seen.append(content(tmp_path))
        return session.Outcome(subject.default, False, "made up")

    monkeypatch.setattr(session, "tune", tune)
    core(tmp_path).compile_model(model(1))(values())
    assert seen[0]["state"] == "search" and len(seen[0]["layers"]) == 1 and not seen[0]["layers"][0]["trials"]


def test_none_is_written_where_none_is_wanted(tmp_path, sessions, monkeypatch):
    monkeypatch.chdir(tmp_path)
    core(tmp_path, TUNE_RESULT_PATH="").compile_model(model(1))(values())
    assert sessions and not list(tmp_path.rglob("tune_result*"))
    core(tmp_path, TUNING_MODE="TUNING_USE_EXISTING").compile_model(model(1))(values())
    assert not list(tmp_path.rglob("tune_result*")), "nothing is tuned, and nothing is written"


def test_a_disk_that_cannot_be_written_stops_nothing(tmp_path, sessions, caplog):
    (tmp_path / "r").write_text("a file stands in the way")
    with caplog.at_level(logging.WARNING, "tunewright"):
        out = core(tmp_path).compile_model(model(3))(values())
    assert len(sessions) == 3 and out
    assert len([r for r in caplog.records if "tuning goes on" in r.message]) == 1


def test_a_device_that_fails_is_written_down_too(tmp_path, monkeypatch):
    def tune(*_, **__):
        raise DeviceError("the worker cannot start")

    monkeypatch.setattr(session, "tune", tune)
    core(tmp_path).compile_model(model(1))(values())
    (layer,) = content(tmp_path)["layers"]
    assert layer["skipped"] and layer["chosen"] is None and content(tmp_path)["state"] == "finished"


def test_a_load_takes_no_longer_than_its_budget(tmp_path, sessions):
    bounded = core(tmp_path, TUNE_SECONDS=2.0, TUNE_BUDGET=5.0)
    compiled = bounded.compile_model(model(6))
    compiled(values())
    assert sessions == [2.0, 2.0, pytest.approx(1.0)]
    compiled(values(rows=24))
    assert len(sessions) == 3, "new shapes of the same model share its budget"
    bounded.compile_model(model(6))(values())
    assert len(sessions) == 6, "the next load has its own"
    core(tmp_path, TUNE_SECONDS=2.0).compile_model(model(6))(values())
    assert len(sessions) == 12, "without a budget every problem is tuned"


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_that_the_budget_is_used_up_is_told_with_what_is_left(tmp_path, sessions, caplog):
    core(tmp_path, TUNE_SECONDS=2.0, TUNE_BUDGET=5.0).compile_model(model(6))(values())
    (text,) = warnings(caplog)
    assert "TUNE_BUDGET = 5 is used up after 5.0 s: 3 problems are left to the next load" in text
    assert text.count("MaxPool(") == 3


def test_searches_that_take_too_long_are_made_up_for(tmp_path, monkeypatch, caplog):
    """TUNE_SECONDS = 1 on six problems took 7.5 to 11.3 s."""
    spent = []
    given = scripted(monkeypatch, lambda seconds: spent.append(1.7 * seconds) or 1.7 * seconds)
    core(tmp_path, TUNE_SECONDS=1.0).compile_model(model(6))(values())
    found = online.Searches.__init__.__defaults__[0]()
    assert found <= 6 * 1.0 + 0.7, "no more than that times the problems, and one step that could not be interrupted"
    assert len(given) < 6
    (text,) = warnings(caplog)
    assert f"{6 - len(given)} problem" in text and "left to the next load" in text


def test_progress_is_logged_with_the_time_left(tmp_path, monkeypatch, caplog):
    scripted(monkeypatch, lambda seconds: seconds)
    with caplog.at_level(logging.INFO, "tunewright"):
        core(tmp_path, TUNE_SECONDS=8.0).compile_model(model(3))(values())
    texts = [r.getMessage() for r in caplog.records if r.getMessage().startswith("tuning ")]
    assert texts[0].startswith("tuning 1 of 3, at most 24 s left (search, 3 tried, 2.00x so far): MaxPool(")
    assert any(text.startswith("tuning 3 of 3") for text in texts)


def test_who_listens_is_told_and_a_terminal_gets_a_line(tmp_path, monkeypatch, capsys):
    scripted(monkeypatch, lambda seconds: seconds)
    told = []
    with listening(told.append):
        core(tmp_path, TUNE_SECONDS=8.0).compile_model(model(2))(values())
    assert told[-1] == "", "it is over"
    assert [text.partition(" s left")[0] for text in told[:-1]] == [
        f"tuning {n} of 2, at most {left}" for n, left in ((1, 16), (1, 12), (2, 8), (2, 4))
    ]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    core(tmp_path, TUNE_SECONDS=8.0, USER_DB_PATH=str(tmp_path / "other")).compile_model(model(2))(values())
    drawn = capsys.readouterr().err
    assert "tuning 1 of 2, at most 12 s left" in drawn and drawn.endswith("\r\x1b[K"), "and nothing stays of it"
    assert all(len(line.removeprefix("\x1b[K")) < 80 for line in drawn.split("\r"))


def test_the_file_names_the_strategy(tmp_path, sessions):
    core(tmp_path, AUTO_TUNE_MODE="RL,GA").compile_model(model(1))(values())
    found = content(tmp_path)
    assert found["settings"]["AUTO_TUNE_MODE"] == "RL,GA" and found["layers"][0]["strategy"] == "reinforce"
    assert "USER_DB_PATH" in found["layers"][0]["command"]

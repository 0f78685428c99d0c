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
from tunewright.plugins.single import open_device
from tunewright.tools.tune_report import page
from tunewright.tuning import result_file, session, tuner
from tunewright.tuning.record import Ratio

pytestmark = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    """As in a process that has tuned nothing yet."""
    monkeypatch.setattr(result_file, "_ONLINE", {})
    tuner.warn.cache_clear()


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
    given: list[float] = []
    clock = [0.0]

    def tune(problem, target, default, *_, seconds, **__):
        given.append(seconds)
        clock[0] += seconds
        return session.Outcome(default, False, "made up", Ratio.one())

    monkeypatch.setattr(session, "tune", tune)
    monkeypatch.setattr(tuner.time, "monotonic", lambda: clock[0])
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

    def tune(problem, target, default, *_, **__):
        seen.append(content(tmp_path))
        return session.Outcome(default, False, "made up")

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

"""Suggested commands: complete, so that pasting one goes on with what was begun."""

from __future__ import annotations

import json
import shlex

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tunewright import Core, tools
from tunewright.plugins.single import open_device
from tunewright.settings import Settings
from tunewright.solvers.base import Problem
from tunewright.tuning.offline import suggested_commands
from tunewright.tuning.offline.command import from_line


def model(rows="rows"):
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, 64]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"], name="s")], "g", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("config", [
    {"USER_DB_PATH": "/a b/kb", "NUM_STREAMS": "AUTO", "FLUSH_DENORMALS": "NO", "FIND_MODE": "FAST"},
    {"NUM_STREAMS": 2, "TUNE_SECONDS": 0.25, "SYSTEM_DB_PATH": "it's", "MODEL_PRIORITY": "HIGH", "CACHE_DIR": ""},
    {},
])  # fmt: skip
def test_settings_are_read_again_as_they_were(config):
    settings = Settings.make(config, Settings())
    words = shlex.split(suggested_commands.command("tune", "m.onnx", device="CPU", settings=settings))
    assert words[:5] == ["tunewright", "tune", "m.onnx", "-d", "CPU"]
    pairs = [words[n + 1] for n, word in enumerate(words) if word == "-c"]
    assert Settings.make(dict(pair.split("=", 1) for pair in pairs), Settings()) == settings
    assert bool(pairs) == bool(config)


def test_what_a_process_does_by_the_way_is_not_repeated():
    settings = Settings.make({"ENABLE_LOGGING_CMD": "YES", "TUNING_MODE": "CREATE", "FIND_ENFORCE": 4}, Settings())
    assert suggested_commands.command("tune", "m.onnx", settings=settings) == "tunewright tune m.onnx"


def test_a_line_of_the_driver_poses_the_problem_and_says_where(tmp_path):
    settings = Settings.make({"USER_DB_PATH": str(tmp_path / "my kb")}, Settings())
    compiled = Core().compile_model(model(4))
    (problem,) = {Problem.of(step.node) for plan in compiled.program.plans for step in plan.steps}
    line = suggested_commands.driver(problem, "CPU", settings, ["--tune", "--seconds", "3"])
    assert from_line(f"INFO: {line}") == problem
    assert line.endswith(f"-d CPU --tune --seconds 3 -c {shlex.quote(f'USER_DB_PATH={tmp_path}/my kb')}")


@pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")
def test_a_result_of_python_names_the_command_that_goes_on(tmp_path):
    onnx.save(model(), tmp_path / "m.onnx")
    settings = {"USER_DB_PATH": str(tmp_path / "kb"), "TUNE_RESULT_PATH": str(tmp_path)}
    result = Core(settings).tune(str(tmp_path / "m.onnx"), {"x": np.ones((3, 64), np.float32)}, "CPU", 2.0)
    words = shlex.split(result.written["command"])
    assert words[:7] == ["tunewright", "tune", str(tmp_path / "m.onnx"), "-d", "CPU", "-s", "x=3x64"]
    assert f"USER_DB_PATH={tmp_path / 'kb'}" in words
    assert all(f"USER_DB_PATH={tmp_path / 'kb'}" in layer["command"] for layer in result.written["layers"])
    assert Core(settings).tune(model(3), {"x": np.ones((3, 64), np.float32)}, "CPU", 1.0).written["command"] is None


def test_the_command_of_explain_is_complete(tmp_path, capsys):
    onnx.save(model(), tmp_path / "m.onnx")
    given = ["-s", "rows=5", "-c", f"USER_DB_PATH={tmp_path / 'kb'}"]
    assert tools.execute(["explain", str(tmp_path / "m.onnx"), "--no-time", "--json", "-", *given]) == 0
    words = shlex.split(json.loads(capsys.readouterr().out)["tune"])
    assert words[:7] == ["tunewright", "tune", str(tmp_path / "m.onnx"), "-d", "CPU", "-s", "rows=5"]
    assert f"USER_DB_PATH={tmp_path / 'kb'}" in words

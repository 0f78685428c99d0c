"""`tunewright tune problems.jsonl`: what an application met is tuned elsewhere, merged back, and used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tunewright import Core, tools
from tunewright.knowledge.open_databases import open_user
from tunewright.knowledge.record import Measurement, Ratio
from tunewright.measure.base import Regime
from tunewright.model_tuning import problems as offline
from tunewright.model_tuning.layers import TuningOptions
from tunewright.plugins.single import open_device
from tunewright.search.space import Config
from tunewright.settings import Settings
from tunewright.solvers.base import Problem
from tunewright.tuning import evidence, session
from tunewright.tuning.offline import dump
from tunewright.tuning.tuner import Origin, Tuner

pytestmark = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "user"))
    monkeypatch.setenv("TUNEWRIGHT_SYSTEM_DB_PATH", str(tmp_path / "system"))
    monkeypatch.chdir(tmp_path)


def model() -> onnx.ModelProto:
    """Two kinds of pooling: a problem each, whose kernels compile quickly."""
    types = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 32, 48, 48]) for name in "xpy"]
    window = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [1, 1]}
    nodes = [
        helper.make_node("MaxPool", ["x"], ["p"], name="most", **window),
        helper.make_node("AveragePool", ["p"], ["y"], name="mean", **window),
    ]
    graph = helper.make_graph(nodes, "g", [types[0]], [types[2]])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


X = {"x": np.ones((1, 32, 48, 48), np.float32)}


def choices(core: Core) -> dict[Problem, object]:
    compiled = core.compile_model(model())
    compiled(X)
    return {Problem.of(s.node): s.choice for plan in compiled.program.plans for s in plan.steps if s.choice is not None}


@pytest.fixture(scope="module")
def dump_file(tmp_path_factory):
    """The problems of the model, written by a process of its own."""
    folder = tmp_path_factory.mktemp("dump")
    onnx.save(model(), folder / "model.onnx")
    variables = {**os.environ, "TUNEWRIGHT_ENABLE_TUNE_DUMP": "YES", "TUNEWRIGHT_TUNE_DUMP_PATH": str(folder / "d")}
    command = [sys.executable, "-m", "tunewright", "run", str(folder / "model.onnx"), "-o", str(folder / "out")]
    subprocess.run(command, env=variables, capture_output=True, check=True)
    (file,) = (folder / "d").glob("*.jsonl")
    return file


@pytest.fixture
def problems(dump_file, tmp_path):
    """They are in the folder d."""
    (tmp_path / "d").mkdir()
    shutil.copy(dump_file, tmp_path / "d")
    return dump.read("d")[0]


def test_dump_tune_elsewhere_merge_use(problems, tmp_path, monkeypatch, capsys):
    assert set(problems) == set(choices(Core())) and len(problems) == 2
    assert not (tmp_path / "user").exists()

    # another machine: an empty knowledge base, no model
    there = {**os.environ, "TUNEWRIGHT_USER_DB_PATH": str(tmp_path / "there"), "TUNEWRIGHT_TUNE_RESULT_PATH": "results"}
    stored = open_user(Settings.make({"USER_DB_PATH": str(tmp_path / "there")}, Settings()))
    for budget in (6, 20, 60):  # a busy machine may need that long to start a worker
        shutil.rmtree(tmp_path / "results", ignore_errors=True)
        command = [sys.executable, "-m", "tunewright", "tune", "d", "-b", str(budget), "--report", "report.html"]
        done = subprocess.run(command, env=there, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "searching" not in done.stdout and f"of {budget} s" in done.stderr
        answered = {
            p for p in problems for m in stored.family(p.family())
            if m.key.problem == p.key() and isinstance(m, Measurement) and m.evidence.confirmed
        }  # fmt: skip
        if answered:
            break
    assert answered
    (file,) = (tmp_path / "results").glob("tune_result_*_pid*.json")
    content = json.loads(file.read_text())
    assert (content["kind"], content["state"], content["model"]) == ("problems", "finished", "d")
    assert {layer["problem"] for layer in content["layers"]} == {p.key() for p in problems}
    assert all(layer["seconds"] > 0 and layer["floor"] > 0 for layer in content["layers"])
    assert "AveragePool" in (tmp_path / "report.html").read_text()

    # every confirmed answer is what the application uses, once it is merged
    device = open_device("CPU")
    elsewhere = Tuner(Settings.make({"USER_DB_PATH": str(tmp_path / "there")}))
    expected = {p: elsewhere.choose(p, device) for p in problems}
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "there"))
    assert tools.execute(["kb", "export", "tuned.jsonl"]) == 0
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "user"))
    assert tools.execute(["kb", "import", "tuned.jsonl"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(session, "tune", lambda *_, **__: pytest.fail("nothing is searched"))
    used = choices(Core())
    assert set(used) == set(problems)
    for problem, choice in used.items():
        wanted = expected[problem]
        assert (choice.solver, choice.config, choice.origin) == (wanted.solver, wanted.config, wanted.origin)
        assert (choice.origin is Origin.USER) == (problem in answered)


def record(problems, monkeypatch, gain=1.5):
    """Sessions that find another config at once; returns their budgets by problem."""
    budgets: dict[str, float] = {}

    def tune(subject, measurer, plan, *others):
        problem, default = subject.problem, subject.default
        budgets[problem.key()] = plan.seconds
        ratio = Ratio(gain, gain * 0.9, gain * 1.1, 20)
        space = next(s for s in subject.solvers if s.id == default[0]).space(problem, subject.target)
        other = default[0], next(c for c in space if c != Config(default[1]))
        return session.Outcome(other, True, "made up", ratio)

    monkeypatch.setattr(session, "tune", tune)
    return budgets


def test_time_goes_where_most_can_be_hoped_for(problems, monkeypatch):
    budgets = record(problems, monkeypatch)
    phases = []
    weights = dict(zip(problems, (1, 9), strict=True))
    settings = Settings.make({"TUNE_RESULT_PATH": ""})
    told = lambda state: phases.append(state.phase)  # noqa: E731
    result = offline.tune_problems(open_device("CPU"), weights, TuningOptions(settings, 100.0, report=told))
    assert list(dict.fromkeys(phases)) == ["profile", "search"] and set(result.seconds) == {"profile", "search"}
    first, second = (next(la for la in result.layers if la.problem == p) for p in problems)
    hopes = first.hope, 9 * second.hope
    order = sorted(zip(hopes, (first, second), strict=True), key=lambda pair: -pair[0])
    (most, one), (_, other) = order
    assert budgets[one.problem.key()] == pytest.approx(100 * most / sum(hopes), rel=0.15)
    assert budgets[other.problem.key()] > 90 * (1 - most / sum(hopes)), "the last one gets what is left"
    assert all(layer.chosen is not None and layer.gain == 1.5 for layer in result.layers)
    assert result.after == pytest.approx(result.before / 1.5) and result.gain is None and not result.stopped


def test_what_is_known_is_left_alone_unless_asked(problems, monkeypatch):
    tuner, device = Tuner(Settings.make()), open_device("CPU")
    for problem in problems:
        default = tuner.default(problem, device)
        mine = default.solver.id, Config(default.config)
        made = evidence.measurement(
            problem,
            device.target,
            default.solver,
            mine[1],
            evidence.ContestSamples([1e-3, 2e-3], 0.0, Ratio.one(), Ratio.one(), True, mine),
            Regime("layer", 4, 100),
            {},
        )
        tuner.user.add([made])
    budgets = record(problems, monkeypatch)
    result = Core().tune_problems(["d"], budget=5.0)
    assert {layer.skipped for layer in result.layers} == {"it was tuned before"} and not budgets
    assert all(layer.seconds == pytest.approx(1.5e-3) for layer in result.layers)
    Core().tune_problems("d", budget=100.0, again=True)
    assert set(budgets) == {p.key() for p in problems}


def test_a_stop_keeps_what_was_found(problems, monkeypatch):
    budgets = record(problems, monkeypatch)
    result = Core().tune_problems("d", budget=60.0, stop=lambda: bool(budgets))
    assert result.stopped and len(budgets) == 1
    assert sorted(layer.skipped for layer in result.layers) == ["", "stopped"]


def test_dumps_of_several_processes_count(problems, tmp_path):
    (file,) = (tmp_path / "d").glob("*.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    (tmp_path / "d" / "other.jsonl").write_text(lines[0] + "broken\n")
    counts, reasons = offline.read(["d", file])
    assert [counts[p] for p in problems] == [3, 2]
    assert len(reasons) == 1 and "other.jsonl, line 2" in reasons[0]


def test_mistakes(tmp_path, capsys):
    onnx.save(model(), "model.onnx")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "json.txt").write_text('{"a": 1}\n')
    (tmp_path / "none").mkdir()
    for arguments, texts in (
        (["model.onnx", "empty.jsonl"], ["model.onnx", "one after the other"]),
        (["empty.jsonl"], ["empty.jsonl: holds no problem", "ENABLE_TUNE_DUMP"]),
        (["json.txt"], ["json.txt", "line 1", "members"]),
        (["none"], ["none", "holds no model", "no dump of problems (.jsonl)"]),
        (["nowhere.jsonl"], ["nowhere.jsonl", "no such file"]),
        (["nowhere.onnx"], ["nowhere.onnx", "No such file"]),
        (["empty.jsonl", "--shape", "x=1"], ["--shape", "apply to models, not to dumps"]),
        (["model.onnx", "--report", "no/where.html"], ["where.html", "there is no folder"]),
    ):
        assert tools.execute(["tune", *arguments]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and all(text in err for text in texts), err

"""Tuning as a user meets it: `compile_model` with document 002's variables, TUNING_CREATE and TUNING_FILE."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from helpers.tuning_noise import Machine
from tunewright import Core
from tunewright.knowledge import open_databases
from tunewright.plugins.single import open_device
from tunewright.settings import Settings
from tunewright.tuning import session
from tunewright.tuning.tuner import Origin, Tuner

pytestmark = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")


def model(width=48):
    rng = np.random.default_rng(0)
    w = numpy_helper.from_array(rng.standard_normal((32, width), np.float32), "w")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, 32])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [6, width])
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    return helper.make_model(
        helper.make_graph([node], "g", [x], [y], [w]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )


X = {"x": np.random.default_rng(1).standard_normal((6, 32), np.float32)}


def choice(compiled):
    outputs = compiled(X)
    (plan,) = compiled.program.plans
    (step,) = [s for s in plan.steps if s.choice is not None]
    return step.choice, outputs


def tuned(folder):
    database = open_databases.open_user(Settings.make({"USER_DB_PATH": str(folder)}, Settings()))
    return [e for e in database.events() if e.action == "tuned"]


@pytest.fixture
def variables(monkeypatch, tmp_path):
    """Document 002's variables, in the environment alone."""

    def set_(**values):
        for name in ("FIND_ENFORCE", "FIND_MODE", "USER_DB_PATH", "SYSTEM_DB_PATH"):
            monkeypatch.delenv(f"TUNEWRIGHT_{name}", raising=False)
        monkeypatch.setenv("TUNEWRIGHT_TUNE_SECONDS", "0.6")
        for name, value in values.items():
            monkeypatch.setenv(f"TUNEWRIGHT_{name}", str(value))

    return set_


@pytest.fixture
def calm(monkeypatch):
    """Sessions find the same at any hour: times are made up, twice as fast as the default, by a clock of their own.

    On a busy machine a session may rightly leave it open who is faster, and then the next one tunes again.
    """
    real = session.tune

    def tune(subject, measurer, plan, earlier, hooks):
        made_up = Machine(lambda *candidate: 0.002 if candidate == subject.default else 0.001)
        plan, hooks = replace(plan, seconds=20.0), replace(hooks, clock=made_up.clock)
        return real(subject, made_up, plan, earlier, hooks)

    monkeypatch.setattr(session, "tune", tune)


@pytest.mark.usefixtures("calm")
def test_incremental_and_exhaustive_tuning_by_redirecting_the_system_and_after_it(variables, tmp_path):
    variables(FIND_ENFORCE=3, USER_DB_PATH=tmp_path, SYSTEM_DB_PATH=tmp_path)
    first, want = choice(Core().compile_model(model()))
    assert first.origin is Origin.SEARCH and len(tuned(tmp_path)) == 1
    again, _ = choice(Core().compile_model(model()))
    assert again.origin is Origin.USER and len(tuned(tmp_path)) == 1, "each configuration is tuned exactly once"
    choice(Core().compile_model(model(56)))
    assert len(tuned(tmp_path)) == 2, "a new shape is"

    variables(USER_DB_PATH=tmp_path)  # post tuning: the others are unset
    after, outputs = choice(Core().compile_model(model()))
    assert (after.origin, after.solver, after.config) == (Origin.USER, again.solver, again.config)
    assert np.allclose(outputs["y"], want["y"], atol=1e-5) and len(tuned(tmp_path)) == 2


def test_exhaustive_tuning_tunes_what_is_known_too(variables, tmp_path):
    variables(FIND_ENFORCE=4, USER_DB_PATH=tmp_path)
    for count in (1, 2):
        choice(Core().compile_model(model()))
        assert len(tuned(tmp_path)) == count


def test_the_default_never_searches(variables, tmp_path):
    variables(USER_DB_PATH=tmp_path)
    found, _ = choice(Core().compile_model(model()))
    assert found.origin is Origin.DEFAULT and found.nearest == "nothing is known of problems like this one"
    assert not list(tmp_path.iterdir()), "a reader creates nothing"


@pytest.mark.usefixtures("calm")
def test_a_model_that_runs_may_tune_a_new_shape_and_entries_can_be_deleted(tmp_path):
    core = Core({"USER_DB_PATH": str(tmp_path), "TUNE_SECONDS": "0.6"})
    core.set_tuning_policy(mode="TUNING_CREATE")
    assert choice(core.compile_model(model()))[0].origin is Origin.SEARCH
    database = open_databases.open_user(core.settings)
    assert [r for r in database if r.kind == "measurement"]
    core.set_tuning_policy(5)
    assert choice(core.compile_model(model()))[0].origin is Origin.DEFAULT
    assert not [r for r in database if r.kind == "measurement"]
    assert [e.action for e in database.events()] == ["tuned", "deleted"]


@pytest.mark.usefixtures("calm")
def test_a_tuning_file_is_written_and_stands_on_top(tmp_path, caplog):
    file = tmp_path / "tuned.json"
    core = Core({"TUNING_FILE": str(file), "USER_DB_PATH": str(tmp_path / "kb"), "TUNE_SECONDS": "0.6"})
    created, _ = choice(core.compile_model(model(), config={"TUNING_MODE": "TUNING_CREATE"}))
    (units,) = (k for k in json.loads(file.read_text()) if k.isdigit())
    assert int(units) == open_device("CPU").target.units
    used, _ = choice(core.compile_model(model(), config={"USER_DB_PATH": str(tmp_path / "empty")}))
    assert (used.origin, used.solver, used.config) == (Origin.FILE, created.solver, created.config)


def test_a_tuning_file_that_cannot_be_written_stops_nothing(tmp_path, caplog, calm):
    file = tmp_path / "no" / "tuned.json"
    core = Core({"TUNING_FILE": str(file), "USER_DB_PATH": str(tmp_path / "kb"), "TUNING_MODE": "TUNING_CREATE"})
    with caplog.at_level(logging.WARNING, "tunewright"):
        assert choice(core.compile_model(model()))[0].origin is Origin.SEARCH
    assert str(file) in caplog.text


def test_what_wins_over_a_wish_says_so_once(tmp_path, caplog):
    core = Core({"USER_DB_PATH": str(tmp_path), "FIND_ENFORCE": "SEARCH", "TUNING_MODE": "TUNING_DISABLED"})
    with caplog.at_level(logging.WARNING, "tunewright"):
        core.compile_model(model())
        core.compile_model(model())
    assert [r.getMessage() for r in caplog.records] == [
        "TUNING_DISABLED wins over FIND_ENFORCE 3 (SEARCH): nothing is tuned"
    ]
    assert not tuned(tmp_path)


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    (tmp_path / "kb").write_text("a file where the folder should be")
    core = Core({"USER_DB_PATH": str(tmp_path / "kb"), "TUNING_MODE": "TUNING_CREATE", "TUNE_SECONDS": "0.6"})
    with caplog.at_level(logging.WARNING, "tunewright"):
        _, outputs = choice(core.compile_model(model()))
    assert np.isfinite(outputs["y"]).all()
    assert any("kb" in r.getMessage() for r in caplog.records)
    assert (tmp_path / "kb").read_text() == "a file where the folder should be"


def test_the_tuner_is_told_where_to_look():
    names = [layer.name for layer in Tuner(Settings()).lookup.layers]
    assert names == [Origin.SEARCH.value, Origin.USER.value, Origin.SYSTEM.value]

"""The heuristic on the processor: what it picks runs and is right, and `explain` tells."""

import dataclasses
import json

import numpy as np
import onnx
import pytest

from helpers.heuristic_made import by_column, heuristic, section
from tunewright import Core, tools
from tunewright.heuristic import file as heuristic_file
from tunewright.heuristic.features import Column
from tunewright.heuristic.trees import Listed
from tunewright.plugins.single import open_device
from tunewright.runtime.insight.explain import explain
from tunewright.search.space import Config
from tunewright.settings import Settings
from tunewright.solvers.base import Problem
from tunewright.tuning.tuner import Origin, Tuner

helper = onnx.helper


def product(n, k=32, m=24):
    """A model that multiplies by a constant."""
    rng = np.random.default_rng(n)
    weights = onnx.numpy_helper.from_array(rng.standard_normal((k, m)).astype(np.float32), "w")
    x, y = (helper.make_tensor_value_info(name, 1, dims) for name, dims in (("x", [n, k]), ("y", [n, m])))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"], name="product")], "g", [x], [y], [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


def posed(model, core):
    """The one problem of a model, and the device that it was posed on."""
    compiled = core.compile_model(model)
    (plan,) = compiled.program.plans
    (step,) = [s for s in plan.steps if s.choice is not None]
    return Problem.of(step.node), plan.device, step.choice


@pytest.fixture
def places(tmp_path):
    return {"USER_DB_PATH": str(tmp_path / "user"), "SYSTEM_DB_PATH": str(tmp_path / "system"), "HEURISTIC_PATH": ""}


def test_a_pick_runs_and_is_told(tmp_path, places):
    model, x = product(48), np.random.default_rng(0).standard_normal((48, 32)).astype(np.float32)
    problem, device, default = posed(model, Core(places))
    space = default.solver.space(problem, device.target)
    other = next(c for c in space if c != Config(default.config))
    who = default.solver
    listed = [Listed(who.id, who.version, Config(c)) for c in (default.config, other)]
    bare = section(problem, device.target, listed, [])
    # the first parameter in which the two differ
    for column in bare.columns:
        low, high = sorted(column.of(who.id, c.config) for c in listed)
        if low < high:
            is_low = column.of(who.id, other) == low
            tree = by_column(bare, column, ((low + high) / 2, float(is_low)), (0.0, float(not is_low)))
            break
    path = tmp_path / "heuristic.json"
    path.write_text(heuristic_file.dump(heuristic(section(problem, device.target, listed, [tree]))))
    core = Core({**places, "HEURISTIC_PATH": str(path)})
    compiled = core.compile_model(model)
    expected = Core(places).compile_model(model)({"x": x})["y"]
    np.testing.assert_allclose(compiled({"x": x})["y"], expected, rtol=1e-5, atol=1e-5)
    layer = next(each for each in explain(compiled) if each.solver)
    assert (layer.solver, layer.config, layer.origin) == (who.id, other, "heuristic")
    assert layer.heuristic == "predicted 2.00 times as fast as the default" and "nothing is known" in layer.nearest
    assert layer.to_json()["heuristic"] == layer.heuristic
    # far away it abstains, and that is told too
    far = next(each for each in explain(core.compile_model(product(48 << 12))) if each.solver)
    assert far.origin == "default" and far.heuristic.startswith("far from its data")


def test_columns_are_found_by_name():
    assert Column("size", "rows").of("any", {"rows": 7}) == 3.0


@pytest.mark.soak
def test_trained_on_real_measurements(tmp_path, places, capsys):
    """Tunes small products for seconds each, trains, and asks about others in between and far away."""
    pytest.importorskip("sklearn", reason="training needs the extra train")
    from tunewright.heuristic.train import examples, train
    from tunewright.solvers.base import solvers

    device = open_device("CPU")
    settings = Settings.make(places, Settings())
    tuner = Tuner(settings)
    sizes = [(n, k, m) for n in (64, 256) for k in (64, 256) for m in (64, 256)]
    for n, k, m in sizes:
        problem, _, _ = posed(product(n, k, m), Core(places))
        for _ in range(20):  # on a busy machine a few seconds may not be enough
            default = tuner.default(problem, device)
            tuner.tune(problem, device, default, tuner.known(problem, device, default), seconds=3)
            mine = [s for s in tuner.user.surveys(problem.family()) if s.key.problem == problem.key()]
            if len({(one.solver, one.config) for s in mine for one in s.seen}) >= 3:
                break
    known, _ = examples(tuner.user, solvers())
    assert len(known) == len(sizes) and sum(len(e.gains) for e in known) > 2 * len(sizes)
    given = heuristic_file.parse(heuristic_file.dump(train(known, {})))
    fresh = Tuner(dataclasses.replace(settings, user_db_path=str(tmp_path / "fresh")), heuristic=given)
    inside = fresh.choose(posed(product(128, 128, 128), Core(places))[0], device)
    assert inside.advice is not None and not inside.advice.abstains
    assert inside.origin is (Origin.HEURISTIC if inside.advice.picks else Origin.DEFAULT)
    far = fresh.choose(posed(product(8192, 4096, 4096), Core(places))[0], device)
    assert far.advice is not None and far.advice.abstains and far.origin is Origin.DEFAULT
    # the command measures what nobody knows, and keeps it
    before = len(list(tuner.user))
    options = [f"--config={name}={value}" for name, value in places.items()]
    assert tools.execute(["kb", "train", "--measure", "5", "--json", "--out", str(tmp_path / "h.json"), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert heuristic_file.read(tmp_path / "h.json").about["problems"] == len(sizes) == report["problems"]
    assert len(list(tuner.user)) >= before and report["examples"]["records"] == len(list(tuner.user))

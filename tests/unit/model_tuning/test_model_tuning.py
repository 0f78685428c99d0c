"""Tuning a whole model: what is searched, what the network decides, what is taken back, what is written down."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tunewright import Core, DeviceError, InputError
from tunewright.ir.types import DType
from tunewright.knowledge.record import Ratio
from tunewright.measure.base import Regime
from tunewright.model_tuning import model as whole
from tunewright.model_tuning.layers import TuningOptions
from tunewright.ops.tolerance import TOLERANCES
from tunewright.plugins.batching import streams
from tunewright.plugins.single import SingleDevice, open_device
from tunewright.search.space import Config
from tunewright.settings import Settings
from tunewright.tools import execute
from tunewright.tools.tune.command import parse_time
from tunewright.tuning import evidence, session
from tunewright.tuning.result_file import SCHEMA
from tunewright.tuning.tuner import Origin, Tuner

pytestmark = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")


def model():
    """Two products of the same shape, and one of another."""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.standard_normal(shape, np.float32) / 16, name)
        for name, shape in (("a", (256, 256)), ("b", (256, 256)), ("c", (256, 96)))
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 256])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [64, 96])
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["p"], name="first"),
        helper.make_node("MatMul", ["p", "b"], ["q"], name="second"),
        helper.make_node("MatMul", ["q", "c"], ["y"], name="third"),
    ]
    return helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], weights), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )


X = {"x": np.random.default_rng(1).standard_normal((64, 256), np.float32)}


@pytest.fixture
def core(tmp_path):
    return Core({"USER_DB_PATH": str(tmp_path / "kb")})


def tuning(core, budget=3.0, **options):
    plugin = SingleDevice(open_device("CPU"))
    given = TuningOptions(core.settings, budget, **options)
    return whole.ModelTuning(plugin, core.read_model(model()), X, given)


def test_layers_are_problems_with_the_time_of_all_their_nodes(core):
    run = tuning(core)
    run.profile()
    layers = {tuple(layer.nodes): layer for layer in run.layers}
    assert set(layers) == {("first", "second"), ("third",)}
    assert all(layer.seconds > 0 for layer in run.layers)
    assert run.layers == sorted(run.layers, key=lambda layer: -layer.seconds)


def test_nodes_of_one_name_are_layers_of_their_own(core):
    same = model()
    for node in same.graph.node:
        node.name = "same"
    plugin = SingleDevice(open_device("CPU"))
    run = whole.ModelTuning(plugin, core.read_model(same), X, TuningOptions(core.settings, 3.0))
    run.profile()
    assert len(run.layers) == 2 and all(layer.seconds > 0 for layer in run.layers)


def test_a_model_is_tuned_within_its_time_and_used_by_the_next_load(core):
    begin = time.monotonic()
    tuning(core).profile()
    phases, budget = [], max(5.0, 10 * (time.monotonic() - begin))  # on a busy machine a profile takes seconds
    begin = time.monotonic()
    result = core.tune(model(), X, "CPU", budget, report=lambda state: phases.append(state.phase))
    assert time.monotonic() - begin < budget * 1.1 + 15, "compiling a candidate may take long on a busy machine"
    assert list(dict.fromkeys(phases))[:2] == ["profile", "search"]
    assert any(layer.outcome is not None for layer in result.layers) and result.before > 0
    assert result.error <= 1e-4
    compiled = core.compile_model(model())
    want = Core({"USER_DB_PATH": "/nonexistent"}).compile_model(model())(X)["y"]
    assert np.allclose(compiled(X)["y"], want, atol=1e-3)


def test_what_is_known_is_left_alone_unless_asked(core):
    run = tuning(core)
    run.profile()
    layer = run.layers[0]
    default = Tuner(core.settings).default(layer.problem, layer.device)
    record(core, layer, (default.solver.id, default.config), Ratio.one())
    again = tuning(core)
    again.profile()
    assert not again._worthwhile(again.layers[0]) and again.layers[0].skipped == "it was tuned before"
    forced = tuning(core, again=True)
    forced.profile()
    assert forced._worthwhile(forced.layers[0])


def record(core, layer, candidate, gain, confirmed=True):
    tuner = Tuner(core.settings)
    solver = next(s for s in tuner.candidates if s.id == candidate[0])
    default = (layer.choice.solver.id, layer.choice.config)
    made = evidence.measurement(
        layer.problem,
        layer.device.target,
        solver,
        candidate[1],
        evidence.ContestSamples([1e-3, 2e-3], 0.0, gain, Ratio.one(), confirmed, default),
        Regime("cold", 4, 100),
        {},
    )
    tuner.user.add([made])
    return made


def rival(layer):
    """Another config of the solver that the layer uses."""
    solver, target = layer.choice.solver, layer.device.target
    space = solver.space(layer.problem, target)
    config = next(c for c in space if c != Config(layer.choice.config))
    return solver.id, config


def prepared(core, monkeypatch, seconds):
    """A tuning whose search has found a candidate for each layer; the network says what ``seconds`` says."""
    run = tuning(core, budget=30.0)
    run.profile()
    for layer in run.layers:
        made = record(core, layer, rival(layer), Ratio(1.3, 1.2, 1.4, 30))
        layer.outcome = session.Outcome(rival(layer), True, "made up", Ratio(1.3, 1.2, 1.4, 30), records=(made,))

    def times(request, values):
        pins = request.model.env.tuner.pins
        found = {}
        for layer in run.layers:
            new = pins[layer.problem.key()] != layer.present
            found[layer.problem.key()] = seconds(layer, new) * (1 + 0.01 * run.rng.random())
        return found

    monkeypatch.setattr(whole, "times", times)
    monkeypatch.setattr(whole, "NETWORK_ROUNDS", 20)
    return run


def answers(core, layer):
    tuner = Tuner(core.settings)
    return tuner.choose(layer.problem, layer.device)


def test_the_network_decides_layer_by_layer(core, monkeypatch):
    run = prepared(core, monkeypatch, lambda layer, new: (0.5 if len(layer.nodes) == 2 else 2.0) if new else 1.0)
    run.network()
    pair, single = sorted(run.layers, key=lambda layer: -len(layer.nodes))
    assert pair.chosen == rival(pair) and pair.gain == pytest.approx(2.0, rel=0.05)
    assert single.chosen is None and single.network[rival(single)].high < 1
    used = answers(core, pair)
    assert (used.origin, used.measurement.evidence.regime) == (Origin.USER, "network")
    used = answers(core, single)
    assert (used.solver.id, used.config) == single.present, "what the network contradicts does not answer any more"
    assert used.origin is Origin.USER, "that the default is best is an answer"


def test_the_network_without_changes_runs_what_it_ran_before(core, monkeypatch):
    """What a search has found is in the knowledge base by then, and must not answer for the old network."""
    run = prepared(core, monkeypatch, lambda layer, new: 0.5 if new else 1.0)
    made = []
    compiling = run.compile
    monkeypatch.setattr(run, "compile", lambda pins, counters: made.append(compiling(pins, counters)) or made[-1])
    run.network()
    monkeypatch.setattr(run, "_duel", lambda old, new: ([1.0] * 20, [0.5] * 20))
    run.whole()
    used = [{s.choice.config for p in r.model.program.plans for s in p.steps if s.choice is not None} for r in made]
    before, after = ({c[1] for c in cs} for cs in ([x.present for x in run.layers], [rival(x) for x in run.layers]))
    assert used == [before, after, before, after], "default, rival; then old, new"


def test_what_was_searched_but_not_decided_is_decided_the_next_time(core, monkeypatch):
    first = tuning(core)
    first.profile()
    for layer in first.layers:
        record(core, layer, rival(layer), Ratio(1.3, 1.2, 1.4, 30))
    run = tuning(core, budget=30.0)
    run.profile()
    run.search()
    assert all(layer.skipped == "it was tuned before" for layer in run.layers)
    entrants = [run._entrants(layer) for layer in run.layers]
    assert all(len(e) == 2 and e[1] == layer.present for e, layer in zip(entrants, run.layers, strict=True))
    mine = {layer.problem.key(): layer.present for layer in run.layers}

    def times(request, values):
        faster = request.model.env.tuner.pins == mine
        return {key: (0.5 if faster else 1.0) * (1 + 0.01 * run.rng.random()) for key in mine}

    with monkeypatch.context() as patched:
        patched.setattr(whole, "times", times)
        run.network()
    assert all(layer.chosen is None for layer in run.layers), "the network agrees with what they use"
    run = tuning(core)
    run.profile()
    assert all(run._entrants(layer) == [layer.present] for layer in run.layers), "once is enough"


def test_what_a_search_found_before_it_was_stopped_runs_in_the_network_the_next_time(core):
    first = tuning(core)
    first.profile()
    seeming, slower = first.layers
    record(core, seeming, rival(seeming), Ratio(1.3, 0.9, 1.4, 3), confirmed=False)
    record(core, slower, rival(slower), Ratio(0.8, 0.7, 0.9, 3), confirmed=False)
    run = tuning(core)
    run.profile()
    entrants = {layer.problem.key(): run._entrants(layer) for layer in run.layers}
    assert entrants[seeming.problem.key()] == [seeming.present, rival(seeming)]
    assert entrants[slower.problem.key()] == [slower.present]


def test_changes_that_do_not_pay_in_the_whole_network_are_taken_back(core, monkeypatch):
    run = prepared(core, monkeypatch, lambda layer, new: 0.5 if new else 1.0)
    run.network()
    assert all(layer.chosen is not None for layer in run.layers)
    slower = [1.0 + k / 100 for k in range(9)], [1.5 + k / 90 for k in range(9)]
    monkeypatch.setattr(run, "_duel", lambda old, new: slower)
    result = run.whole()
    assert len(result.undone) == 2 and all(layer.chosen is None for layer in run.layers) and result.gain is None
    assert all(answers(core, layer).origin is Origin.DEFAULT for layer in run.layers)


def test_an_interrupt_while_networks_are_compared_keeps_what_they_decided(core, monkeypatch):
    run = prepared(core, monkeypatch, lambda layer, new: 0.5 if new else 1.0)
    run.network()

    def interrupted(old, new):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_duel", interrupted)
    result = run.whole()
    assert result.stopped and result.gain is None and not result.undone
    assert all(layer.chosen == rival(layer) for layer in run.layers)
    assert result.after == pytest.approx(result.before / 2, rel=0.05), "what the layers promise"
    assert all(answers(core, layer).origin is Origin.USER for layer in run.layers)


def test_a_comparison_that_is_stopped_says_nothing(core, monkeypatch):
    wished = []
    run = prepared(core, monkeypatch, lambda layer, new: 0.5 if new else 1.0)
    run._stop = lambda: bool(wished)
    run.network()
    asked = run._compare
    monkeypatch.setattr(run, "_compare", lambda *given: wished.append(0) or asked(*given))
    result = run.whole()
    assert result.stopped and result.gain is None and all(layer.chosen is not None for layer in run.layers)


def test_wrong_outputs_are_taken_back_also_when_it_is_stopped(core, monkeypatch):
    run = prepared(core, monkeypatch, lambda layer, new: 0.5 if new else 1.0)
    run.network()
    monkeypatch.setattr(run, "_compare", lambda *given: setattr(run, "stopped", True) or (False, 1.0))
    result = run.whole()
    assert len(result.undone) == 2 and all(layer.chosen is None for layer in run.layers)


def test_the_network_decides_nothing_when_it_is_stopped_early(core, monkeypatch):
    run = prepared(core, monkeypatch, lambda layer, new: 0.5 if new else 1.0)
    laps = []
    run._stop = lambda: len(laps) > 3
    monkeypatch.setattr(run, "tell", lambda phase: laps.append(phase))
    run.network()
    assert 4 <= len(laps) < 6 and not any(layer.network or layer.chosen for layer in run.layers)


def test_networks_that_draw_random_numbers_are_not_taken_for_wrong_ones(core):
    class Drawn:
        def __init__(self, *values):
            self.values = list(values)

        def infer(self, values):
            return {"y": np.full(4, self.values.pop(0), np.float32)}

    run = tuning(core)
    assert run._compare(Drawn(1, 1), Drawn(1), 0.0) == (True, 0.0)
    assert run._compare(Drawn(1, 1), Drawn(2), 0.0)[0] is False
    assert run._compare(Drawn(1, 3), Drawn(2), 0.0)[0] is True
    # outputs of single precision, computed in half precision
    assert run._compare(Drawn(1, 1), Drawn(1.005), 0.0)[0] is False
    assert run._compare(Drawn(1, 1), Drawn(1.005), TOLERANCES[DType.FLOAT16].network)[0] is True


def test_an_interrupt_at_the_start_is_written_down(core, monkeypatch, tmp_path):
    def interrupted(self, pins, counters):
        raise KeyboardInterrupt

    monkeypatch.setattr(whole.ModelTuning, "compile", interrupted)
    result = core.tune(model(), X, "CPU", 5.0, config={"TUNE_RESULT_PATH": str(tmp_path)})
    assert result.stopped and json.loads(result.path.read_text())["state"] == "stopped"


def test_a_compiler_that_the_interrupt_hits_is_no_failure(core, monkeypatch):
    def failing(self, pins, counters):
        raise DeviceError("CPU cannot compile a kernel")

    monkeypatch.setattr(whole.ModelTuning, "compile", failing)
    assert core.tune(model(), X, "CPU", 5.0, config={"TUNE_RESULT_PATH": ""}, stop=lambda: True).stopped
    with pytest.raises(DeviceError):
        core.tune(model(), X, "CPU", 5.0, config={"TUNE_RESULT_PATH": ""})


def test_mistakes_are_told_before_anything_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(model(), "m.onnx")
    Path("file").write_text("")
    base = ["tune", "m.onnx", "-b", "3"]
    kb = ["-c", "USER_DB_PATH=kb"]
    for given, said in (
        ([*base, *kb, "--strategy", "foo"], "AUTO_TUNE_MODE = 'foo' is unknown"),
        ([*base, *kb, "-c", "AUTO_TUNE_MODE=bar"], "AUTO_TUNE_MODE = 'bar' is unknown"),
        ([*base, *kb, "-c", "AUTO_TUNE_MODE=NO_TUNE"], "nothing is tuned"),
        ([*base, "-c", "USER_DB_PATH=file/kb"], "cannot be written"),
    ):
        assert execute(given) == 2
        assert said in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "m.onnx"]


def test_stopping_keeps_what_was_found(core):
    calls = []

    def stop():
        calls.append(0)
        return len(calls) > 20

    result = core.tune(model(), X, "CPU", 60.0, stop=stop)
    assert result.stopped and result.layers


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("60s", 60), ("1.5m", 90), ("1h", 3600), (" 5 M ", 300)])
def test_times(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "soon", "1d", "1e3", "s"])
def test_what_is_no_time(text):
    with pytest.raises(InputError, match=r"--budget.*90, 60s, 5m or 1h"):
        parse_time(text)


def test_the_command_writes_its_file_and_says_what_came_of_it(tmp_path, capsys, monkeypatch):
    onnx.save(model(), tmp_path / "m.onnx")
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "kb"))
    arguments = ["tune", str(tmp_path / "m.onnx"), "-b", "6", "--result", str(tmp_path)]
    assert execute(arguments) == 0
    captured = capsys.readouterr()
    assert "times as fast" in captured.out or "nothing " in captured.out
    (file,) = tmp_path.glob("tune_result_*_pid*.json")
    content = json.loads(file.read_text())
    assert content["schema"] == SCHEMA and content["state"] == "finished" and len(content["layers"]) == 2
    assert any(trial["status"] == "OK" for layer in content["layers"] for trial in layer["trials"])
    assert not list(tmp_path.glob("*.unfinished"))
    assert execute(["tune", str(tmp_path / "m.onnx"), "-b", "soon"]) == 2
    assert "is not a time" in capsys.readouterr().err


def test_ctrl_c_ends_soon_and_loses_nothing(tmp_path):
    onnx.save(model(), tmp_path / "m.onnx")
    # On a machine that is busy a step may not come to its end within the two seconds that it has.
    patient = "from tunewright import tools; tools.interrupts.PATIENCE = 60; tools.main()"
    command = [sys.executable, "-c", patient, "tune", "m.onnx", "-b", "5m", "--result", "."]
    settings = ["-c", f"USER_DB_PATH={tmp_path / 'kb'}"]
    process = subprocess.Popen([*command, *settings], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("tune_result_*.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(6)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert b"stopped early" in out and b"Traceback" not in err
    (file,) = tmp_path.glob("tune_result_*.json")
    assert json.loads(file.read_text())["state"] == "stopped"


@pytest.mark.parametrize(("step", "seconds", "code", "said"), [
    ("while not stop(): time.sleep(0.01)", (60, 60), 0, ""),
    ("time.sleep(60)", (0.2, 60), 3, ""),
    # one that does not come back to the interpreter, as a compiler
    ("hashlib.pbkdf2_hmac('sha512', b'', b'', 500_000_000)", (0.2, 0.2), 130,
     "tunewright: interrupted; what was stored is kept"),
])  # fmt: skip
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_wish_to_stop_is_heard_whatever_runs(number, step, seconds, code, said):
    script = f"""
import hashlib, os, signal, threading, time
from tunewright.tools.shared import interrupts
interrupts.PATIENCE, interrupts.GRACE = {seconds}
try:
    with interrupts.interruptible() as stop:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.{number})).start()
        {step}
except KeyboardInterrupt:
    raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.strip()) == (code, said)


def test_settings_of_the_tuning_itself_search_nothing(core):
    run = tuning(core)
    assert run.settings.tuning_mode == "TUNING_USE_EXISTING" and run.settings.find_enforce == "1"
    assert isinstance(run.settings, Settings)


@pytest.mark.parametrize("budget", [0, -1.0, float("nan"), float("inf"), None, "60s"])
def test_what_is_no_budget(core, budget, tmp_path):
    for call in (core.tune, core.tune_problems):
        given = (model(), X) if call == core.tune else ([],)
        with pytest.raises(InputError, match="is not a number of seconds above 0"):
            call(*given, "CPU", budget, config={"TUNE_RESULT_PATH": str(tmp_path)})
    assert not list(tmp_path.glob("tune_result*")), "nothing is written for nothing"


@pytest.mark.skipif(open_device("CPU").target.units < 2, reason="needs two cores")
def test_kernels_are_tuned_for_the_threads_of_the_streams_that_a_load_has(core):
    """As many streams as are asked for, or as were measured to be best; they share the threads."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", values[:1], values[1:])
    loaded, every = core.read_model(helper.make_model(graph, ir_version=8)), open_device("CPU")
    core.set_property({"TUNE_RESULT_PATH": "", "PERFORMANCE_HINT": "THROUGHPUT"})

    def units(**config):
        x = {"x": np.ones(4, np.float32)}
        found = core.tune(loaded, x, budget=1.0, config=config, stop=lambda: True).written["where"]["units"]
        made = core.compile_model(loaded, "CPU", config)
        assert found == made.env.device.target.units
        return found

    assert units() == units(NUM_STREAMS=every.target.units) == 1
    streams.keep(loaded, every, core.settings, streams.ServingPoint(1, 1), {})
    assert units() == units(PERFORMANCE_HINT="LATENCY") == every.target.units

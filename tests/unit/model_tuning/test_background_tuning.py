"""Background tuning: swaps beside requests, rollbacks, the helper process, and that nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tunewright
from tunewright import Core
from tunewright.errors import DeviceError, InputError, ModelError, SettingsError
from tunewright.knowledge import open_databases
from tunewright.knowledge.claims import Claims
from tunewright.knowledge.record import Ratio
from tunewright.measure.base import Regime
from tunewright.measure.request_activity import ActivityGate
from tunewright.model_tuning import background, background_swap
from tunewright.model_tuning.background_swap import TrialVerdict, Winner
from tunewright.plugins.single import open_device
from tunewright.runtime.insight.background import KernelSwap
from tunewright.runtime.plans import program as programs
from tunewright.runtime.requests.plan_trial import PlanTrial
from tunewright.search.space import Config
from tunewright.settings import Settings, child_environment
from tunewright.solvers.base import solvers
from tunewright.tuning.evidence import ContestSamples, measurement

pytestmark = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")
#: seconds for what takes one or two on a quiet machine
LONG = 180.0


def model(count=2, rows=16):
    """Poolings of as many kinds."""
    dims = [1, 8, rows, 16]
    types = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in ("v0", f"v{count}")]
    nodes = [
        helper.make_node(
            "MaxPool", [f"v{n}"], [f"v{n + 1}"], kernel_shape=[2 * n + 3] * 2, pads=[n + 1] * 4, name=f"p{n}"
        )
        for n in range(count)
    ]  # fmt: skip
    graph = helper.make_graph(nodes, "g", types[:1], types[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def values(rows=16, seed=0):
    return {"v0": np.random.default_rng(seed).standard_normal((1, 8, rows, 16), np.float32)}


def settings(tmp_path, **others):
    (tmp_path / "nothing").mkdir(exist_ok=True)
    return {
        "USER_DB_PATH": str(tmp_path / "kb"), "SYSTEM_DB_PATH": str(tmp_path / "nothing"), "HEURISTIC_PATH": "",
        "BACKGROUND_PRIORITY": "NORMAL", "BACKGROUND_DUTY": "100", "TUNE_SECONDS": "2", "TUNE_RESULT_PATH": "",
        **others,
    }  # fmt: skip


def compiled(tmp_path, given=None, **others):
    return Core(settings(tmp_path, **others)).compile_model(given or model())


def types_of(made):
    return tuple(value.type for value in made.graph.inputs)


def winner(made, types, name="p0"):
    """Another kernel for a layer, as a search might have found it: another config of its solver."""
    plan = background_swap.plan_of(made, types)
    layers = background_swap.layers_of(made, types, plan)
    for layer in layers.values():
        solver = next(s for s in solvers() if s.id == layer.present[0])
        space = solver.space(layer.problem, layer.device.target)
        others = [Config(c) for c in space if Config(c) != layer.present[1]]
        if others:
            return Winner(layer, (solver.id, others[0]))
    raise AssertionError("no layer has a choice")


def store(made, one, gain):
    """Records of a winner and of the default that it beat by itself."""
    tuner, problem, target = made.env.tuner, one.layer.problem, one.layer.device.target
    default = tuner.default(problem, one.layer.device)
    first = (default.solver.id, Config(default.config))
    for who, ratio in ((first, Ratio.one()), (one.candidate, gain)):
        solver = next(s for s in tuner.candidates if s.id == who[0])
        how = Ratio.one(), True, first
        record = measurement(
            problem, target, solver, who[1], ContestSamples([1e-5] * 8, 0.0, ratio, *how), Regime("layer", 1, 64), {}
        )
        tuner.user.add([record])
    return first


def kernels(made):
    (plan,) = made.program.plans
    return {(s.choice.solver.id, Config(s.choice.config)) for s in plan.steps if s.choice is not None}


def decided(monkeypatch, slower):
    """Every new plan takes so many times as long as the old one, on a clock of our own."""
    monkeypatch.setattr(
        PlanTrial, "tell", lambda self, n, s: self.told.append((n, slower if self.is_new(n) else 1.0 + n % 7 * 1e-3))
    )


# ---- swaps ----------------------------------------------------------------------------------------------------------


def test_requests_take_both_plans_in_turns_and_then_the_new_one(tmp_path, monkeypatch):
    made = compiled(tmp_path)
    request, types = made.create_infer_request(), types_of(made)
    expected = request.infer(values())["v2"].copy()
    decided(monkeypatch, 0.8)
    one = winner(made, types)
    swap = background_swap.begin(made, types, [one])
    assert any(plan is swap.trial.new for plan, _ in request.executor.frames()), "its memory is made beforehand"
    found = None
    for _ in range(200):
        np.testing.assert_array_equal(request.infer(values())["v2"], expected)
        np.testing.assert_array_equal(made(values())["v2"], expected)
        if (found := swap.jury.verdict(swap.trial)) is not None:
            break
    assert found is not None and found[0] is TrialVerdict.FASTER
    assert not background_swap.end(made, swap, *found)
    assert one.candidate in kernels(made) and made.trial is None
    np.testing.assert_array_equal(request.infer(values())["v2"], expected)
    assert [plan for plan, _ in request.executor.frames()] == [swap.trial.new], "the old plan's memory is given up"


def test_a_kernel_that_loses_in_the_network_is_rolled_back_and_recorded(tmp_path, monkeypatch):
    made = compiled(tmp_path)
    types, before = types_of(made), kernels(made)
    one = winner(made, types)
    store(made, one, Ratio(1.5, 1.4, 1.6, 100))  # it won by itself
    decided(monkeypatch, 1.3)
    swap = background_swap.begin(made, types, [one])
    while (found := swap.jury.verdict(swap.trial)) is None:
        made(values())
    assert found[0] is TrialVerdict.SLOWER
    background_swap.end(made, swap, *found)
    assert kernels(made) == before and made.trial is None
    # the next load knows, and so does the next search
    again = compiled(tmp_path)
    assert kernels(again) == before
    tuner, layer = again.env.tuner, one.layer
    default = tuner.default(layer.problem, layer.device)
    answer = tuner.known(layer.problem, layer.device, default)
    best = answer.best
    assert best is not None and (best.solver.id, best.config) == (default.solver.id, default.config)
    assert one.candidate in tuner.lookup.worse(layer.problem, layer.device.target)
    assert [e.action for e in tuner.user.events()][-1] == "rolled back"


def test_of_several_that_lose_together_each_is_tried_by_itself(tmp_path, monkeypatch):
    made = compiled(tmp_path, model(3))
    types = types_of(made)
    layers = list(background_swap.layers_of(made, types, background_swap.plan_of(made, types)).values())
    group = []
    for layer in layers[:3]:
        solver = next(s for s in solvers() if s.id == layer.present[0])
        other = next(c for c in map(Config, solver.space(layer.problem, layer.device.target)) if c != layer.present[1])
        group.append(Winner(layer, (solver.id, other)))
    bad = group[1]
    for one in group:
        store(made, one, Ratio(1.5, 1.4, 1.6, 100))
    monkeypatch.setattr(
        PlanTrial, "tell",
        lambda self, n, s: self.told.append((n, 1.4 if self.is_new(n) and is_bad(self.new) else 1.0 + n % 5 * 1e-3)),
    )  # fmt: skip

    def is_bad(plan):
        return any(
            s.choice
            and (s.choice.solver.id, Config(s.choice.config)) == bad.candidate
            and background_swap.Problem.of(s.node).key() == bad.layer.problem.key()
            for s in plan.steps
        )

    groups = [group]
    while groups:
        swap = background_swap.begin(made, types, groups.pop(0))
        while (found := swap.jury.verdict(swap.trial)) is None:
            made(values())
        groups += background_swap.end(made, swap, *found)
    made(values())
    assert group[0].layer.present == group[0].candidate and group[2].layer.present == group[2].candidate
    assert bad.layer.present != bad.candidate
    tuner = made.env.tuner
    assert bad.candidate in tuner.lookup.worse(bad.layer.problem, bad.layer.device.target)
    assert group[0].candidate not in tuner.lookup.worse(group[0].layer.problem, group[0].layer.device.target)


def test_no_request_waits_while_a_plan_is_made(tmp_path, monkeypatch):
    """Planning is held up for as long as requests need: they go on meanwhile, also those of another shape."""
    made = compiled(tmp_path, model(rows="rows"))
    request, types = made.create_infer_request(), None
    expected = {rows: request.infer(values(rows))["v2"].copy() for rows in (16, 24)}
    types = background_swap.types_of(made, ((1, 8, 16, 16),))
    one = winner(made, types)
    real, may_go, planning = programs.Program._typed, threading.Event(), threading.Event()

    def held(self, *arguments):
        if threading.current_thread().name == "beside":
            planning.set()
            assert may_go.wait(LONG)
        return real(self, *arguments)

    monkeypatch.setattr(programs.Program, "_typed", held)
    swaps = []
    beside = threading.Thread(target=lambda: swaps.append(background_swap.begin(made, types, [one])), name="beside")
    beside.start()
    assert planning.wait(LONG)
    for rows in (16, 24, 40, 16):  # 40: a new shape
        found = request.infer(values(rows))["v2"]
        if rows in expected:
            np.testing.assert_array_equal(found, expected[rows])
    assert not swaps
    may_go.set()
    beside.join(LONG)
    decided(monkeypatch, 0.5)
    (swap,) = swaps
    while (found := swap.jury.verdict(swap.trial)) is None:
        for rows in (16, 24):  # the other shape has the plan that it had
            np.testing.assert_array_equal(request.infer(values(rows))["v2"], expected[rows])
    background_swap.end(made, swap, *found)
    for rows in (16, 24, 16):
        np.testing.assert_array_equal(request.infer(values(rows))["v2"], expected[rows])
    assert made.program.plan_for([values(16)["v0"]]) is swap.trial.new
    assert made.program.plan_for([values(24)["v0"]]).template is not None


def test_requests_of_many_threads_are_right_while_plans_change(tmp_path, monkeypatch):
    made = compiled(tmp_path)
    types, end = types_of(made), threading.Event()
    expected = {seed: made(values(seed=seed))["v2"].copy() for seed in range(4)}
    wrong: list[object] = []
    decided(monkeypatch, 0.9)

    def serve(seed):
        request = made.create_infer_request()
        try:
            while not end.is_set():
                if not np.array_equal(request.infer(values(seed=seed))["v2"], expected[seed]):
                    wrong.append(seed)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(6):
        swap = background_swap.begin(made, types, [winner(made, types)])
        while (found := swap.jury.verdict(swap.trial)) is None and not wrong:
            time.sleep(0.001)
        background_swap.end(made, swap, *(found or (TrialVerdict.ALIKE, Ratio.one())))
    end.set()
    for thread in threads:
        thread.join(LONG)
    assert not wrong


def test_a_path_needs_the_mode_and_a_model_does_not(tmp_path):
    """Weights that were given up are missed before anything is harmed."""
    proto = model()
    made = compiled(tmp_path, proto, TUNING_MODE="TUNING_BACKGROUND")
    assert made.background is not None
    made.background.stop()
    expected = made(values())["v2"]
    swap = background_swap.begin(made, types_of(made), [winner(made, types_of(made))])
    np.testing.assert_array_equal(made(values())["v2"], expected)
    assert swap is not None


# ---- who may --------------------------------------------------------------------------------------------------------


def test_nothing_is_tuned_where_settings_forbid_it(tmp_path):
    for forbidding in ({"AUTO_TUNE_MODE": "NO_TUNE"}, {"TUNING_MODE": "TUNING_DISABLED"}):
        with pytest.raises(SettingsError, match="nothing is tuned"):
            compiled(tmp_path, **forbidding).tune_in_background()
    for name, value in (("duty", 0), ("duty", 101), ("duty", "ten"), ("budget", -1), ("until", 1), ("until", True)):
        with pytest.raises(InputError, match=name):
            compiled(tmp_path).tune_in_background(**{name: value})


def test_a_lockfile_and_frozen_models_are_left_alone(tmp_path, caplog):
    core = Core(settings(tmp_path))
    made = core.compile_model(model())
    made(values())
    core.lock(made, tmp_path / "lock.json")
    locked = {"LOCK_FILE": str(tmp_path / "lock.json"), "TUNING_MODE": "TUNING_BACKGROUND"}
    for more in ({}, {"FROZEN": "YES"}):
        again = core.compile_model(model(), config={**locked, **more})
        again(values())
        assert again.background is None
    assert "nothing is tuned" in caplog.text


def test_several_devices_say_so(tmp_path):
    several = Core(settings(tmp_path)).compile_model(model(), "MULTI:CPU,CPU.HOST")
    with pytest.raises(DeviceError, match="several devices"):
        several.tune_in_background()
    with pytest.raises(DeviceError, match="several devices"):
        several.traffic()


# ---- the whole, with its processes ----------------------------------------------------------------------------------


def children(process):
    """The processes that a process has started, and theirs."""
    found, parents = set(), {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(name)] = int(parent)
    todo = [process]
    while todo:
        at = todo.pop()
        mine = [child for child, parent in parents.items() if parent == at and child not in found]
        found.update(mine)
        todo += mine
    return found


def until(condition, seconds=LONG):
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def is_alive(process):
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_it_tunes_swaps_and_ends(tmp_path):
    made = compiled(tmp_path)
    expected = made(values())["v2"].copy()
    told: list[str] = []
    tuning = made.tune_in_background(report=lambda what, status: told.append(what))
    with pytest.raises(DeviceError, match="already"):
        made.tune_in_background()
    # requests go on; where none comes, the network runs by itself
    end = time.monotonic() + LONG
    while not tuning.wait(0.02) and time.monotonic() < end:
        np.testing.assert_array_equal(made(values())["v2"], expected)
    status = tuning.status()
    assert (status.phase, status.why) == ("done", "every layer was tuned")
    assert status.layers_done == 2 and status.layers_left == 0 and status.candidates >= 2 and status.samples > 0
    assert told.count("layer") == 2 and told[-1] == "phase"
    database = open_databases.open_user(Settings.make({"USER_DB_PATH": str(tmp_path / "kb")}))
    assert {record.key.problem for record in database if record.kind == "measurement"}
    assert not made.trial and made.meter is None
    assert until(lambda: not children(os.getpid()), 10) is not None
    # all of it is known now: the next one has nothing to search
    again = compiled(tmp_path).tune_in_background()
    assert again.wait(LONG) and again.status().candidates == 0


def test_what_wins_alone_and_loses_in_the_network_is_rolled_back(tmp_path, monkeypatch):
    """The whole way: the helper finds a planted record, the winner is swapped in, and requests say no."""
    made = compiled(tmp_path)
    before, expected = kernels(made), made(values())["v2"].copy()
    one = winner(made, types_of(made))
    store(made, one, Ratio(1.5, 1.4, 1.6, 100))
    decided(monkeypatch, 1.3)
    back: list[KernelSwap] = []

    def report(what, status):
        if what == "rollback":
            back.append(status.last_rollback)

    tuning = made.tune_in_background(report=report)
    end = time.monotonic() + LONG
    while not tuning.wait(0.001) and time.monotonic() < end:
        np.testing.assert_array_equal(made(values())["v2"], expected)
    status = tuning.status()
    assert status.phase == "done" and status.gain == 1 and all(swap.gain[2] < 1 for swap in back)
    assert any(one.layer.problem.key() in swap.kernels for swap in back)
    assert kernels(made) == before
    # neither the next load nor the next tuning tries it again
    again = compiled(tmp_path)
    assert kernels(again) == before
    back.clear()
    assert again.tune_in_background(report=report).wait(LONG)
    assert not back and kernels(again) == before


def test_a_layer_that_another_process_tunes_is_left_to_it(tmp_path):
    made = compiled(tmp_path)
    types = types_of(made)
    layers = background_swap.layers_of(made, types, background_swap.plan_of(made, types))
    other = Claims(tmp_path / "kb")
    mine, theirs = layers
    assert other.take(theirs)
    tuning = made.tune_in_background()
    assert until(lambda: tuning.status().layers_done == 1 or tuning.wait(0))
    assert until(lambda: "another process" in tuning.status().why) and not tuning.wait(1.0)
    database = made.env.tuner.user
    assert {record.key.problem for record in database if record.kind == "measurement"} == {mine}
    other.close()
    assert tuning.wait(LONG) and tuning.status().layers_done == 2
    assert not os.listdir(tmp_path / "kb" / "claims")


def test_a_trial_that_nobody_takes_part_in_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "STALE", 0.5)
    monkeypatch.setattr(background, "sample", lambda types: None)  # the network cannot run by itself
    made = compiled(tmp_path)
    before, one = kernels(made), winner(made, types_of(made))
    store(made, one, Ratio(1.5, 1.4, 1.6, 100))
    tuning = made.tune_in_background()
    assert tuning.wait(LONG) and tuning.status().phase == "done"
    assert made.trial is None and kernels(made) == before and tuning.status().last_swap is None


def test_pause_resume_and_stop(tmp_path):
    made = compiled(tmp_path, model(6))
    tuning = made.tune_in_background()
    gate = ActivityGate(tuning._activity.descriptor)
    assert until(lambda: gate.samples[0] > 0)
    tuning.pause()
    before = gate.samples[0]
    assert until(lambda: tuning.status().phase == "paused")
    time.sleep(1.0)
    assert gate.samples[0] <= before + 1, "one may have begun, and others wait"
    assert tuning.status().layers_done <= 1
    tuning.resume()
    assert until(lambda: gate.samples[0] > before + 1 and tuning.status().samples > before)
    helper = tuning.status().helper
    mine = children(helper) | {helper}
    begin = time.monotonic()
    tuning.stop()
    assert time.monotonic() - begin < 20 and tuning.wait(0) and tuning.status().phase == "stopped"
    assert until(lambda: not any(map(is_alive, mine)))
    made(values())
    tuning.stop()  # twice is once


def test_a_helper_that_dies_is_started_again_a_few_times(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "RESTART", 0.05)
    made = compiled(tmp_path, model(8))
    tuning = made.tune_in_background()
    for n in range(background.MOST_RESTARTS + 1):
        assert until(lambda: tuning.status().helper or tuning.wait(0))
        assert not tuning.wait(0), tuning.status()
        os.kill(tuning.status().helper, signal.SIGKILL)
        assert until(lambda n=n: tuning.status().restarts > n or tuning.wait(0))
        made(values())
    assert tuning.wait(LONG) and tuning.status().phase == "failed"
    assert "ended 4 times" in tuning.status().why
    made(values())


def test_who_drops_the_model_ends_it(tmp_path):
    made = compiled(tmp_path, model(6))
    tuning = made.tune_in_background()
    assert until(lambda: tuning.status().helper)
    helper = tuning.status().helper
    del made
    gc.collect()
    assert until(lambda: not is_alive(helper)) and tuning.wait(LONG)


def test_a_forked_child_serves_without_it(tmp_path):
    made = compiled(tmp_path, model(6))
    expected = made(values())["v6"].copy()
    tuning = made.tune_in_background()
    assert until(lambda: tuning.status().helper)
    child = os.fork()
    if not child:
        code = 1
        try:
            right = np.array_equal(made(values())["v6"], expected)
            code = 0 if right and tuning.status().phase == "stopped" and tuning.wait(0) and made.meter is None else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert is_alive(tuning.status().helper) or tuning.status().restarts or tuning.wait(0)
    tuning.stop()


SERVING = """
    import sys, time
    sys.path.insert(0, {tests!r})
    from unit.model_tuning.test_background_tuning import compiled, model, values
    from pathlib import Path
    made = compiled(Path({folder!r}), model(12))
    def told(what, status):
        print(what, status.layers_done, status.helper, flush=True)
    tuning = made.tune_in_background(report=told)
    print("ready", flush=True)
    end = time.monotonic() + {seconds}
    while time.monotonic() < end:
        made(values())
        time.sleep(0.003)
    {last}
"""


def serving(tmp_path, seconds=600.0, last="pass"):
    """A process that serves and tunes, and says what happens."""
    tests = str(Path(__file__).parents[2])
    text = textwrap.dedent(SERVING.format(tests=tests, folder=str(tmp_path), seconds=seconds, last=last))
    source = os.path.dirname(os.path.dirname(tunewright.__file__))
    environment = {**child_environment(Settings()), "PYTHONPATH": os.pathsep.join([source, tests])}
    return subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )  # fmt: skip


def layers_said(process):
    """Layers that were told to be done."""
    return max((int(line.split()[1]) for line in process.stdout if line.startswith("layer")), default=0)


@pytest.mark.parametrize(
    "last", ["pass", "import os, signal; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", "raise SystemExit(0)"]
)
def test_a_process_ends_without_a_hang_or_an_orphan(tmp_path, last):
    process = serving(tmp_path, 2.0, last)
    assert process.stdout.readline() is not None
    started = until(lambda: children(process.pid) or process.poll() is not None)
    mine = children(process.pid) if started is not True else set()
    _, errors = process.communicate(timeout=LONG)
    assert process.returncode in ((-signal.SIGINT, 1, 130) if "SIGINT" in last else (0,)), errors
    assert until(lambda: not any(map(is_alive, mine)))


@pytest.mark.parametrize(
    "moment", [0.4, 2.0, 3.7, *(pytest.param(n * 0.35, marks=pytest.mark.soak) for n in range(1, 48))]
)
def test_killed_at_any_moment_nothing_is_lost(tmp_path, moment):
    with serving(tmp_path) as process:
        assert process.stdout.readline()
        time.sleep(moment)
        mine = children(process.pid)
        process.kill()
        done = layers_said(process)
    assert until(lambda: not any(map(is_alive, mine))), "its helper, or its worker, is still there"
    database = open_databases.open_user(Settings.make({"USER_DB_PATH": str(tmp_path / "kb")}))
    assert not database.damage()
    problems = {record.key.problem for record in database if record.kind == "measurement"}
    assert len(problems) >= done


def test_weights_that_were_given_up_are_missed_by_name(tmp_path):
    """A plan that is a path's only one leaves no weights; those in a file of their own can be read again."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((64, 16384)).astype(np.float32)
    types = [helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, d in (("x", [4, 64]), ("y", [4, 16384]))]
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="p0")
    graph = helper.make_graph([node], "g", types[:1], types[1:], [onnx.numpy_helper.from_array(weights, "w")])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = {"x": rng.standard_normal((4, 64)).astype(np.float32)}
    onnx.save(proto, tmp_path / "m.onnx")
    core = Core(settings(tmp_path))
    expected = x["x"] @ weights
    held = core.read_model(proto)
    for given in (proto.SerializeToString(), str(tmp_path / "m.onnx"), proto, held):
        made = core.compile_model(given)
        types_ = types_of(made)
        try:
            swap = background_swap.begin(made, types_, [winner(made, types_)])
        except ModelError as error:
            assert "TUNING_BACKGROUND" in str(error) and given is not held
            continue
        assert swap is not None
        for _ in range(8):
            np.testing.assert_allclose(made(x)["y"], expected, rtol=0, atol=1e-3)

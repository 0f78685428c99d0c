"""`explain`: every layer has an origin, every solver of its operation is accounted for, and nothing is changed."""

from dataclasses import replace

import numpy as np
import pytest
from onnx import parser

import tunewright
from helpers.explained import check
from helpers.kb_records import exact, fault
from tunewright import Core
from tunewright.knowledge import open_databases
from tunewright.knowledge.key import Where
from tunewright.knowledge.record import Measurement
from tunewright.plugins.single import open_device
from tunewright.runtime.insight import explanation
from tunewright.runtime.insight.explain import State, explain
from tunewright.settings import Settings
from tunewright.solvers.base import Problem
from tunewright.testing import models

needs_opencl = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")
PRODUCT = "(float[6, 32] x, float[32, 48] w) => (float[6, 48] y) { h = MatMul(x, w) y = Relu(h) }"
X = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((32, 48)).astype(np.float32)


def model(text, version=21):
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : {version}]>\ng {text}')


def one(layers, op):
    (found,) = [each for each in layers if each.op == op]
    return found


# ---- every solver is accounted for ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["CPU", "CPU.HOST", "NULL"])
@pytest.mark.parametrize("make", [lambda: models.resnet(18, size=32), lambda: models.mobilenet(32), models.transformer])
def test_every_solver_is_chosen_measured_or_has_a_reason(make, device):
    proto = make()
    compiled = Core().compile_model(proto, device)
    type = compiled.inputs["x"]
    layers = explain(compiled, {"x": np.ones(type.dims, np.float32)}, count=1)
    check(layers, compiled)
    (plan,) = compiled.program.plans
    assert [each.name for each in layers] == [s.node.name for s in plan.steps], "a layer per step, in order"
    ran = [each for each in layers if each.timing is not None]
    assert len(ran) == sum(not s.optimized_out for s in plan.steps)
    if device == "NULL":
        assert all(each.timing.seconds == pytest.approx(1e-6) for each in ran), "on its scripted clock"
        assert all("of null devices" in each.roofline.why for each in ran)
    covered = {name for each in layers for name in each.nodes}
    assert {name for name, op in compiled.nodes if op in ("Conv", "Gemm")} <= covered


def test_without_inputs_the_last_plan_is_explained_and_nothing_is_timed():
    compiled = Core().compile_model(model(PRODUCT), "CPU.HOST")
    layers = explain(compiled)
    check(layers, compiled)
    assert layers and all(each.timing is None for each in layers)
    assert one(layers, "MatMul").roofline.why == "it was not timed" and one(layers, "MatMul").roofline.work.flops


def test_open_shapes_need_inputs():
    compiled = Core().compile_model(model("(float[n] x) => (float[n] y) { y = Relu(x) }"), "CPU.HOST")
    with pytest.raises(tunewright.InputError, match="no plan is made yet"):
        explain(compiled)
    assert [each.op for each in explain(compiled, {"x": X[0]}, count=0)] == ["Relu"]


def test_no_timing_runs_once():
    compiled = Core().compile_model(model(PRODUCT), "CPU.HOST")
    assert all(each.timing is None for each in explain(compiled, {"x": X, "w": W}, count=0))
    assert one(explain(compiled, {"x": X, "w": W}, count=4), "MatMul").timing.inferences == 4
    assert one(explain(compiled, {"x": X, "w": W}, seconds=0.0), "MatMul").timing.inferences == 3


# ---- bodies, segments, late problems --------------------------------------------------------------------------------

LOOP = """
(float[4] x, int64 n) => (float[4] y)
{
  go = Constant<value = bool {1}>()
  y = Loop(n, go, x) <body = step (int64 i, bool c, float[4] a) => (bool d, float[4] b) {
    d = Identity(c)
    t = Sin(a)
    b = Softmax<axis = 0>(t)
  }>
}
"""


def test_the_layers_of_a_body_follow_their_node():
    compiled = Core().compile_model(model(LOOP), "CPU.HOST")
    layers = explain(compiled, {"x": X[0, :4], "n": np.asarray(3)}, count=2)
    check(layers, compiled)
    loop, *inner = layers
    assert (loop.origin, loop.is_leaf) == (explanation.CONTROL, False)
    assert inner and all(each.inside == f"{loop.name}.body" for each in inner)
    softmax = one(layers, "Softmax")
    assert softmax.timing.calls == 3 and softmax.timing.seconds <= loop.timing.seconds


def test_a_branch_that_did_not_run_is_named():
    text = """(float[4] x, bool c) => (float[4] y) { y = If(c) <
        then_branch = a () => (float[4] p) { p = Sin(x) }, else_branch = b () => (float[4] q) { q = Cos(x) }> }"""
    compiled = Core().compile_model(model(text), "CPU.HOST")
    layers = explain(compiled, {"x": X[0, :4], "c": np.asarray(False)}, count=1)
    check(layers, compiled)
    assert [each.op for each in layers] == ["If", "Cos"]
    assert layers[0].note == "run by the request: CPU.HOST runs no control flow in a launch; then_branch did not run"


def test_a_segment_behind_shapes_that_depend_on_data_is_explained():
    text = """(float[n] x, float[4, 3] w) => (float[m, 3] y) {
        at = NonZero(x) row = Constant<value_ints = [-1]>() flat = Reshape(at, row) picked = Gather(x, flat)
        wide = Constant<value_ints = [-1, 4]>() rows = Reshape(picked, wide) y = MatMul(rows, w) }"""
    compiled = Core({"SHAPE_TEMPLATES": "NO"}).compile_model(model(text))
    for count in (8, 4):  # two plans of the segment: the one that ran is explained
        layers = explain(compiled, {"x": np.ones(count, np.float32), "w": W[:4, :3]}, count=1)
        check(layers, compiled)
        product = one(layers, "MatMul")
        assert product.inside == "segment 2" and f"float32[{count // 4},4]" in product.problem
        gather = one(layers, "Gather")
        assert gather.roofline.why == "its shapes depend on data" and gather.origin == "default"


@needs_opencl
def test_a_problem_that_is_posed_as_it_runs():
    text = "(float[4, 6] x, int64[k] s, int64[k] e) => (float y) { y = Slice(x, s, e) }"
    compiled = Core().compile_model(model(text), config={"HOST_FALLBACK": "NO", "SHAPE_TEMPLATES": "NO"})
    given = {"x": X[:4, :6], "s": np.asarray([1]), "e": np.asarray([3])}
    (layer,) = explain(compiled, given, count=1)
    check([layer], compiled)
    assert layer.solver.startswith("opencl.") and "float32[2,6]" in layer.problem and "chosen as it runs" in layer.note
    assert any(o.state is State.REFUSES and o.why == "HOST_FALLBACK is NO" for o in layer.solvers)
    (layer,) = explain(compiled)
    check([layer], compiled)
    assert layer.origin == explanation.LATE and layer.note == "it did not run"


# ---- what was measured ----------------------------------------------------------------------------------------------


class Bench:
    """A product with a user's knowledge base of its own."""

    def __init__(self, folder):
        self.config = {"USER_DB_PATH": str(folder)}
        self.database = open_databases.open_user(Settings.make(self.config, Settings()))
        compiled = self.compile()
        (step,) = [s for s in compiled.program.plans[-1].steps if s.choice is not None]
        self.problem, self.default, self.tuner = Problem.of(step.node), step.choice, compiled.env.tuner
        self.device = open_device("CPU")
        space = self.default.solver.space(self.problem, self.device.target)
        self.others = [c for c in space if c != self.default.config]

    def compile(self):
        return Core(self.config).compile_model(model(PRODUCT))

    def measured(self, config, **about):
        return exact(self.problem, config, "CPU", default=(self.default.solver.id, self.default.config), **about)

    def layer(self, **about):
        compiled = self.compile()
        layers = explain(compiled, {"x": X, "w": W}, count=1, **about)
        check(layers, compiled)
        return one(layers, "MatMul")


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path / "kb")


@needs_opencl
def test_nothing_was_measured(bench):
    layer = bench.layer()
    assert (layer.origin, layer.match, layer.found) == ("default", None, None)
    assert layer.nearest == "nothing is known of problems like this one"
    assert layer.candidates > 1 and layer.fused == ("Relu",)
    assert layer.runner_up.found is None and "not measured" in layer.runner_up.why
    assert layer.runner_up.solver in {o.solver for o in layer.solvers if o.state is State.ACCEPTS}


@needs_opencl
def test_an_exact_answer_with_its_evidence_and_the_next_one(bench):
    best, second, slow = bench.others[:3]
    bench.database.add([
        bench.measured(best, gain=(2.0, 1.9, 2.1)), bench.measured(second, gain=(1.5, 1.4, 1.6)),
        bench.measured(slow, gain=(0.8, 0.7, 0.9)),
    ])  # fmt: skip
    layer = bench.layer()
    assert (layer.origin, layer.why, layer.config) == ("user knowledge base", "user knowledge base", best)
    assert layer.found.layer == "user knowledge base" and layer.found.measurement.evidence.gain.median == 2.0
    up = layer.runner_up
    assert (up.solver, up.config, up.found.measurement.evidence.gain.low) == (layer.solver, second, 1.4)
    assert layer.solvers[0].state is State.CHOSEN and layer.solvers[0].measured == 3
    written = layer.to_json()
    assert written["match"] == {"kind": "exact", "differs": []}
    assert written["evidence"]["gain"] == {"median": 2.0, "low": 1.9, "high": 2.1, "pairs": 20}


@needs_opencl
def test_a_provisional_answer_names_the_field(bench):
    m = bench.measured(bench.others[0])
    elsewhere = replace(m.key, where=replace(m.key.where, software="driver 0.1"))
    record = Measurement(elsewhere, m.config, m.evidence, m.problem, m.family, m.sizes, m.date, m.tool)
    bench.database.add([record])
    layer = bench.layer()
    assert layer.why == "user knowledge base (provisional: another software)"
    assert layer.to_json()["match"] == {"kind": "provisional", "differs": ["software"]}
    default = next(o for o in layer.solvers if o.state is State.CHOSEN)
    assert default.measured == 1, "of this device, be it with other software"


@needs_opencl
def test_the_nearest_key_and_the_field_that_differed(bench):
    m = bench.measured(bench.others[0])
    elsewhere = replace(m.key, where=replace(m.key.where, options="-O0"))
    bench.database.add([Measurement(elsewhere, m.config, m.evidence, m.problem, m.family, m.sizes, m.date, m.tool)])
    layer = bench.layer()
    assert layer.origin == "default" and layer.nearest.endswith("miss: another options")
    up = layer.runner_up
    assert up.config == m.config and up.why == "the next that was measured, miss: another options"


@needs_opencl
def test_what_was_measured_and_is_slower_is_the_runner_up(bench):
    bench.database.add(
        [
            bench.measured(bench.default.config, gain=(1.0, 1.0, 1.0)),
            bench.measured(bench.others[0], gain=(0.9, 0.8, 0.95)),
        ]
    )
    layer = bench.layer()
    assert layer.origin == "user knowledge base" and layer.config == bench.default.config
    assert layer.runner_up.config == bench.others[0] and "not faster than the default" in layer.runner_up.why


@needs_opencl
def test_another_solver_that_was_measured_and_the_default_behind_it(bench):
    shaped = next(s for s in bench.tuner.candidates if s.id == f"{bench.default.solver.id}.shape")
    config = bench.default.config
    bench.database.add([bench.measured(config, solver=shaped, gain=(1.3, 1.2, 1.4))])
    layer = bench.layer()
    assert layer.solver == shaped.id
    (default,) = [o for o in layer.solvers if o.solver == bench.default.solver.id]
    assert default.state is State.MEASURED and "measured against" in default.why
    assert (layer.runner_up.solver, layer.runner_up.why) == (bench.default.solver.id, "the default")
    bench.database.add([bench.measured(bench.others[0], gain=(1.1, 1.05, 1.2))])
    (default,) = [o for o in bench.layer().solvers if o.solver == bench.default.solver.id]
    assert default.state is State.MEASURED and default.config == bench.others[0]
    assert default.why == "number 2 of 2 answers, user knowledge base (exact)"


@needs_opencl
def test_barred_candidates_are_named(bench):
    where = Where.of(bench.device.target)
    solver = bench.default.solver.id
    version = bench.default.solver.version
    both = (bench.others[0], bench.default.config)
    bad = [fault(bench.problem, where, solver, c, why="SIGSEGV", version=version) for c in both]
    bench.database.add([*bad, fault(bench.problem, where, "opencl.gone", bench.others[0])])
    layer = bench.layer()
    assert [(b.solver, b.config) for b in layer.barred] == [
        (solver, c) for c in sorted((b.config for b in bad), key=lambda c: sorted(c.items(), key=str))
    ]
    assert all("crashed" in b.why and "SIGSEGV" in b.why for b in layer.barred)
    assert layer.solver != solver, "the default itself is out for this problem"
    (said,) = [o for o in layer.solvers if o.solver == solver]
    assert said.state is State.BARRED and "SIGSEGV" in said.why


@needs_opencl
def test_explaining_changes_nothing(bench):
    bench.database.add([bench.measured(bench.others[0])])
    before, events = [r.digest for r in bench.database], list(bench.database.events())
    bench.layer()
    assert [r.digest for r in bench.database] == before and list(bench.database.events()) == events


# ---- time and roofline ----------------------------------------------------------------------------------------------


@needs_opencl
def test_time_and_roofline_fit_together():
    compiled = Core().compile_model(models.resnet(18, size=64))
    layers = explain(compiled, {"x": np.ones((1, 3, 64, 64), np.float32)}, count=5)
    convs = [each for each in layers if each.op == "Conv"]
    for each in convs:
        roof = each.roofline
        assert roof.floor == max(roof.work.flops / roof.ceilings.flops, roof.work.bytes / roof.ceilings.bandwidth)
        assert roof.share == roof.floor / each.timing.seconds and roof.bound in ("arithmetic", "memory")
        assert each.timing.lower <= each.timing.seconds <= each.timing.upper
    assert all(each.timing is None for each in layers if each.origin == explanation.OPTIMIZED_OUT)
    # on no machine is a whole network far above its roofline, nor is a share of nothing plausible
    together = sum(each.roofline.floor for each in convs) / sum(each.timing.seconds for each in convs)
    assert 1e-4 < together < 3

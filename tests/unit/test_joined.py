"""Plans whose kernels are one launch: the same bits, at any number of workers, for any shape, also in loops."""

import threading

import numpy as np
import onnx
import pytest
from onnx import parser

from tunewright import Core
from tunewright.plugins.single import open_device
from tunewright.solvers.opencl import joined
from tunewright.solvers.opencl.joined import Joined
from tunewright.testing import models

pytestmark = pytest.mark.skipif(open_device("CPU").family != "opencl", reason="needs the OpenCL CPU device")

DYNAMIC = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 24] x, float[24, 24] w) => (float[n, 24] y, float[n, 1] m)
{
    a = MatMul(x, w)
    b = Softmax(a)
    c = Add(b, x)
    d = Transpose <perm = [1, 0]> (c)
    e = MatMul(w, d)
    f = Transpose <perm = [1, 0]> (e)
    y = Tanh(f)
    m = ReduceMax <axes = [1], keepdims = 1> (y)
}
"""
LOOP = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[8, 8] x, float[8, 8] w) => (float[8, 8] y)
{
    n = Constant <value = int64 {20}> ()
    t = Constant <value = bool {1}> ()
    y = Loop (n, t, x) <body = b (int64 i, bool go, float[8, 8] s) => (bool on, float[8, 8] z)
    {
        on = Identity(go)
        p = MatMul(s, w)
        q = Softmax(p)
        r = Sub(q, s)
        z = Tanh(r)
    }>
}
"""


RECURRENT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[5, 1, 12] x, float[2, 32, 12] w, float[2, 32, 8] r) => (float[5, 2, 1, 8] y)
{
    h = LSTM <hidden_size = 8, direction = "bidirectional"> (x, w, r)
    y = Sigmoid(h)
}
"""


def compiled(model, **config):
    core = Core(config)
    return core.compile_model(core.read_model(model), "CPU")


def launches(request, inputs):
    before = request.executor.launches
    request.infer(inputs)
    return request.executor.launches - before


def feed(model, **sizes):
    rng = np.random.default_rng(3)
    shapes = {
        i.name: [d.dim_value or sizes[d.dim_param] for d in i.type.tensor_type.shape.dim] for i in model.graph.input
    }
    return {name: rng.standard_normal(shape).astype(np.float32) / 4 for name, shape in shapes.items()}


def equal(one, other):
    return all(np.array_equal(one[name], other[name], equal_nan=True) for name in other)


@pytest.mark.parametrize(
    "name", ["resnet", pytest.param("mobilenet", marks=pytest.mark.soak), "transformer", "recurrent"]
)
def test_a_network_is_one_launch_with_the_same_results(name):
    model = {
        "resnet": lambda: models.resnet(size=32), "mobilenet": lambda: models.mobilenet(size=32),
        "transformer": lambda: models.transformer(layers=1, hidden=48, heads=4, length=9),
        "recurrent": lambda: parser.parse_model(RECURRENT),
    }[name]()  # fmt: skip
    inputs = feed(model)
    one, apart = compiled(model).create_infer_request(), compiled(model, JOIN_LAUNCHES="NO").create_infer_request()
    assert equal(one.infer(inputs), apart.infer(inputs))
    many, few = launches(apart, inputs), launches(one, inputs)
    assert few == 1 < many, (few, many)
    for _ in range(20):  # counters start over, results do not depend on who was first
        assert equal(one.infer(inputs), apart.infer(inputs))


@pytest.mark.parametrize("workers", [3, 20])
def test_any_number_of_workers_does_every_item_once(workers, monkeypatch):
    """Also more than there are threads, than items, and than parts of a step."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[n, 24] x) => (float[24, n] z) {
        y = Softmax(x) z = Transpose <perm = [1, 0]> (y) }"""
    model = parser.parse_model(text)
    many = property(lambda device: 1 if device.alone else workers)
    monkeypatch.setattr(type(open_device("CPU")), "workers", many)
    one = compiled(model)
    for n in (1, 2, 7, 301, 4000):
        (x,) = (inputs := feed(model, n=n)).values()
        powers = np.exp(x.astype(np.float64)).T
        for _ in range(3):
            assert np.allclose(one(inputs)["z"], powers / powers.sum(0), rtol=1e-5, atol=0)
    assert workers in {run.library.workers for plan in one.program.plans for run in plan.runs.values()}


def test_other_shapes_compile_nothing(monkeypatch):
    model = parser.parse_model(DYNAMIC)
    one, apart = compiled(model), compiled(model, JOIN_LAUNCHES="NO")
    assert equal(one(feed(model, n=12)), apart(feed(model, n=12)))
    built = []
    monkeypatch.setattr(Joined, "prepare", lambda self: built.append(self))
    for n in (13, 40, 77):
        inputs = feed(model, n=n)
        assert equal(one(inputs), apart(inputs))
    assert not built


def test_inputs_and_outputs_are_each_inference_s_own():
    model = parser.parse_model(DYNAMIC)
    request = compiled(model).create_infer_request()
    first, second = feed(model, n=8), {k: -v for k, v in feed(model, n=8).items()}
    one = request.infer(first)
    kept = {k: v.copy() for k, v in one.items()}
    two = request.infer(second)
    assert equal(one, kept) and not equal(one, two) and equal(request.infer(first), one)


def test_a_loop_waits_before_it_changes_arguments():
    model = parser.parse_model(LOOP)
    core = Core({"ENABLE_LOOP_UNROLLING": "NO"})
    inputs = feed(model)
    got = core.compile_model(core.read_model(model), "CPU")(inputs)["y"]
    want = core.compile_model(core.read_model(model), "CPU.HOST")(inputs)["y"]
    assert np.allclose(got, want, atol=1e-5)


def test_requests_run_side_by_side():
    model = models.transformer(layers=1, hidden=48, heads=4, length=33)
    shared, inputs = compiled(model), feed(model)
    want = shared(inputs)
    wrong = []

    def work():
        request = shared.create_infer_request()
        for _ in range(30):
            if not equal(request.infer(inputs), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_counters_are_of_steps_in_one_launch():
    model = models.transformer(layers=2, hidden=96, heads=4, length=65)
    request, inputs = compiled(model, PERF_COUNT="YES").create_infer_request(), feed(model)
    shares = []
    for _ in range(20):
        request.infer(inputs)
        totals = request.get_totals()
        rows = [row for row in request.get_profiling_info() if row.calls]
        assert totals.launches == sum(row.launches for row in rows) == 1 and len(rows) > 5
        assert all(row.device_seconds > 0 and row.calls == 1 for row in rows)
        shares.append(sum(row.device_seconds for row in rows) / (totals.seconds - totals.host_seconds))
        assert shares[-1] * (totals.seconds - totals.host_seconds) <= totals.seconds * 1.01
    assert max(shares) > 0.5, "the launch is little more than its steps"


def test_counters_of_equal_layers_are_alike():
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[256, 256] x, float[256, 256] w) => (float[256, 256] y) {
        a = MatMul(x, w) b = MatMul(a, w) c = MatMul(b, w) d = MatMul(c, w) y = MatMul(d, w) }"""
    model = parser.parse_model(text)
    request, inputs = compiled(model, PERF_COUNT="YES").create_infer_request(), feed(model)
    best = {}
    for _ in range(50):
        request.infer(inputs)
        for row in request.get_profiling_info():
            best[row.name] = min(best.get(row.name, 1.0), row.device_seconds)
    flops = 2 * 256**3 / min(best.values())
    assert len(best) == 5 and max(best.values()) < 3 * min(best.values()) and 1e8 < flops < 1e14


def test_where_a_launch_does_not_tell_times_every_step_is_one(monkeypatch):
    monkeypatch.setattr(joined, "tick", lambda device: 0.0)
    model = models.transformer(layers=1, hidden=48, heads=4, length=9)
    request = compiled(model, PERF_COUNT="YES").create_infer_request()
    inputs = feed(model)
    assert launches(request, inputs) > 5 and len(request.get_profiling_info()) > 5


def test_a_compiler_that_refuses_costs_nothing_but_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(Joined, "source", lambda self: "this is no C")
    model = parser.parse_model(DYNAMIC)
    inputs = feed(model, n=5)
    with caplog.at_level("WARNING"):
        got = compiled(model, CACHE_DIR="")(inputs)
    assert "cannot be launched together" in caplog.text
    assert equal(got, compiled(model, JOIN_LAUNCHES="NO")(inputs))


def test_the_program_depends_on_the_set_of_kernels_alone():
    model = onnx.load_model_from_string(models.transformer(layers=1, hidden=48, heads=4, length=9).SerializeToString())
    deeper = models.transformer(layers=2, hidden=48, heads=4, length=9)
    texts = []
    for each in (model, deeper):
        request = compiled(each).create_infer_request()
        request.infer(feed(each))
        (run,) = [run for plan in request.model.program.plans for run in plan.runs.values()]
        texts.append(run.library.source())
    assert texts[0] == texts[1]

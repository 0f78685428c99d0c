"""Plans whose kernels are one call: the same bits as kernel by kernel, for any number of threads and any shape."""

import re
import threading
from collections import OrderedDict

import numpy as np
import pytest
from onnx import parser

from native.harness import table_of
from tunewright import Core
from tunewright.devices.base import address
from tunewright.devices.native import programs, table_format
from tunewright.devices.native.device import NativeDevice
from tunewright.devices.native.pool import HEAD, ROW
from tunewright.errors import ExecutionError
from tunewright.plugins.single import open_device
from tunewright.testing import models

pytestmark = pytest.mark.skipif(open_device("CPU").family != "native", reason="needs the native CPU device")

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


def segments(compiled):
    return [segment for plan in compiled.program.plans for segment in plan.segments]


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_a_table_of_steps():
    table, begins = table_of([(1111, (5,), 3), (2222, (2, 3, 4), 0), (3333, (7, 2), 1)], 8)
    assert table[:HEAD].tolist() == [3, 8]
    rows = [int(table[HEAD + k]) for k in range(3)]
    assert rows == [HEAD + 3, HEAD + 3 + ROW + 3, HEAD + 3 + 2 * ROW + 3] and begins == [row + ROW for row in rows]
    assert [table[row : row + ROW].tolist() for row in rows] == [
        [1111, 5, 1, 5, 0], [2222, 2, 3, 24, 0], [3333, 7, 2, 14, 0]]  # fmt: skip
    assert len(table) == begins[-1] + 1
    assert table_of([], 1)[0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("value", "want"),
    [(np.int32(-1), 2**64 - 1), (np.int64(5), 5), (np.uint8(200), 200), (np.float32(1.0), 0x3F800000),
     (np.float64(-2.0), 0xC0000000)],
)  # fmt: skip
def test_numbers_in_a_table(value, want):
    assert table_format.number(value) == want


def test_addresses_are_written_where_arguments_stand():
    model = parser.parse_model(DYNAMIC)
    request, inputs = compiled(model).create_infer_request(), feed(model, n=9)
    request.infer(inputs)
    ((_, frame),) = request.executor.frames()
    (one,) = frame.segments
    table, places = one.bound.table, one.segment.executable.places
    (slot,) = [i for i, s in enumerate(request.model.program.plans[0].slots) if s.name == "x"]
    assert places[slot] and all(table[at] == address(inputs["x"]) for at in places[slot])
    other = {**inputs, "x": inputs["x"].copy()}
    request.infer(other)
    assert all(table[at] == address(other["x"]) for at in places[slot])


def test_a_plan_is_linked_once_and_bound_for_each_request():
    """Requests have tables of their own, of which all that is not theirs is written once."""
    model = parser.parse_model(DYNAMIC)
    one, inputs = compiled(model), feed(model, n=9)
    requests = [one.create_infer_request() for _ in range(2)]
    assert equal(requests[0].infer(inputs), requests[1].infer(inputs))
    (first,), (second,) = ([s for _, frame in r.executor.frames() for s in frame.segments] for r in requests)
    assert first.segment is second.segment and first.bound is not second.bound
    assert first.bound.table is not second.bound.table and not np.array_equal(first.bound.table, second.bound.table)
    kernels = range(int(first.bound.table[0]))
    begins = [int(first.bound.table[HEAD + number]) for number in kernels]
    assert all(first.bound.table[at] == second.bound.table[at] for at in begins)


# ---- runs -----------------------------------------------------------------------------------------------------------


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
    for _ in range(20):  # costs of steps are learned, and who runs what changes: results do not
        assert equal(one.infer(inputs), apart.infer(inputs))


@pytest.mark.parametrize("classes", ["YES", "NO"])
@pytest.mark.parametrize("threads", [1, 3, 20])
def test_any_number_of_threads_does_every_item_once(threads, classes, monkeypatch):
    """Also more than there are cores, than items, and than parts of a step."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[n, 24] x) => (float[24, n] z) {
        y = Softmax(x) z = Transpose <perm = [1, 0]> (y) }"""
    model, real = parser.parse_model(text), table_format.Listing.link
    monkeypatch.setattr(table_format.Listing, "link", lambda listing, _: real(listing, threads))
    one = compiled(model, SHAPE_TEMPLATES=classes)
    for n in (1, 2, 7, 301, 4000):
        (x,) = (inputs := feed(model, n=n)).values()
        powers = np.exp(x.astype(np.float64)).T
        for _ in range(3):
            assert np.allclose(one(inputs)["z"], powers / powers.sum(0), rtol=1e-5, atol=0)
    made = segments(one)  # a plan for sizes that are far from the others may be made beside
    assert len(made) <= 4 if classes == "YES" else len(made) == 5
    assert all(segment.executable.linked.table[1] == threads for segment in made)


def test_other_shapes_compile_nothing(monkeypatch):
    model = parser.parse_model(DYNAMIC)
    one, apart = compiled(model), compiled(model, JOIN_LAUNCHES="NO")
    for n in (12, 40, 77):  # some kernels have other tiles for larger ones
        assert equal(one(feed(model, n=n)), apart(feed(model, n=n)))
    monkeypatch.setattr(programs.NativePrograms, "_compile", lambda *given: pytest.fail("a text was compiled"))
    monkeypatch.setattr(programs.NativePrograms, "_load", lambda *given: pytest.fail("a text was looked up"))
    for n in (13, 41, 78):
        inputs = feed(model, n=n)
        assert equal(one(inputs), apart(inputs))
    assert len(segments(one)) <= 3


def test_a_run_ends_where_the_host_has_a_step():
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
g (float[8, 8] x) => (float[8, 8] y) { a = Abs(x) b = MatMul(a, x) d = Det(b) e = Mul(b, d) y = Neg(e) }""")
    model = compiled(proto)
    request, inputs = model.create_infer_request(), feed(proto)
    (plan,) = model.program.plans
    (host,) = [at for at, step in enumerate(plan.steps) if step.on_host]
    sides = [plan.steps.index(segment.steps[0]) - host for segment in plan.segments]
    assert [side > 0 for side in sides] == [False, False, True] and sides[1] == 0, "one launch on each side of it"
    a = np.abs(inputs["x"].astype(np.float64)) @ inputs["x"]
    for _ in range(3):
        got = request.infer(inputs)["y"]
        np.testing.assert_allclose(got, -a * np.linalg.det(a), rtol=1e-3, atol=1e-5)
        assert request.get_totals().launches == 2


def test_inputs_and_outputs_are_each_inference_s_own():
    model = parser.parse_model(DYNAMIC)
    request = compiled(model).create_infer_request()
    first, second = feed(model, n=8), {k: -v for k, v in feed(model, n=8).items()}
    one = request.infer(first)
    kept = {k: v.copy() for k, v in one.items()}
    two = request.infer(second)
    assert equal(one, kept) and not equal(one, two) and equal(request.infer(first), one)


def test_a_loop_changes_arguments_between_its_turns():
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


# ---- loads ----------------------------------------------------------------------------------------------------------


def test_a_load_compiles_and_an_inference_does_not(monkeypatch):
    model = models.transformer(layers=1, hidden=48, heads=4, length=9)
    made = compiled(model)
    (plan,) = made.program.plans
    kernels = [step.kernel for step in plan.steps if not step.optimized_out]
    assert kernels and all("programs" in vars(kernel) for kernel in kernels)
    monkeypatch.setattr(NativeDevice, "build", lambda *given: pytest.fail("it was compiled when it ran"))
    monkeypatch.setattr(NativeDevice, "begin_build", lambda *given: pytest.fail("it was compiled when it ran"))
    made(feed(model))


def test_what_the_compiler_refuses_is_told_with_the_node(monkeypatch):
    model = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
g (float[3, 5] x) => (float[3, 5] y) { [steep] y = Elu <alpha = 0.123> (x) }""")

    def broken(programs, source):
        raise ExecutionError("the compiler refuses it")

    monkeypatch.setattr(programs.NativePrograms, "build", broken)
    with pytest.raises(ExecutionError, match=re.escape("node 'steep' (Elu)")):
        compiled(model, CACHE_DIR="")


def test_who_interrupts_a_load_can_load_again(monkeypatch):
    kept, load, interrupts = open_device("CPU")._programs, programs.NativePrograms._load, [KeyboardInterrupt]
    monkeypatch.setattr(kept, "_kept", OrderedDict())

    def interrupted(programs, source):
        if interrupts:
            raise interrupts.pop()
        return load(programs, source)

    monkeypatch.setattr(programs.NativePrograms, "_load", interrupted)
    model = parser.parse_model(DYNAMIC)
    with pytest.raises(KeyboardInterrupt):
        compiled(model)(feed(model, n=3))
    one, apart = compiled(model), compiled(model, JOIN_LAUNCHES="NO")
    assert equal(one(feed(model, n=3)), apart(feed(model, n=3)))


# ---- counters -------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("perf_count", ["YES", "NO"])
def test_where_the_clock_is_uneven_counted_steps_are_launches(monkeypatch, perf_count):
    monkeypatch.setitem(vars(open_device("CPU")), "tick", 0.0)
    assert not open_device("CPU").link([]).timed
    model = models.transformer(layers=1, hidden=48, heads=4, length=9)
    request = compiled(model, PERF_COUNT=perf_count).create_infer_request()
    assert request.model.env.device is open_device("CPU")
    inputs = feed(model)
    count = launches(request, inputs)
    rows = [row for row in request.get_profiling_info() if row.calls]
    assert (count > 5 and len(rows) > 5) if perf_count == "YES" else count == 1
    assert all(row.device_seconds > 0 for row in rows)

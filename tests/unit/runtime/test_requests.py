"""Requests: shapes, plans, segments, threads, memory that is the caller's, errors that say what to do."""

import threading

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

import tunewright
from tunewright.plugins.single import open_device
from tunewright.runtime.insight.counters import NodeStatus
from tunewright.runtime.plans.plan import SlotPlace


def model(text, version=21):
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : {version}]>\n' + text)


@pytest.fixture
def core():
    return tunewright.Core({"VERIFY_PASSES": "YES"})


DYNAMIC = """g (float[n, 4] x) => (float[n, 4] y) { a = Relu(x) b = Neg(a) y = Exp(b) }"""


def test_symbolic_dimensions_get_a_plan_each(core):
    for classes, shapes in (("NO", [(5, 4), (3, 4)]), ("YES", [(3, 4)])):
        compiled = core.compile_model(model(DYNAMIC), "CPU", {"SHAPE_TEMPLATES": classes})
        assert compiled.program.plans == []
        for n in (3, 5, 3):
            x = np.random.default_rng(n).standard_normal((n, 4)).astype(np.float32)
            np.testing.assert_allclose(compiled({"x": x})["y"], np.exp(-np.maximum(x, 0)), rtol=1e-6)
        plans = compiled.program.plans
        assert [plan.types[0].shape for plan in plans] == shapes or compiled.env.device.family != "native"


def test_the_plan_cache_is_bounded(core):
    compiled = core.compile_model(model(DYNAMIC), config={"PLAN_CACHE_SIZE": 2, "SHAPE_TEMPLATES": "NO"})
    for n in range(1, 6):
        compiled({"x": np.zeros((n, 4), np.float32)})
    assert [plan.types[0].shape[0] for plan in compiled.program.plans] == [4, 5]


def test_a_static_model_is_planned_at_compile_time(core):
    compiled = core.compile_model(model("g (float[2, 4] x) => (float[2, 4] y) { y = Relu(x) }"))
    assert len(compiled.program.plans) == 1


def test_reshape_fixes_symbolic_dimensions(core):
    read = core.read_model(model(DYNAMIC))
    compiled = core.compile_model(read.reshape({"x": [7, 4]}))
    assert compiled.inputs["x"].shape == (7, 4)
    with pytest.raises(tunewright.InputError, match=r"takes float32\[7,4\]"):
        compiled({"x": np.zeros((6, 4), np.float32)})
    assert read.inputs["x"].shape == ("n", 4)
    assert read.reshape([2, 4]).inputs["x"].shape == (2, 4), "one input needs no name"


def test_reshape_of_several_inputs_needs_names(core):
    read = core.read_model(model("g (float[n] x, float[n] y) => (float[n] z) { z = Add(x, y) }"))
    with pytest.raises(tunewright.InputError, match=r"the model has 2 inputs \(name them: \{'x'"):
        read.reshape([3])


DATA_DEPENDENT = """
g (float[n] x, float[4, 3] w) => (float[m, 3] y, int64[k] shape)
{
  at = NonZero(x)
  row = Constant<value_ints = [-1]>()
  flat = Reshape(at, row)
  picked = Gather(x, flat)
  wide = Constant<value_ints = [-1, 4]>()
  rows = Reshape(picked, wide)
  made = MatMul(rows, w)
  y = Relu(made)
  shape = Shape(y)
}
"""


def test_shapes_that_depend_on_data_split_the_plan_in_front_of_heavy_work(core):
    """Where nothing is planned for classes of shapes: else the rest is part of the launch.

    test_data_dependent_sizes.py tests that.
    """
    core.set_property({"SHAPE_TEMPLATES": "NO"})
    compiled = core.compile_model(model(DATA_DEPENDENT))
    rng = np.random.default_rng(0)
    w = rng.standard_normal((4, 3)).astype(np.float32)
    for count in (8, 4, 8):
        x = np.zeros(20, np.float32)
        x[rng.permutation(20)[:count]] = rng.standard_normal(count)
        out = compiled({"x": x, "w": w})
        np.testing.assert_allclose(out["y"], np.maximum(x[x != 0].reshape(-1, 4) @ w, 0), rtol=1e-5)
        assert out["shape"].tolist() == [count // 4, 3]
    (plan,) = compiled.program.plans
    assert plan.rest is not None
    assert [p.types[0].shape for p in plan.rest.plans] == [(1, 4), (2, 4)]
    for rest in plan.rest.plans:
        assert all(slot.place is not SlotPlace.DYNAMIC for slot in rest.slots), "behind the cut every shape is known"


def test_a_view_with_a_shape_from_data_survives_its_source(core):
    """The source's bytes in the arena are reused while the view still lives."""
    compiled = core.compile_model(
        model(
            """g (float[6] x, int64[2] s) => (float[a, b] y, float[6] z)
            { t = Softmax<axis = 0>(x) v = Reshape(t, s) u = Softmax<axis = 0>(x) z = Softmax<axis = 0>(u)
              c = Softmax<axis = 0>(z) y = Identity(v) }"""
        )
    )
    x = np.arange(6, dtype=np.float32)
    out = compiled({"x": x, "s": np.array([2, 3])})
    expected = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    np.testing.assert_allclose(out["y"].ravel(), expected, rtol=1e-6)


def test_what_comes_back_belongs_to_the_caller(core):
    compiled = core.compile_model(
        model(
            """g (float[2, 3] x) => (float[2, 3] same, float[6] flat, float[2, 3] r, float[2, 3] again, float[3] w)
            <float[3] w = {1, 2, 3}> { same = Identity(x) s = Constant<value_ints = [6]>() 
              r = Relu(x) flat = Reshape(r, s) again = Relu(x) }"""
        )
    )
    request = compiled.create_infer_request()
    x = np.ones((2, 3), np.float32)
    first = request.infer({"x": x})
    for value in first.values():
        value[...] = 9
    assert (x == 1).all()
    second = request.infer({"x": x})
    for name, value in second.items():
        assert not (value == 9).any(), name
        for other in first.values():
            assert not np.shares_memory(value, other)
    arrays = list(second.values())
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])


def test_requests_of_one_model_run_in_several_threads(core):
    compiled = core.compile_model(
        model("g (float[64, 64] x) => (float[64, 64] y) { a = MatMul(x, x) b = Tanh(a) y = Exp(b) }")
    )
    rng = np.random.default_rng(1)
    failures = []

    def work(seed):
        x = np.random.default_rng(seed).standard_normal((64, 64)).astype(np.float32)
        expected = np.exp(np.tanh(x @ x))
        for _ in range(20):
            if not np.allclose(compiled({"x": x})["y"], expected, rtol=1e-4):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(int(s),)) for s in rng.integers(0, 99, 6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "input 'x': is missing"),
        ({"x": None}, "input 'x': is missing"),
        ({"q": 1}, "there is no input 'q' .*the inputs are x"),
        ({"x": np.zeros((3, 4))}, "takes float32, not float64 .*astype"),
        ({"x": np.zeros((3, 5), np.float32)}, r"takes float32\[n,4\], not shape \[3, 5\]"),
        ({"x": np.zeros((3,), np.float32)}, r"not shape \[3\]"),
        ({"x": object()}, "input 'x': takes .*, and this is no array of it"),
        ({"x": [[1, 2], [3]]}, "input 'x': takes .*, and this is no array of it"),
    ],
)
def test_wrong_inputs_are_named(core, inputs, message):
    compiled = core.compile_model(model(DYNAMIC))
    with pytest.raises(tunewright.InputError, match=message):
        compiled(inputs)


def test_equal_symbols_must_have_equal_sizes(core):
    compiled = core.compile_model(model("g (float[n] x, float[n] y) => (float[n] z) { z = Add(x, y) }"))
    with pytest.raises(tunewright.InputError, match="has n = 3, but input 'x' has n = 2"):
        compiled({"x": np.zeros(2, np.float32), "y": np.zeros(3, np.float32)})


def test_counters_have_a_row_for_every_node(core):
    text = """g (float[2, 8] x, bool c) => (float[16] y, float[2, 8] z)
    {
      one = Constant<value_float = 1.0>()
      two = Add(one, one)
      a = Relu(x)
      b = Mul(a, two)
      s = Constant<value_ints = [16]>()
      soft = Softmax(b)
      y = Reshape(soft, s)
      z = If(c) <
        then_branch = t () => (float[2, 8] p) { p = Neg(x) },
        else_branch = e () => (float[2, 8] q) { r = Abs(x) q = Exp(r) }
      >
    }"""
    proto = model(text)
    for i, node in enumerate(proto.graph.node):
        node.name = node.output[0] or str(i)
        for attribute in node.attribute:
            for inner in attribute.g.node:
                inner.name = inner.output[0]
    compiled = core.compile_model(proto, config={"PERF_COUNT": "YES", "JOIN_LAUNCHES": "NO"})
    request = compiled.create_infer_request()
    assert {row.status for row in request.get_profiling_info()} == {NodeStatus.NOT_RUN}, "no inference yet"
    request.infer({"x": np.ones((2, 8), np.float32), "c": np.asarray(True)})
    rows = {row.name: row for row in request.get_profiling_info()}
    status = {name: row.status for name, row in rows.items()}
    assert status["two"] is NodeStatus.OPTIMIZED_OUT, "folded"
    assert status["soft"] is NodeStatus.EXECUTED and rows["soft"].calls == 1 and rows["soft"].launches == 1
    assert rows["soft"].kernel == "opencl.softmax" and rows["soft"].device_seconds > 0 == rows["soft"].host_seconds
    assert status["y"] is NodeStatus.OPTIMIZED_OUT, "a view moves nothing"
    assert status["p"] is NodeStatus.EXECUTED
    assert status["q"] is NodeStatus.NOT_RUN and status["r"] is NodeStatus.NOT_RUN
    assert rows["z"].host_seconds > 0


def test_the_arena_is_shared_and_concatenation_writes_in_place(core):
    compiled = core.compile_model(
        model(
            """g (float[1, 4, 8] x) => (float[1, 8, 8] y)
            { a = Softmax(x) b = LogSoftmax(x) c = Concat<axis = 1>(a, b) 
              d = Softmax(c) e = Softmax(d) y = Softmax(e) }"""
        )
    )
    (plan,) = compiled.program.plans
    steps = {step.node.op + str(i): step for i, step in enumerate(plan.steps)}
    assert steps["Concat2"].optimized_out
    size = 8 * 8 * 4
    assert plan.arena_bytes == 2 * size, "the concatenation and one more buffer"


@pytest.mark.parametrize(
    "text",
    [
        "a = Sin(x) s = Slice(a, zero, one, zero) y = Add(a, s)",  # row 0 is added to all, itself included
        "a = Sin(x) s = Reshape(a, back) m = MatMul(s, w) y = Add(m, a)",  # the product reads what the sum is added to
    ],
)
def test_nothing_is_overwritten_that_a_view_still_reads(core, text):
    """References compute first and write then; a kernel need not, so the plan must not ask for it."""
    weights = "<int64[1] zero = {0}, int64[1] one = {1}, int64[2] back = {4, 4}, float[4, 4] w>"
    proto = model(f"g (float[4, 4] x) => (float[4, 4] z) {weights} {{ {text} z = Softmax(y) }}")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    plan = core.compile_model(proto, config={"DISABLED_PASSES": "same-shape"}).program.plans[0]
    storage = {slot.name: slot.storage for slot in plan.slots}
    assert storage["a"] == storage["s"] >= 0
    assert storage["y"] != storage["a"]


def test_loop_scan_and_nested_capture(core):
    text = """g (int64 n, float[3] x) => (float[3] total, float[m, 3] rows)
    {
      yes = Constant<value = bool {1}>()
      start = Sub(x, x)
      total, rows = Loop(n, yes, start) <
        body = b (int64 i, bool go, float[3] sum) => (bool again, float[3] next, float[3] row) {
          again = Identity(go)
          f = Cast<to = 1>(i)
          row = Mul(x, f)
          next = Add(sum, row)
        }
      >
    }"""
    compiled = core.compile_model(model(text))
    x = np.array([1, 2, 3], np.float32)
    for n in (0, 1, 4):
        out = compiled({"n": np.asarray(n, np.int64), "x": x})
        np.testing.assert_allclose(out["total"], x * sum(range(n)))
        assert out["rows"].shape == (n, 3)


@pytest.mark.parametrize("trips", [0, 1, 2])
def test_what_a_loop_without_iterations_returns_has_memory_of_its_own(core, trips):
    """Where the loop does nothing its results are its inputs, whose place in the arena the next steps take over."""
    compiled = core.compile_model(
        model(
            """g (float[4] x, int64 n) => (float[4] z, float[4] u, float[4] w) {
                q = Sin(x)
                y = Loop(n, , q) <body = one (int64 i, bool c, float[4] a) => (bool d, float[4] e) {
                    d = Identity(c) e = Neg(a) }>
                w = Loop(n, , x) <body = two (int64 i, bool c, float[4] a) => (bool d, float[4] e) {
                    d = Identity(c) e = Neg(a) }>
                r = Cos(x) s = Softmax(r) u = Exp(s) z = Softmax(y) }"""
        )
    )
    x = np.arange(4, dtype=np.float32)
    got = compiled({"x": x, "n": np.array(trips)})
    e = np.exp(np.sin(x) * (-1) ** trips)
    np.testing.assert_allclose(got["z"], e / e.sum(), rtol=1e-6)
    np.testing.assert_array_equal(got["w"], x * (-1) ** trips)
    assert not np.shares_memory(got["w"], x)


def test_a_list_that_comes_back_is_the_callers(core):
    compiled = core.compile_model(model("g (seq(float[2]) s) => (seq(float[2]) t) { t = Identity(s) }"))
    given = [np.ones(2, np.float32), np.zeros(2, np.float32)]
    for a, b in zip(compiled({"s": given})["t"], given, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.shares_memory(a, b)


def test_sequences_and_optionals_go_in_and_out(core):
    seq = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)
    out = helper.make_tensor_sequence_value_info("t", TensorProto.FLOAT, None)
    graph = helper.make_graph(
        [helper.make_node("SequenceErase", ["s", "i"], ["t"])],
        "g",
        [seq, helper.make_tensor_value_info("i", TensorProto.INT64, [])],
        [out],
    )
    compiled = core.compile_model(helper.make_model(graph))
    arrays = [np.full(k, k, np.float32) for k in (1, 2, 3)]
    result = compiled({"s": arrays, "i": np.asarray(1, np.int64)})["t"]
    assert [a.shape for a in result] == [(1,), (3,)]


def test_an_error_while_running_names_the_node(core):
    compiled = core.compile_model(model("g (float[n] x, int64[k] s) => (float[a] y) { y = Reshape(x, s) }"))
    with pytest.raises(tunewright.TunewrightError, match=r"node 'y' \(Reshape\)"):
        compiled({"x": np.zeros(3, np.float32), "s": np.array([4])})


def test_properties_are_those_of_the_device_or_settings():
    core = tunewright.Core({"PLAN_CACHE_SIZE": 3})
    assert core.get_property("cpu", "PLAN_CACHE_SIZE") == 3
    core.set_property({"PLAN_CACHE_SIZE": 4})
    assert core.get_property("CPU", "plan_cache_size") == 4
    assert core.get_property("CPU", "AVAILABLE_DEVICES") == core.available_devices
    known = core.get_property("CPU", "SUPPORTED_PROPERTIES")
    answers = {key: core.get_property("CPU", key) for key, about in known.items() if not about["needs"]}
    unset = {key for key, value in answers.items() if value is None}
    assert all(key.endswith(("_PATH", "_DIR")) for key in unset), "a folder of the user's choice, and nothing else"
    assert open_device("cpu") is open_device("CPU")
    with pytest.raises(tunewright.SettingsError, match="did you mean PLAN_CACHE_SIZE"):
        core.get_property("CPU", "PLAN_CACHE")


def test_model_from_file_bytes_and_proto(core, tmp_path):
    proto = model(DYNAMIC)
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    x = np.ones((1, 4), np.float32)
    results = [
        core.compile_model(source)({"x": x})["y"] for source in (path, str(path), proto.SerializeToString(), proto)
    ]
    assert all(np.array_equal(r, results[0]) for r in results)


def test_what_is_wrong_in_a_branch_never_taken_does_no_harm(core):
    text = """g (float[2, 3] x, bool c) => (float[a, b] y)
    {
      y = If(c) <
        then_branch = t () => (float[a, b] p) { p = Relu(x) },
        else_branch = e () => (float[a, b] q) { w = Constant<value = float[2] {1, 2}>() v = Exp(w) q = MatMul(x, v) }
      >
    }"""
    compiled = core.compile_model(model(text))
    x = np.ones((2, 3), np.float32)
    assert (compiled({"x": x, "c": np.asarray(True)})["y"] == x).all()
    with pytest.raises(tunewright.ModelError, match=r"node 'q' \(MatMul\)"):
        compiled({"x": x, "c": np.asarray(False)})

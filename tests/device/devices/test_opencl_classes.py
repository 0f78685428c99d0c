"""Classes of shapes on OpenCL devices: one plan for many sizes, caches that grow, loops whose bodies are planned once.

Each test runs on a device that shares memory with the host, and on the same device treated as one that does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import parser

import tunewright
from device.runtime.test_plan_templates import FLOAT, Build, compare, decoder, picture, pictures, sentence, sentences
from helpers import opencl_runtime
from tunewright.devices.opencl.enqueued import BoundLaunches
from tunewright.devices.remote import RemoteContext, RemoteTensor
from tunewright.runtime.plans.program import Program
from tunewright.runtime.plans.template import Template

ort = pytest.importorskip("onnxruntime")
pytestmark = opencl_runtime.needs_opencl
Array = np.ndarray[Any, Any]
PAIRS = {f"past_{n}{k}": f"{n}{k}" for n in "kv" for k in range(2)}
GROWING_ROWS = """<ir_version: 8, opset_import: ["" : 18]>
g (float[k,4] x, int64 n) => (float[m,4] y)
{
    t = Constant <value = bool {1}> ()
    y = Loop (n, t, x) <body = b (int64 i, bool go, float[a,4] s) => (bool on, float[c,4] z)
    {
        on = Identity(go)
        axes = Constant <value_ints = [0]> ()
        q = ReduceMean <keepdims = 1> (s, axes)
        r = Tanh(q)
        z = Concat <axis = 0> (s, r)
    }>
}
"""
POSITIVE_ROWS = """<ir_version: 8, opset_import: ["" : 18]>
g (float[n,8] x, float[8,16] w) => (float[m,16] y)
<int64[1] axes = {1}, int64[1] first = {0}, float zero = {0}>
{
    s = ReduceSum <keepdims = 0> (x, axes)
    keep = Greater(s, zero)
    at = NonZero(keep)
    i = Squeeze(at, first)
    rows = Gather <axis = 0> (x, i)
    a = MatMul(rows, w)
    y = Relu(a)
}
"""


@pytest.fixture(params=["shared memory", "memory of its own"])
def device(request: pytest.FixtureRequest) -> Any:
    """What a model is compiled for."""
    if request.param == "shared memory":
        return opencl_runtime.NAME
    return RemoteContext(opencl_runtime.device(shares_memory=False))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The graphs that were planned, one for each plan."""
    found: list[str] = []
    real = Program._typed

    def typed(self: Program, graph: Any, *given: Any) -> Any:
        found.append(graph.name)
        return real(self, graph, *given)

    monkeypatch.setattr(Program, "_typed", typed)
    return found


def session(model: Any) -> Any:
    text = model if isinstance(model, bytes) else model.SerializeToString()
    return ort.InferenceSession(text, providers=["CPUExecutionProvider"])


def first(results: dict[str, Array]) -> Array:
    return next(iter(results.values()))


# ---- sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 40))])
def test_random_pictures(device: Any, seed: int) -> None:
    compare(picture(seed), pictures(np.random.default_rng(seed), 8), 7, device)


@pytest.mark.parametrize("seed", [*range(1, 4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 40))])
def test_random_sentences(device: Any, seed: int) -> None:
    compare(sentence(seed), sentences(np.random.default_rng(seed), 8), 7, device)


def test_tables_of_sizes(device: Any) -> None:
    """A Resize to the size of another picture takes tables that requests make."""
    b = Build(0)
    small = b.add("Conv", "x", b.weight(4, 4, 3, 3), pads=[1] * 4, strides=[2, 2])
    whole = b.add("Resize", small, "", "", b.add("Shape", "x"), mode="linear")
    model = b.model({"x": (FLOAT, ["batch", 4, "h", "w"])}, b.add("Add", whole, "x"))
    compare(model, pictures(np.random.default_rng(0), 8), 2, device)


def test_kernels_that_are_made_for_some_sizes_alone(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the place of the plan's own ones, and leave it again: here, all of them do at even first sizes."""
    computed = Template._computed

    def failing(template: Template, sizes: tuple[int, ...]) -> Any:
        found = computed(template, sizes)
        if found is None or sizes[0] % 2:
            return found
        return found._replace(failing=range(len(template._kernels)))

    monkeypatch.setattr(Template, "_computed", failing)
    compiled = tunewright.Core().compile_model(picture(3), device)
    alone = tunewright.Core().compile_model(picture(3), device, {"SHAPE_TEMPLATES": "NO"})
    request, rng = compiled.create_infer_request(), np.random.default_rng(3)
    shapes = pictures(rng, 8)
    for shape in [*shapes, *reversed(shapes), shapes[0], shapes[4]]:
        x = rng.standard_normal(shape).astype(np.float32)
        np.testing.assert_allclose(first(request.infer({"x": x})), first(alone({"x": x})), rtol=0, atol=1e-4)
    (plan,) = compiled.program.plans
    posed = {frozenset(fit.sizes.posed) for fit in plan.template._fits.values() if fit is not None}
    assert len(posed) > 1, "there are sizes with such kernels, and sizes without"


def test_nothing_is_compiled_or_planned_behind_the_first_shapes(
    device: Any, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = tunewright.Core().compile_model(sentence(5), device)
    request, rng = compiled.create_infer_request(), np.random.default_rng(0)
    for shape in [(1, 9, 8), (2, 40, 8)]:
        request.infer({"x": np.zeros(shape, np.float32)})
    monkeypatch.setattr(type(compiled.env.device), "build", lambda self, source: pytest.fail("a kernel was compiled"))
    made.clear()
    for n in rng.integers(20, 80, 30):
        request.infer({"x": np.zeros((2, int(n), 8), np.float32)})
    assert not made


def test_a_size_that_is_known_changes_no_argument(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    request = tunewright.Core().compile_model(sentence(3), device).create_infer_request()
    x = np.ones((2, 30, 8), np.float32)
    for n in (30, 50, 30):
        expected = first(request.infer({"x": np.resize(x, (2, n, 8))})).copy()
    monkeypatch.setattr(BoundLaunches, "fit", lambda *_: pytest.fail("arguments were set again"))
    for _ in range(3):
        np.testing.assert_array_equal(first(request.infer({"x": x})), expected)


def test_results_of_earlier_sizes_stay_as_they_are(device: Any) -> None:
    request, rng = tunewright.Core().compile_model(sentence(3), device).create_infer_request(), np.random.default_rng(0)
    given = [rng.standard_normal((2, n, 8)).astype(np.float32) for n in (7, 50, 3, 90, 20)]
    results = [first(request.infer({"x": x})) for x in given]
    kept = [y.copy() for y in results]
    for x, y in zip(reversed(given), reversed(kept), strict=True):
        assert np.array_equal(first(request.infer({"x": x})), y)
    assert all(np.array_equal(a, b) for a, b in zip(results, kept, strict=True))


def test_memory_of_callers_and_remote_tensors_of_other_sizes(device: Any) -> None:
    compiled = tunewright.Core().compile_model(sentence(3), device)
    request, (name,) = compiled.create_infer_request(), compiled.outputs
    x = {n: np.random.default_rng(n).standard_normal((2, n, 8)).astype(np.float32) for n in (9, 40)}
    expected = {n: request.infer({"x": x[n]})[name].copy() for n in (9, 40, 9)}
    remote = {n: request.infer({"x": x[n]}, remote=True)[name] for n in (40, 9, 40)}
    for n in (40, 9, 40):
        mine = np.zeros_like(expected[n])
        assert request.infer({"x": x[n]}, outputs={name: mine})[name] is mine
        np.testing.assert_array_equal(mine, expected[n])
        np.testing.assert_array_equal(remote[n].numpy(), expected[n])
        given, queue = compiled.context.empty(x[n].shape, "float32"), compiled.env.device.queue()
        queue.put(x[n], given.memory)
        queue.finish()
        np.testing.assert_array_equal(request.infer({"x": given})[name], expected[n])
        with pytest.raises(tunewright.InputError, match="for these inputs"):
            request.infer({"x": x[n]}, outputs={name: np.zeros_like(expected[49 - n])})


def test_counters_are_those_of_every_step(device: Any) -> None:
    compiled = tunewright.Core().compile_model(sentence(1), device, {"PERF_COUNT": "YES"})
    plain = tunewright.Core().compile_model(sentence(1), device)
    request = compiled.create_infer_request()
    for n in (20, 33, 20):
        x = np.random.default_rng(n).standard_normal((2, n, 8)).astype(np.float32)
        np.testing.assert_array_equal(first(request.infer({"x": x})), first(plain({"x": x})))
        ran = [row for row in request.get_profiling_info() if row.launches]
        assert len(ran) > 3 and all(row.device_seconds > 0 for row in ran)
    assert any(plan.template is not None for plan in compiled.program.plans)


def test_memory_of_many_sizes_is_that_of_the_largest(device: Any) -> None:
    compiled = tunewright.Core().compile_model(picture(2), device)
    request = compiled.create_infer_request()
    request.infer({"x": np.zeros((1, 4, 60, 90), np.float32)})
    before = compiled.memory_statistics()
    for shape in pictures(np.random.default_rng(0), 20):
        request.infer({"x": np.zeros(shape, np.float32)})
    after = compiled.memory_statistics()
    for purpose in ("arenas", "staging", "scratch"):
        assert after[purpose] <= 1.5 * before[purpose], purpose


# ---- growing caches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [1, 5])
def test_a_decoder_makes_few_plans(device: Any, prompt: int) -> None:
    model = decoder()
    compiled, theirs = tunewright.Core().compile_model(model, device), session(model)
    request, names = compiled.create_infer_request(), [o.name for o in theirs.get_outputs()]
    caches = {name: np.zeros((2, 4, 0, 8), np.float32) for name in compiled.inputs if name != "ids"}
    rng = np.random.default_rng(0)
    for step in range(40):
        feeds = {"ids": rng.integers(0, 50, (2, prompt if step == 0 else 1)), **caches}
        expected, got = dict(zip(names, theirs.run(None, feeds), strict=True)), request.infer(feeds)
        for name in names:
            np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=1e-4, err_msg=f"{step} {name}")
        caches = {f"past_{name}": got[name] for name in names if name != "logits"}
    assert len(compiled.program.plans) <= 4


def test_rows_are_appended_where_the_others_are() -> None:
    request = tunewright.Core().compile_model(decoder(), opencl_runtime.NAME).create_infer_request()
    theirs, rng = session(decoder()), np.random.default_rng(0)
    names = [o.name for o in theirs.get_outputs()]
    ours = {name: np.zeros((2, 4, 0, 8), np.float32) for name in PAIRS}
    known, moved, old = dict(ours), 0, []
    for step in range(50):
        ids = rng.integers(0, 50, (2, 3 if step == 20 else 1))
        where = ours["past_k0"].__array_interface__["data"][0]
        results, expected = request.infer({"ids": ids, **ours}), theirs.run(None, {"ids": ids, **known})
        for name, value in zip(names, expected, strict=True):
            np.testing.assert_allclose(results[name], value, rtol=0, atol=1e-4, err_msg=f"{step} {name}")
        ours = {past: results[name] for past, name in PAIRS.items()}
        known = {past: expected[names.index(name)] for past, name in PAIRS.items()}
        old.append((ours["past_k0"], ours["past_k0"].copy()))
        moved += where != ours["past_k0"].__array_interface__["data"][0]
    assert moved <= 5, "plans for no rows, for one and for three new ones are others, and begin with a copy"
    assert all(np.array_equal(view, copy) for view, copy in old), "what a caller holds stays"


def test_requests_with_states(device: Any) -> None:
    compiled = tunewright.Core().compile_model(decoder(), device, stateful=PAIRS)
    request, rng = compiled.create_infer_request(), np.random.default_rng(0)
    theirs = session(decoder())
    names = [o.name for o in theirs.get_outputs()]
    for _ in range(2):
        states = {name: np.zeros((2, 4, 0, 8), np.float32) for name in PAIRS}
        for count in (5, 1, 1, 3, 1, 1, 20, 1):
            ids = rng.integers(0, 50, (2, count))
            expected = dict(zip(names, theirs.run(None, {"ids": ids, **states}), strict=True))
            np.testing.assert_allclose(request.infer({"ids": ids})["logits"], expected["logits"], rtol=0, atol=1e-4)
            states = {past: expected[name] for past, name in PAIRS.items()}
        if not compiled.alone.env.device.shares_memory:
            assert all(isinstance(request._values[name], RemoteTensor) for name in PAIRS), "they stay on the device"
        for variable in request.query_state():
            np.testing.assert_allclose(variable.state, states[variable.name], rtol=0, atol=1e-4)
        request.reset_state()


# ---- control flow ------------------------------------------------------------------------------------------------


def test_the_body_of_a_growing_loop_is_planned_once(device: Any, made: list[str]) -> None:
    model = parser.parse_model(GROWING_ROWS)
    request, theirs = tunewright.Core().compile_model(model, device).create_infer_request(), session(model)
    rng = np.random.default_rng(0)
    for turns, (rows, count) in enumerate([(3, 30), (3, 7), (3, 45), (5, 20)]):
        feeds = {"x": rng.standard_normal((rows, 4)).astype(np.float32), "n": np.array(count)}
        np.testing.assert_allclose(first(request.infer(feeds)), theirs.run(None, feeds)[0], rtol=0, atol=1e-5)
        assert len(made) <= 4, f"turn {turns}: the model, and its body for a first number of rows and for others"


def test_rows_that_data_selects_make_no_further_plans(device: Any, made: list[str]) -> None:
    model = parser.parse_model(POSITIVE_ROWS)
    request, theirs = tunewright.Core().compile_model(model, device).create_infer_request(), session(model)
    rng = np.random.default_rng(0)
    w = rng.standard_normal((8, 16)).astype(np.float32)
    for turn in range(12):
        feeds = {"x": rng.standard_normal((60, 8)).astype(np.float32) + (0.1 * turn - 0.6), "w": w}
        np.testing.assert_allclose(first(request.infer(feeds)), theirs.run(None, feeds)[0], rtol=0, atol=1e-4)
    assert len(made) <= 3, "the model for its size, and what follows for any number of rows"

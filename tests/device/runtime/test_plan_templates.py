"""Plans for classes of shapes compute what plans for each shape do, and serve the shapes that they should."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tunewright
from native.children import python
from native.harness import native

ort = pytest.importorskip("onnxruntime")
pytestmark = native
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


class Build:
    """A model of random operators over tensors with open sizes."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def const(self, array: Any, dtype: Any = np.float32) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def ints(self, *values: int) -> str:
        return self.const(values, np.int64)

    def weight(self, *shape: int) -> str:
        scale = 1 / np.sqrt(max(1, np.prod(shape[1:])))
        return self.const(self.rng.standard_normal(shape) * scale)

    def add(self, op: str, *inputs: str, outputs: int = 1, **attrs: Any) -> Any:
        names = [f"{op}{len(self.nodes)}_{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, **attrs))
        return names[0] if outputs == 1 else names

    def size(self, x: str, axis: int) -> str:
        return self.add("Gather", self.add("Shape", x), self.ints(axis), axis=0)

    def shape(self, *parts: str | int) -> str:
        return self.add("Concat", *[self.ints(p) if isinstance(p, int) else p for p in parts], axis=0)

    def model(self, inputs: dict[str, tuple[int, list[Any]]], output: str) -> bytes:
        given = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
        made = [helper.make_tensor_value_info(output, FLOAT, None)]
        graph = helper.make_graph(self.nodes, "open", given, made, self.weights)
        opsets = [helper.make_opsetid("", 18)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def picture(seed: int, steps: int = 7) -> bytes:
    """Convolutions, pools, resizes, concatenations and shape arithmetic over a picture of open height and width."""
    b = Build(seed)
    x, channels = "x", 4
    for _ in range(steps):
        kind = int(b.rng.integers(12))
        if kind < 4:
            out, side = int(b.rng.choice([4, 8, 16, 24])), int(b.rng.choice([1, 3]))
            stride = int(b.rng.choice([1, 1, 2]))
            x = b.add("Conv", x, b.weight(out, channels, side, side), b.weight(out), pads=[side // 2] * 4,
                      strides=[stride] * 2)  # fmt: skip
            channels = out
        elif kind == 4:
            x = b.add("Conv", x, b.weight(channels, 1, 3, 3), pads=[1] * 4, group=channels)
        elif kind == 5:
            x = b.add("Relu", x)
        elif kind == 6:
            x = b.add("MaxPool", x, kernel_shape=[2, 2], strides=[1, 1], pads=[0, 0, 1, 1])
        elif kind == 7:
            x = b.add("Resize", x, "", b.const([1, 1, 2, 2]), mode="nearest", nearest_mode="floor",
                      coordinate_transformation_mode="asymmetric")  # fmt: skip
            x = b.add("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2])
        elif kind == 8:
            gate = b.add("Sigmoid", b.add("GlobalAveragePool", x))
            x = b.add("Mul", x, gate)
        elif kind == 9:
            x = b.add("Concat", x, b.add("Tanh", x), axis=1)
            channels *= 2
        elif kind == 10:
            x = b.add("Slice", x, b.ints(0, 0), b.ints(2**62, -1), b.ints(2, 3))
            x = b.add("Pad", x, b.ints(0, 0, 0, 1, 0, 0, 0, 0))
        else:
            flat = b.add("Reshape", x, b.shape(b.size(x, 0), b.size(x, 1), -1))
            x = b.add("Reshape", b.add("Softmax", flat, axis=-1), b.add("Shape", x))
    return b.model({"x": (FLOAT, ["batch", 4, "h", "w"])}, b.add("Identity", x))


def sentence(seed: int, steps: int = 6) -> bytes:
    """Products, attention, normalisations, masks and positions over a sequence of open length."""
    b, width, heads = Build(seed), 24, 3
    x = b.add("MatMul", "x", b.weight(8, width))
    length = b.size("x", 1)
    for _ in range(steps):
        kind = int(b.rng.integers(9))
        if kind == 8:  # from the last one to the first
            x = b.add("Slice", x, b.ints(-1), b.ints(-(2**63)), b.ints(1), b.ints(-1))
        elif kind == 0:
            x = b.add("Add", b.add("MatMul", x, b.weight(width, width)), b.weight(width))
        elif kind == 1:
            x = b.add("LayerNormalization", x, b.weight(width), b.weight(width))
        elif kind == 2:
            mixed = [b.add("MatMul", x, b.weight(width, width)) for _ in "qkv"]
            parts = [b.add("Reshape", part, b.ints(0, 0, heads, -1)) for part in mixed]
            perms = [0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]
            q, k, v = (b.add("Transpose", part, perm=perm) for part, perm in zip(parts, perms, strict=True))
            scores = b.add("Softmax", b.add("MatMul", q, k), axis=-1)
            mixed = b.add("Transpose", b.add("MatMul", scores, v), perm=[0, 2, 1, 3])
            x = b.add("Add", x, b.add("Reshape", mixed, b.shape(b.size("x", 0), length, width)))
        elif kind == 3:
            at = b.add("Range", b.const(0, np.int64), b.add("Squeeze", length, b.ints(0)), b.const(1, np.int64))
            x = b.add("Add", x, b.add("Gather", b.weight(100, width), at))
        elif kind == 4:
            row = b.add("Range", b.const(0, np.int64), b.add("Squeeze", length, b.ints(0)), b.const(1, np.int64))
            late = b.add("Less", b.add("Unsqueeze", row, b.ints(1)), b.add("Unsqueeze", row, b.ints(0)))
            mask = b.add("Where", late, b.const(-1e4), b.const(0))
            scores = b.add("Add", b.add("MatMul", x, b.add("Transpose", x, perm=[0, 2, 1])), mask)
            x = b.add("MatMul", b.add("Softmax", scores, axis=-1), x)
        elif kind == 5:
            first, last = b.add("Split", x, b.ints(8, 16), outputs=2, axis=2)
            x = b.add("Concat", last, b.add("Erf", first), axis=2)
        elif kind == 6:
            whole = b.add("Expand", b.weight(1, 1, width), b.shape(b.size(x, 0), 1, 1))
            x = b.add("Slice", b.add("Concat", whole, x, axis=1), b.ints(1), b.ints(2**62), b.ints(1))
        else:
            x = b.add("Sub", x, b.add("ReduceMean", x, b.ints(1), keepdims=1))
    return b.model({"x": (FLOAT, ["batch", "n", 8])}, b.add("Identity", x))


def compare(model: bytes, shapes: list[tuple[int, ...]], most: int, device: Any = "CPU") -> int:
    """Results at all shapes are those of plans for each and of ONNX Runtime. Answers how many plans there are."""
    rng, core = np.random.default_rng(0), tunewright.Core()
    classes, each = (core.compile_model(model, device, {"SHAPE_TEMPLATES": way}) for way in ("YES", "NO"))
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # as written: its optimiser takes the zeros of a Pad in front of a MaxPool for minus infinity
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    request = classes.create_infer_request()
    for shape in shapes:
        x = rng.standard_normal(shape).astype(np.float32)
        (got,), (expected,) = request.infer({"x": x}).values(), each({"x": x}).values()
        (other,) = session.run(None, {"x": x})
        assert got.shape == expected.shape == other.shape
        scale = max(1.0, float(np.abs(other).max(initial=0)))
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * scale, err_msg=str(shape))
        np.testing.assert_allclose(got, other, rtol=0, atol=1e-4 * scale, err_msg=str(shape))
    plans = classes.program.plans
    assert any(plan.template is not None for plan in plans), "no plan serves a class of shapes"
    assert len(plans) <= most, [plan.template and plan.template.trace.guard_texts() for plan in plans]
    return len(plans)


def pictures(rng: np.random.Generator, count: int) -> list[tuple[int, ...]]:
    return [(1, 4, int(rng.integers(12, 60)), int(rng.integers(12, 90))) for _ in range(count)]


def sentences(rng: np.random.Generator, count: int) -> list[tuple[int, ...]]:
    return [(int(rng.choice([1, 2, 3])), int(rng.integers(2, 90)), 8) for _ in range(count)]


SHORT, WHOLE = range(10), [pytest.param(seed, marks=pytest.mark.soak) for seed in range(10, 250)]


@pytest.mark.parametrize("seed", [*SHORT, *WHOLE])
@pytest.mark.parametrize(("make", "shapes"), [(picture, pictures), (sentence, sentences)])
def test_random_networks(make: Callable[[int], bytes], shapes: Any, seed: int) -> None:
    compare(make(seed), shapes(np.random.default_rng(seed), 8 if seed in SHORT else 20), 7)


def test_sizes_that_are_computed_with_make_one_plan() -> None:
    """Divided by a width, scaled by the root of a length."""
    b = Build(0)
    width = b.add("Cast", b.size("x", 2), to=FLOAT)
    x = b.add("Div", "x", width)
    x = b.add("Mul", b.add("MatMul", x, b.add("Transpose", x, perm=[0, 2, 1])), b.add("Sqrt", width))
    x = b.add("Where", b.add("Less", x, b.add("Reciprocal", width)), b.const(0), x)
    model = b.model({"x": (FLOAT, ["batch", "n", "w"])}, b.add("Identity", x))
    rng = np.random.default_rng(0)
    assert compare(model, [(2, int(rng.integers(2, 60)), int(rng.integers(20, 90))) for _ in range(12)], 2) <= 2


def test_sizes_that_become_floats_and_sizes_again() -> None:
    """Half of a width, as floats have it: what decides about shapes is a number in the plan."""
    b = Build(0)
    half = b.add("Floor", b.add("Mul", b.add("Cast", b.size("x", 1), to=FLOAT), b.const([0.5])))
    x = b.add("Slice", "x", b.ints(0), b.add("Cast", half, to=INT64), b.ints(1))
    model = b.model({"x": (FLOAT, ["batch", "n"])}, b.add("Softmax", x))
    compare(model, [(2, n) for n in (9, 30, 9, 31, 64)], 5)


def decoder(layers: int = 2, width: int = 32, heads: int = 4) -> bytes:
    """With past keys and values as inputs and present ones as results."""
    b, inputs = Build(0), {"ids": (INT64, ["batch", "n"])}
    x, outputs = b.add("Gather", b.weight(50, width), "ids"), []
    for layer in range(layers):
        parts = []
        for name in "qkv":
            made = b.add("Reshape", b.add("MatMul", x, b.weight(width, width)), b.ints(0, 0, heads, -1))
            made = b.add("Transpose", made, perm=[0, 2, 1, 3])
            if name != "q":
                inputs[f"past_{name}{layer}"] = (FLOAT, ["batch", heads, "past", width // heads])
                b.nodes.append(helper.make_node("Concat", [f"past_{name}{layer}", made], [f"{name}{layer}"], axis=2))
                made = f"{name}{layer}"
                outputs.append(made)
            parts.append(made)
        q, k, v = parts
        scores = b.add("MatMul", q, b.add("Transpose", k, perm=[0, 1, 3, 2]))
        mixed = b.add("MatMul", b.add("Softmax", b.add("Mul", scores, b.const(0.35)), axis=-1), v)
        mixed = b.add("Reshape", b.add("Transpose", mixed, perm=[0, 2, 1, 3]), b.ints(0, 0, width))
        x = b.add("Add", x, b.add("MatMul", mixed, b.weight(width, width)))
    given = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    b.nodes.append(helper.make_node("MatMul", [x, b.weight(width, 50)], ["logits"]))
    made = [helper.make_tensor_value_info(name, FLOAT, None) for name in ["logits", *outputs]]
    graph = helper.make_graph(b.nodes, "decoder", given, made, b.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()


@pytest.mark.parametrize("prompt", [1, 5])
def test_a_decoder_with_a_growing_cache_makes_few_plans(prompt: int) -> None:
    model = decoder()
    compiled = tunewright.Core().compile_model(model, "CPU")
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    request, names = compiled.create_infer_request(), [o.name for o in session.get_outputs()]
    caches = {name: np.zeros((2, 4, 0, 8), np.float32) for name in compiled.inputs if name != "ids"}
    rng = np.random.default_rng(0)
    for step in range(40):
        feeds = {"ids": rng.integers(0, 50, (2, prompt if step == 0 else 1)), **caches}
        expected = dict(zip(names, session.run(None, feeds), strict=True))
        got = request.infer(feeds)
        for name in names:
            np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=1e-4, err_msg=f"{step} {name}")
        caches = {f"past_{name}": got[name] for name in names if name != "logits"}
    assert len(compiled.program.plans) <= 4


def test_results_of_earlier_sizes_stay_as_they_are() -> None:
    compiled = tunewright.Core().compile_model(sentence(3), "CPU")
    request, rng = compiled.create_infer_request(), np.random.default_rng(0)
    given = [rng.standard_normal((2, n, 8)).astype(np.float32) for n in (7, 50, 3, 90, 20)]
    first = [next(iter(request.infer({"x": x}).values())) for x in given]
    kept = [y.copy() for y in first]
    for x, y in zip(reversed(given), reversed(kept), strict=True):
        assert np.array_equal(next(iter(request.infer({"x": x}).values())), y)
    assert all(np.array_equal(a, b) for a, b in zip(first, kept, strict=True))


def test_memory_of_the_callers_for_results_of_other_sizes() -> None:
    compiled = tunewright.Core().compile_model(sentence(3), "CPU")
    request, (name,) = compiled.create_infer_request(), compiled.outputs
    x = {n: np.random.default_rng(n).standard_normal((2, n, 8)).astype(np.float32) for n in (9, 40)}
    expected = {n: request.infer({"x": x[n]})[name].copy() for n in (9, 40, 9)}
    for n in (40, 9, 40):
        mine = np.zeros_like(expected[n])
        assert request.infer({"x": x[n]}, outputs={name: mine})[name] is mine
        assert np.array_equal(mine, expected[n])
        with pytest.raises(tunewright.InputError, match="for these inputs"):
            request.infer({"x": x[n]}, outputs={name: np.zeros_like(expected[49 - n])})


def test_many_threads_with_sizes_of_their_own() -> None:
    compiled = tunewright.Core().compile_model(picture(1), "CPU")
    rng = np.random.default_rng(0)
    given = [rng.standard_normal((1, 4, 16 + n, 20 + 3 * n)).astype(np.float32) for n in range(12)]
    expected = [next(iter(compiled({"x": x}).values())).copy() for x in given]
    wrong: list[int] = []

    def work(seed: int) -> None:
        request, order = compiled.create_infer_request(), np.random.default_rng(seed)
        for k in order.integers(0, len(given), 60):
            if not np.array_equal(next(iter(request.infer({"x": given[k]}).values())), expected[k]):
                wrong.append(int(k))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_of_many_shapes_is_that_of_the_largest() -> None:
    compiled = tunewright.Core().compile_model(picture(2), "CPU")
    request = compiled.create_infer_request()
    request.infer({"x": np.zeros((1, 4, 60, 90), np.float32)})
    before = compiled.memory_statistics()
    for shape in pictures(np.random.default_rng(0), 40):
        request.infer({"x": np.zeros(shape, np.float32)})
    after = compiled.memory_statistics()
    assert after["arenas"] <= 1.5 * before["arenas"] and after["constants"] <= 1.2 * before["constants"]


def test_mistakes_are_those_of_a_plan_for_the_shape() -> None:
    b = Build(0)
    x = b.add("Reshape", "x", b.ints(-1, 6))
    model = b.model({"x": (FLOAT, ["n", 4])}, b.add("Relu", x))
    compiled = tunewright.Core().compile_model(model, "CPU")
    for n in (3, 6, 9):
        assert compiled({"x": np.zeros((n, 4), np.float32)})
    for n in (4, 5):
        with pytest.raises(tunewright.TunewrightError, match="cannot become"):
            compiled({"x": np.zeros((n, 4), np.float32)})
    assert compiled({"x": np.zeros((12, 4), np.float32)})


def test_nothing_is_compiled_behind_the_first_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = tunewright.Core().compile_model(sentence(5), "CPU")
    request, rng = compiled.create_infer_request(), np.random.default_rng(0)
    for shape in [(1, 9, 8), (2, 40, 8)]:
        request.infer({"x": np.zeros(shape, np.float32)})
    device = compiled.env.device
    monkeypatch.setattr(type(device), "build", lambda self, source: pytest.fail("a kernel was compiled"))
    for n in rng.integers(20, 80, 30):
        request.infer({"x": np.zeros((2, int(n), 8), np.float32)})


def test_costs_of_launches_grow_with_sizes() -> None:
    """The pool learns only that launches are shorter: what it learned at small sizes is too little for large ones."""
    compiled = tunewright.Core().compile_model(sentence(3), "CPU")
    request = compiled.create_infer_request()
    small, large = (np.zeros((2, n, 8), np.float32) for n in (6, 60))
    for _ in range(3):
        request.infer({"x": small})
    ((_, frame),) = request.executor.frames()
    (bound,) = (one.bound for one in frame.segments)
    known = np.array(bound.costs())
    frame.fit([large])
    expected = np.array(bound.costs())
    assert known.any() and (expected[known > 100] >= 9 * known[known > 100]).all()
    request.infer({"x": large})
    learned = np.array(bound.costs())
    frame.fit([small])
    assert (np.array(bound.costs()) == learned).all(), "smaller sizes change nothing"


@pytest.mark.parametrize("channels", [3, 5, 12])
def test_plain_convolutions_serve_all_sizes(channels: int) -> None:
    """Their tables of offsets are made for each size."""
    b = Build(channels)
    x = b.add("Conv", "x", b.weight(7, channels, 3, 5), b.weight(7), pads=[1, 2, 1, 2], strides=[1, 2])
    x = b.add("ConvTranspose", b.add("Relu", x), b.weight(7, 3, 4, 4), strides=[2, 2], pads=[1] * 4)
    model = b.model({"x": (FLOAT, ["batch", channels, "h", "w"])}, x)
    shapes = [(2, channels, h, w) for h, w in [(20, 30), (17, 64), (40, 25), (33, 90)]]
    compare(model, shapes, 1)
    compiled = tunewright.Core().compile_model(model, "CPU")
    for shape in shapes:
        compiled({"x": np.zeros(shape, np.float32)})
    (plan,) = compiled.program.plans
    assert plan.template is not None and [plan.template.misses((2, *shape[2:])) for shape in shapes] == [0] * 4


def test_requests_run_while_a_plan_for_far_sizes_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = tunewright.Core().compile_model(sentence(3), "CPU")
    request, made, may_end = compiled.create_infer_request(), threading.Event(), threading.Event()
    request.infer({"x": np.zeros((2, 8, 8), np.float32)})
    typed = type(compiled.program)._typed

    def slow(*arguments: Any) -> Any:
        made.set()
        assert may_end.wait(60)
        return typed(*arguments)

    monkeypatch.setattr(type(compiled.program), "_typed", slow)
    request.infer({"x": np.zeros((2, 80, 8), np.float32)})
    assert made.wait(60), "no plan is made beside"
    for n in (70, 9, 30, 90):  # they wait for nothing
        request.infer({"x": np.zeros((2, n, 8), np.float32)})
    assert len(compiled.program.plans) == 1
    may_end.set()
    (thread,) = (one for one in threading.enumerate() if one.name == "tunewright-plans")
    thread.join(60)
    assert len(compiled.program.plans) == 2
    new = compiled.program.plans[-1]
    assert request.executor.has(new), "the next inference would make its memory"


def test_a_forked_child_makes_plans_although_the_parent_was_making_one() -> None:
    code = """
import json, os, threading, time
import numpy as np
import tunewright
from device.runtime.test_plan_templates import sentence
compiled = tunewright.Core().compile_model(sentence(3), "CPU")
compiled({"x": np.zeros((2, 9, 8), np.float32)})
held = threading.Thread(target=lambda: compiled.program._lock.acquire() and time.sleep(500), daemon=True)
held.start()
while compiled.program._lock.acquire(blocking=False):
    compiled.program._lock.release()
    time.sleep(0.01)
child = os.fork()
if not child:
    (y,) = compiled({"x": np.ones((1, 1, 8), np.float32)}).values()
    os._exit(0 if y.shape == (1, 1, 24) else 1)
for _ in range(1000):
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        break
    time.sleep(0.1)
else:
    os.kill(child, 9)
print(json.dumps([bool(done), status if done else -1]))
os._exit(0)
"""
    assert python(code) == [True, 0]

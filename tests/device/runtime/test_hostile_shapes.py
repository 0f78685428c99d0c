"""Sizes that models are not made for: what they compute, or the error that says so, and the next good inference."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import onnx.parser
import pytest

import tunewright
from native.harness import native

ort = pytest.importorskip("onnxruntime")
pytestmark = native
Feeds = dict[str, np.ndarray]

#: a model over x: float[n], and the lengths of x in turn
BODIES: dict[str, tuple[str, list[int]]] = {
    "wraps in int32": (
        "(int32 y, int64 w) { n = Shape(x)  m = Mul(n, n)  y = Cast<to = 6>(m)  w = Cast<to = 7>(y) }",
        [3, 9, 50000, 7, 60000],
    ),
    "wraps as it is multiplied": ("(int32 y) { n = Shape(x)  i = Cast<to = 6>(n)  y = Mul(i, i) }", [3, 50000, 7]),
    "wraps and decides": (
        """(float y) { n = Shape(x)  m = Mul(n, n)  i = Cast<to = 6>(m)  j = Cast<to = 7>(i)  q = Div(j, n)
        zero = Constant<value_ints = [0]>()  a = Max(q, zero)  b = Min(a, n)  y = Slice(x, zero, b, zero) }""",
        [3, 9, 50000, 7, 60000],
    ),
    "wraps in int64": ("(int64 y) { n = Shape(x)  m = Mul(n, n)  k = Mul(m, m)  y = Mul(k, n) }", [3, 9, 50000, 7]),
    "is too large": (
        "(float y) { n = Shape(x)  m = Mul(n, n)  k = Mul(m, n)  s = Concat<axis = 0>(k, n)  y = Expand(x, s) }",
        [3, 9, 20000, 7],
    ),
    "is negative": (
        "(float y) { n = Shape(x)  five = Constant<value_ints = [5]>()  m = Sub(n, five)  y = ConstantOfShape(m) }",
        [9, 12, 3, 7, 5, 4],
    ),
    "ends before it begins": (
        """(float y) { n = Shape(x)  five = Constant<value_ints = [5]>()  zero = Constant<value_ints = [0]>()
        m = Sub(n, five)  y = Slice(x, zero, m, zero) }""",
        [9, 12, 3, 7, 5, 4, 6],
    ),
    "pads and cuts": (
        """(float y) { n = Shape(x)  five = Constant<value_ints = [5]>()  zero = Constant<value_ints = [0]>()
        m = Sub(five, n)  p = Concat<axis = 0>(m, zero)  y = Pad(x, p) }""",
        [4, 3, 12, 9, 2, 20],
    ),
    "does not divide": (
        "(float y) { s = Constant<value_ints = [-1, 5]>()  r = Reshape(x, s)  y = Relu(r) }",
        [10, 20, 12, 25, 3],
    ),
    "divides by zero": (
        """(int64 y, int64 z) { n = Shape(x)  five = Constant<value_ints = [5]>()  m = Sub(n, five)
        y = Div(n, m)  z = Mod(n, m) }""",
        [10, 20, 5, 25, 3],
    ),
    "has remainders": (
        """(int64 y, int64 z, int64 w) { n = Shape(x)  nine = Constant<value_ints = [9]>()
        three = Constant<value_ints = [-3]>()  m = Sub(n, nine)  y = Mod(m, three)  w = Sign(m)
        z = Mod<fmod = 1>(m, three) }""",
        [10, 20, 4, 9, 3, 8, 17],
    ),
    "has too few": (
        "(float y, int64 i) { five = Constant<value_ints = [5]>()  y, i = TopK<axis = 0>(x, five) }", [10, 20, 4, 5, 6]
    ),
}  # fmt: skip


def model(text: str) -> bytes:
    made = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g {text}')
    for value in made.graph.output:
        value.type.tensor_type.ClearField("shape")
    return bytes(made.SerializeToString())


def tried(run: Any) -> Any:
    try:
        return [np.copy(value) for value in run()]
    except tunewright.TunewrightError as error:
        return error


@pytest.mark.parametrize("name", BODIES)
def test_unusual_sizes_have_the_results_of_a_plan_for_each(name: str) -> None:
    body, lengths = BODIES[name]
    source, core = model(f"(float[n] x) => {body}"), tunewright.Core()
    options = ort.SessionOptions()
    options.log_severity_level, options.graph_optimization_level = 4, ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    peer = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    request = core.compile_model(source, "CPU").create_infer_request()
    each = core.compile_model(source, "CPU", {"SHAPE_TEMPLATES": "NO"})
    for n in lengths:
        feeds = {"x": np.arange(n, dtype=np.float32)}
        got, alone = tried(lambda: request.infer(feeds).values()), tried(lambda: each(feeds).values())  # noqa: B023
        if isinstance(alone, Exception):
            assert type(got) is type(alone) and str(got) == str(alone), n
            with pytest.raises(Exception, match="ONNXRuntimeError"):
                peer.run(None, feeds)
            continue
        for one, other, wanted in zip(got, alone, peer.run(None, feeds), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(n))
            np.testing.assert_array_equal(one, wanted, err_msg=str(n))


PRODUCTS = """(float[n,8] x, int64[m] i) => (float y) {
    t = Transpose<perm = [1, 0]>(x)  a = MatMul(x, t)  s = Softmax(a)  b = MatMul(s, x)  y = Gather<axis = 0>(b, i) }"""


def fed(n: int, *at: int) -> Feeds:
    return {"x": np.random.default_rng(n).standard_normal((n, 8)).astype(np.float32), "i": np.array(at, np.int64)}


@pytest.mark.parametrize("failing", [fed(2000, 1), fed(9, 9)], ids=["memory", "index"])
def test_a_failed_inference_leaves_the_next_one_as_it_was(failing: Feeds) -> None:
    source = model(PRODUCTS.replace("s = Softmax(a)", "s0 = Softmax(a)  e = Exp(s0)  s = Softmax<axis = 0>(e)"))
    compiled = tunewright.Core().compile_model(source, "CPU", {"MAX_TENSOR_BYTES": 4_000_000})
    request, good = compiled.create_infer_request(), fed(7, 6, 0)
    expected = request.infer(good)["y"].copy()
    for _ in range(3):
        with pytest.raises(tunewright.TunewrightError):
            request.infer(failing)
        np.testing.assert_array_equal(request.infer(good)["y"], expected)
        request.start_async(failing)
        with pytest.raises(tunewright.TunewrightError):
            request.wait()
        request.start_async(good)
        request.wait()
        np.testing.assert_array_equal(request.results["y"], expected)


@pytest.mark.parametrize("most", [1, 2])
def test_classes_of_shapes_that_drive_each_other_out(most: int) -> None:
    """More classes than plans are kept, and several threads that ask for them."""
    source = model("""(float[a,n] x, float[b,m] y) => (float z) {
        s = Add(x, y)  e = Exp(s)  t = Transpose(e)  z = MatMul(e, t) }""")
    compiled = tunewright.Core().compile_model(source, "CPU", {"PLAN_CACHE_SIZE": most})
    rng, wrong = np.random.default_rng(0), list[Any]()
    kinds = [((4, 6), (4, 6)), ((1, 6), (4, 6)), ((4, 1), (4, 6)), ((4, 6), (1, 1)), ((1, 1), (9, 3)), ((5, 8), (5, 1))]
    given = [{"x": rng.random(a, np.float32), "y": rng.random(b, np.float32)} for a, b in kinds]
    sums = [np.exp(each["x"] + each["y"]) for each in given]

    def work(seed: int) -> None:
        request, order = compiled.create_infer_request(), np.random.default_rng(seed)
        for k in order.integers(0, len(given), 25):
            got = request.infer(given[k])["z"]
            if not np.allclose(got, sums[k] @ sums[k].T, rtol=1e-4):
                wrong.append(int(k))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(compiled.program._classes) <= most and len(compiled.program._plans) <= most


def test_a_state_after_a_failure_is_that_before_it() -> None:
    """A step whose index is out of range adds nothing to the cache, and a reset begins anew."""
    table = ", ".join(str((k * 7 % 11 - 5) / 5) for k in range(40))
    source = model(f"""(int64[b,n] ids, float[b,past,4] old) => (float y, float new) {{
        t = Constant<value = float[10,4] {{{table}}}>()  e = Gather<axis = 0>(t, ids)  new = Concat<axis = 1>(old, e)
        u = Transpose<perm = [0, 2, 1]>(new)  a = MatMul(e, u)  s = Softmax(a)  y = MatMul(s, new) }}""")
    compiled = tunewright.Core().compile_model(source, "CPU", stateful={"old": "new"})
    request, ids = compiled.create_infer_request(), [[1, 2, 3], [4], [5], [6, 7], [8]]
    for _ in range(2):
        plain, expected = compiled.create_infer_request(), []
        for part in ids:
            expected.append(plain.infer({"ids": np.array([part])})["y"].copy())
        for part, wanted in zip(ids, expected, strict=True):
            with pytest.raises(tunewright.TunewrightError, match="out of range"):
                request.infer({"ids": np.array([[10]])})
            np.testing.assert_array_equal(request.infer({"ids": np.array([part])})["y"], wanted)
        request.reset_state()

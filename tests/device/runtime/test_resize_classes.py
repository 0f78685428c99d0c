"""Resize and pairs of convolutions serve pictures of any size by one plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import tunewright
from native.harness import native
from tunewright.ir.symbolic import ShapeTrace
from tunewright.ops.onnx.tensors.resize import Period, ResizeStep, period, taps

ort = pytest.importorskip("onnxruntime")
pytestmark = native
FORMS: dict[str, dict[str, Any]] = {
    "nearest, asymmetric": {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    "nearest, half pixel": {"mode": "nearest", "coordinate_transformation_mode": "half_pixel"},
    "linear, half pixel": {"mode": "linear", "coordinate_transformation_mode": "half_pixel"},
    "linear, asymmetric": {"mode": "linear", "coordinate_transformation_mode": "asymmetric"},
    "linear, pytorch": {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"},
    "cubic": {"mode": "cubic", "coordinate_transformation_mode": "half_pixel", "cubic_coeff_a": -0.75},
}
#: all within eight times the first ones: beyond that a plan that suits them better is made beside
SIZES = [(16, 17), (3, 3), (40, 24), (5, 4), (64, 9), (17, 33), (4, 100), (31, 16), (12, 18)]
#: what pictures of those sizes become: one length, and then both, are what they were
TARGETS = [(13, 20), (30, 9), (7, 33), (50, 40), (4, 60), (90, 3), (18, 33), (31, 25), (12, 18)]


def resizing(attrs: dict[str, Any], factor: int, by_sizes: bool, blocked: bool) -> bytes:
    """A picture of open sizes that becomes so many times as large; between convolutions, where it is blocked."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal((20, 3, 3, 3)).astype(np.float32) / 5, "w")]
    nodes, x = [], "x"
    if blocked:
        nodes.append(helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4))
        x = "c"
    if by_sizes:  # as torch's exporter writes it
        weights.append(numpy_helper.from_array(np.array([factor, factor], np.int64), "times"))
        nodes += [
            helper.make_node("Shape", [x], ["whole"], start=0, end=2),
            helper.make_node("Shape", [x], ["sides"], start=2, end=4),
            helper.make_node("Mul", ["sides", "times"], ["longer"]),
            helper.make_node("Concat", ["whole", "longer"], ["sizes"], axis=0),
        ]
        inputs = [x, "", "", "sizes"]
    else:
        weights.append(numpy_helper.from_array(np.array([1, 1, factor, factor], np.float32), "scales"))
        inputs = [x, "", "scales"]
    nodes.append(helper.make_node("Resize", inputs, ["r" if blocked else "y"], **attrs))
    if blocked:
        weights.append(numpy_helper.from_array(rng.standard_normal((8, 20, 1, 1)).astype(np.float32) / 5, "w2"))
        nodes.append(helper.make_node("Conv", ["r", "w2"], ["y"]))
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, "h", "w"])]
    made = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "resizing", given, made, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("factor", [2, 8])
@pytest.mark.parametrize("name", FORMS)
def test_one_plan_serves_all_sizes(name: str, factor: int, blocked: bool) -> None:
    model = resizing(FORMS[name], factor, by_sizes=factor == 2, blocked=blocked)
    peer = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    compiled = tunewright.Core().compile_model(model, "CPU")
    request, rng = compiled.create_infer_request(), np.random.default_rng(1)
    for height, width in SIZES:
        x = rng.standard_normal((1, 3, height, width)).astype(np.float32)
        np.testing.assert_allclose(request.infer({"x": x})["y"], peer.run(None, {"x": x})[0], rtol=2e-4, atol=2e-5)
    assert len(compiled.program.plans) == 1


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("factor", [1, 2, 4, 16])
def test_a_period_says_what_the_table_does(name: str, factor: int) -> None:
    for size in (1, 2, 3, 7, 64, 1001):
        step = ResizeStep(2, size * factor, float(factor))
        found, table = period(size, step, FORMS[name]), taps(size, step, FORMS[name])
        assert isinstance(found, Period)
        at = np.arange(size * factor)
        indices = np.clip((at // factor)[:, None] + found.offsets[at % factor], 0, size - 1)
        if found.weights is None or table.weights is None:
            assert table.weights is None
            np.testing.assert_array_equal(indices, table.indices)
        else:  # weights of 0 may stand at any index
            counts = [np.zeros((len(at), size)) for _ in range(2)]
            for count, (places, weights) in zip(
                counts, [(indices, found.weights[at % factor]), (table.indices, table.weights)], strict=True
            ):
                np.add.at(count, (at[:, None], places), weights)
            np.testing.assert_array_equal(*counts)


@pytest.mark.parametrize(
    "attrs",
    [
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
        {"mode": "cubic", "exclude_outside": 1},
        {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"},
    ],
)
def test_what_depends_on_the_length_has_no_period(attrs: dict[str, Any]) -> None:
    assert period(16, ResizeStep(2, 32, 2.0), attrs) is None


def test_factors_that_have_no_period() -> None:
    attrs = FORMS["linear, half pixel"]
    assert period(16, ResizeStep(2, 48, 3.0), attrs) is None  # thirds are rounded, so weights are not all alike
    assert period(16, ResizeStep(2, 8, 0.5), attrs) is None
    assert period(16, ResizeStep(2, 31, 2.0), attrs) is None  # not its whole length
    size = ShapeTrace().symbol("n", 16)
    assert period(size, ResizeStep(2, size * 2, 2.0), attrs) is not None  # type: ignore[arg-type]
    assert period(size, ResizeStep(2, size + 16, 2.0), attrs) is None  # type: ignore[arg-type]


#: what has no period, or becomes as long as another input
OTHERS: dict[str, dict[str, Any]] = FORMS | {
    "linear, corners": {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
    "linear, symmetric": {"mode": "linear", "coordinate_transformation_mode": "half_pixel_symmetric"},
    "cubic, inside": {"mode": "cubic", "coordinate_transformation_mode": "half_pixel", "exclude_outside": 1},
}


def fitted(attrs: dict[str, Any], way: str) -> bytes:
    """A picture that becomes as large as another one, as a fixed size, or one and a half times as large."""
    nodes = [helper.make_node("Shape", ["z"], ["sides"], start=2), helper.make_node("Shape", ["x"], ["outer"], end=2)]
    weights, inputs = [], ["x", "", "", "wanted"]
    if way == "as another":
        nodes.append(helper.make_node("Concat", ["outer", "sides"], ["wanted"], axis=0))
    elif way == "a fixed size":
        weights.append(numpy_helper.from_array(np.array([20, 13], np.int64), "fixed"))
        nodes.append(helper.make_node("Concat", ["outer", "fixed"], ["wanted"], axis=0))
    else:
        weights.append(numpy_helper.from_array(np.array([1, 1, 1.5, 0.75], np.float32), "scales"))
        inputs = ["x", "", "scales"]
    nodes.append(helper.make_node("Resize", inputs, ["y"], **attrs))
    given = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, "h", "w"]),
        helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 1, "k", "l"]),
    ]
    made = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "fitted", given, made, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize("way", ["as another", "a fixed size", "scaled"])
@pytest.mark.parametrize("name", OTHERS)
def test_lengths_without_a_common_factor_need_one_plan(name: str, way: str) -> None:
    model, core = fitted(OTHERS[name], way), tunewright.Core()
    peer = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    compiled = core.compile_model(model, "CPU")
    each = core.compile_model(model, "CPU", {"SHAPE_TEMPLATES": "NO"})
    request, rng = compiled.create_infer_request(), np.random.default_rng(1)
    for (h, w), (k, m) in zip(SIZES, TARGETS, strict=True):
        feeds = {"x": rng.standard_normal((1, 3, h, w)).astype(np.float32), "z": np.zeros((1, 1, k, m), np.float32)}
        got = request.infer(feeds)["y"]
        np.testing.assert_allclose(got, peer.run(None, feeds)[0], rtol=2e-4, atol=2e-5)
        np.testing.assert_array_equal(got, each(feeds)["y"])
    (plan,) = compiled.program.plans
    assert plan.template is not None
    assert all(plan.template.misses((*size, *target)) == 0 for size, target in zip(SIZES, TARGETS, strict=True))


@pytest.mark.parametrize("way", ["half_pixel", "asymmetric"])
@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil"])
def test_places_in_the_middle_are_rounded_as_by_others(rounding: str, way: str) -> None:
    """The last bit of a place in single precision does not decide: 34.5 / (69 / 14) is 7."""
    attrs = {"mode": "nearest", "coordinate_transformation_mode": way, "nearest_mode": rounding}
    model = fitted(attrs, "as another")
    peer = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    sizes = [(14, 69), (18, 21), (27, 53), (13, 122), (7, 4), (39, 6), (56, 142), (54, 117), (36, 75), (45, 52)]
    for size, out in sizes:
        x, z = np.arange(3 * size * 2, dtype=np.float32).reshape(1, 3, size, 2), np.zeros((1, 1, out, 2), np.float32)
        (expected,) = peer.run(None, {"x": x, "z": z})
        step = ResizeStep(2, out, out / size)
        assert np.array_equal(x[:, :, taps(size, step, attrs).indices[:, 0]], expected), (size, out)

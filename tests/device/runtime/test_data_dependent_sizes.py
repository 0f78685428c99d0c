"""Sizes that depend on data inside of a launch: results are ONNX Runtime's, whatever number of rows there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from native.harness import native
from tunewright import Core, ExecutionError
from tunewright.runtime.control.row_counts import GATHERED
from tunewright.runtime.plans.plan import Step

ort = pytest.importorskip("onnxruntime")
pytestmark = native
HEAD = '<ir_version: 8, opset_import: ["" : 18]>\n'
Feeds = dict[str, np.ndarray]


def steps(one: Any) -> list[Step]:
    return [step for plan in one.program.plans for step in plan.steps]


def inside(one: Any) -> list[list[str]]:
    """For each plan the operations whose sizes depend on data and that are part of its launch."""
    found = [step.node for step in steps(one) if step.node.op == GATHERED and step.block is not None]
    return [[inner.op for inner in node.bodies["otherwise"].nodes] for node in found]


def check(text: str | onnx.ModelProto, feeds: Sequence[Feeds], **config: Any) -> Any:
    """One request serves all feeds, twice; results of earlier inferences stay what they are."""
    model = parser.parse_model(HEAD + text) if isinstance(text, str) else text
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    core = Core(config)
    one = core.compile_model(core.read_model(model), "CPU")
    request, kept = one.create_infer_request(), []
    for feed in (*feeds, *feeds):
        kept.append((request.infer(feed), session.run(None, feed), feed))
    for found, expected, feed in kept:
        for value, wanted in zip(model.graph.output, expected, strict=True):
            where = f"{value.name}, {[v.shape for v in feed.values()]}"
            assert found[value.name].shape == wanted.shape and found[value.name].dtype == wanted.dtype, where
            np.testing.assert_allclose(found[value.name], wanted, rtol=1e-4, atol=1e-5, err_msg=where)
    return one


def masks(rng: np.random.Generator, *shape: int) -> list[Feeds]:
    """Numbers of which many, all, none, few and one are above a half."""
    few = np.zeros(shape, np.float32)
    few.reshape(-1)[:: max(1, few.size // 5)] = 0.75
    one = np.zeros(shape, np.float32)
    one.reshape(-1)[few.size // 2] = 0.75
    some = [rng.random(shape).astype(np.float32), np.ones(shape, np.float32), np.zeros(shape, np.float32)]
    return [{"x": x} for x in (*some, few, one)]


HALF = "half = Constant <value = float {0.5}> () m = Greater(x, half) "
SELECTED = HALF + "at = NonZero(m) turned = Transpose <perm = [1, 0]> (at) picked = GatherND(x, turned) "


def test_what_is_behind_is_part_of_the_launch(rng: np.random.Generator) -> None:
    one = check("g (float[6,7] x) => (float[n] y) {" + SELECTED + "y = Mul(picked, half) }", masks(rng, 6, 7))
    assert inside(one) == [["NonZero", "Transpose", "GatherND", "Mul"]]


def test_open_sizes_beside_those_of_the_data(rng: np.random.Generator) -> None:
    feeds = [feed for shape in ((6, 7), (2, 3), (30, 40), (9, 2), (40, 4)) for feed in masks(rng, *shape)]
    one = check("g (float[a,b] x) => (float[n] y, int64[2,n] at) {" + SELECTED + "y = Mul(picked, half) }", feeds)
    assert ["NonZero", "Transpose", "GatherND", "Mul"] in inside(one)
    assert len(one.program.plans) == 1


def test_a_number_of_rows_alone(rng: np.random.Generator) -> None:
    one = check("g (float[6,7] x) => (int64[2] s) {" + HALF + "at = NonZero(m) s = Shape(at) }", masks(rng, 6, 7))
    assert inside(one) == [["NonZero", "Shape"]]


def test_results_of_known_shape(rng: np.random.Generator) -> None:
    text = """g (float[9,4] x, float[4,3] w) => (float[3] y, float[9] z)
    {
        half = Constant <value = float {0.5}> ()
        zero = Constant <value_ints = [0]> ()
        one = Constant <value_ints = [1]> ()
        means = ReduceMean <keepdims = 0> (x, one)
        m = Greater(means, half)
        rows = Compress <axis = 0> (x, m)
        p = MatMul(rows, w)
        y = ReduceSum <keepdims = 0> (p, zero)
        least = ReduceMin <keepdims = 0> (y, zero)
        z = Add(means, least)
    }"""
    feeds = [feed | {"w": rng.random((4, 3)).astype(np.float32)} for feed in masks(rng, 9, 4)]
    one = check(text, feeds)
    assert inside(one)[0][0] == "Compress" and "MatMul" in inside(one)[0]


def test_rows_of_rows(rng: np.random.Generator) -> None:
    """How many there are depends on another number of rows; memory is planned for the most."""
    text = """g (float[30,4] x, float[4,4] w) => (float[n,4] y, int64[1,k] again)
    {
        half = Constant <value = float {0.5}> ()
        zero = Constant <value_ints = [0]> ()
        one = Constant <value_ints = [1]> ()
        first = ReduceMax <keepdims = 0> (x, one)
        m = Greater(first, half)
        rows = Compress <axis = 0> (x, m)
        p = MatMul(rows, w)
        means = ReduceMean <keepdims = 0> (p, one)
        m2 = Greater(means, half)
        again = NonZero(m2)
        flat = Squeeze(again, zero)
        y = Gather(p, flat)
    }"""
    feeds = [feed | {"w": rng.random((4, 4)).astype(np.float32)} for feed in masks(rng, 30, 4)]
    names = ["Compress", "MatMul", "ReduceMean", "Greater", "NonZero", "Squeeze", "Gather"]
    assert inside(check(text, feeds)) == [names]


def test_the_best_of_as_many_as_there_are(rng: np.random.Generator) -> None:
    text = (
        "g (float[40] x) => (float[k] v, int64[k] i) {"
        + SELECTED
        + """
        most = Constant <value_ints = [7]> () count = Shape(picked) k = Min(most, count) v, i = TopK(picked, k) }"""
    )
    one = check(text, masks(rng, 40)[:4])
    assert "TopK" in inside(one)[0]


# -- detectors --------------------------------------------------------------------------------------------------------
DETECTOR = """
    g (float[1,%s,4] boxes, float[1,%s,%s] scores) => (float[m,4] out, float[m] best, int64[m] label, int64[m,3] found)
    {
        limit = Constant <value_ints = [20]> ()
        overlap = Constant <value_floats = [0.5]> ()
        least = Constant <value_floats = [0.6]> ()
        zero = Constant <value_ints = [0]> ()
        one = Constant <value_ints = [1]> ()
        two = Constant <value_ints = [2]> ()
        three = Constant <value_ints = [3]> ()
        found = NonMaxSuppression <center_point_box = %d> (boxes, scores, limit, overlap, least)
        image = Slice(found, zero, one, one)
        class = Slice(found, one, two, one)
        index = Slice(found, two, three, one)
        at = Squeeze(index, one)
        label = Squeeze(class, one)
        flat = Squeeze(boxes, zero)
        out = Gather(flat, at)
        places = Concat <axis = 1> (image, class, index)
        best = GatherND(scores, places)
    }"""


def detections(rng: np.random.Generator, count: int, classes: int, scale: float) -> Feeds:
    low, size = rng.uniform(0, 8, (1, count, 2)), rng.uniform(0.5, 4, (1, count, 2))
    scores = rng.random((1, classes, count)) * scale
    return {
        "boxes": np.concatenate([low, low + size], -1).astype(np.float32), "scores": scores.astype(np.float32)
    }  # fmt: skip


@pytest.mark.parametrize("centre", [0, 1])
def test_a_detector(rng: np.random.Generator, centre: int) -> None:
    feeds = [detections(rng, 50, 3, scale) for scale in (1, 2, 0.7, 0.61, 0.1)]
    one = check(DETECTOR % (50, 3, 50, centre), feeds, HOST_FALLBACK="NO")
    assert inside(one)[0][0] == "NonMaxSuppression" and not any(step.on_host for step in steps(one))


def test_a_detector_of_open_sizes(rng: np.random.Generator) -> None:
    feeds = [detections(rng, count, classes, 1) for count, classes in ((50, 3), (7, 2), (200, 5), (90, 3))]
    one = check(DETECTOR % ("n", "c", "n", 0), feeds)
    assert len(one.program.plans) == 1 and len(inside(one)[0]) > 6


# -- what cannot be part of it ----------------------------------------------------------------------------------------
def test_a_step_without_kernel_ends_what_is_inside(rng: np.random.Generator) -> None:
    text = "g (float[6,7] x) => (float[n] y, float[k] u) {" + SELECTED + "y = Mul(picked, half) u = Unique(picked) }"
    one = check(text, masks(rng, 6, 7))
    assert inside(one) == [["NonZero", "Transpose", "GatherND", "Mul"]]


@pytest.mark.parametrize("config", [{"JOIN_LAUNCHES": "NO"}, {"SHAPE_TEMPLATES": "NO"}])
def test_without_classes_of_shapes_a_kernel_makes_the_rows(rng: np.random.Generator, config: dict[str, str]) -> None:
    text = "g (float[6,7] x, float[1,3] w) => (float[n,3] y) {" + SELECTED
    text += "one = Constant <value_ints = [1]> () wide = Unsqueeze(picked, one) y = MatMul(wide, w) }"
    feeds = [feed | {"w": rng.random((1, 3)).astype(np.float32)} for feed in masks(rng, 6, 7)]
    assert inside(check(text, feeds, **config))[0] == ["NonZero"]


def test_wrong_indices_are_told_with_their_node() -> None:
    model = parser.parse_model(
        HEAD + "g (float[6] x, float[4] t) => (float[1,n] y) {" + HALF + "at = NonZero(m) y = Gather(t, at) }"
    )
    core = Core()
    request = core.compile_model(core.read_model(model), "CPU").create_infer_request()
    table = np.arange(4, dtype=np.float32)
    fits, not_so = np.array([1, 1, 0, 1, 0, 0], np.float32), np.array([1, 1, 0, 1, 0, 1], np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(request.infer({"x": fits, "t": table})["y"], [[0, 1, 3]])
        with pytest.raises(ExecutionError, match=r"\(Gather\): an index is out of range: 5"):
            request.infer({"x": not_so, "t": table})


def test_no_more_memory_than_there_may_be() -> None:
    """Room for every element would be too much: rows are made on the host, as many as there are."""
    x = np.zeros(3 << 22, np.float32)
    x[5] = 1
    one = check(f"g (float[{x.size}] x) => (int64[1,n] y) {{ y = NonZero(x) }}", [{"x": x}])
    assert not inside(one)


# -- as torch writes them ---------------------------------------------------------------------------------------------
def exported(module: Any, *args: Any) -> onnx.ModelProto:
    import io

    import torch

    file, names = io.BytesIO(), [f"x{k or ''}" for k in range(len(args))]
    torch.onnx.export(module.eval(), args, file, dynamo=False, input_names=names, opset_version=17)
    return onnx.load_from_string(file.getvalue())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["masked_select", "rows", "nonzero", "layers"])
def test_what_torch_exports(rng: np.random.Generator, how: str) -> None:
    torch = pytest.importorskip("torch")
    first, second = torch.nn.Linear(7, 8).requires_grad_(False), torch.nn.Linear(8, 3).requires_grad_(False)
    forward = {
        "masked_select": lambda x: torch.masked_select(x, x > 0.5) * 2,
        "rows": lambda x: x[x[:, 0] > 0.5].sigmoid(),
        "nonzero": lambda x: x[(x > 0.5).nonzero()[:, 0]],
        "layers": lambda x: second(first(x[x[:, 0] > 0.5]).relu()).softmax(-1),
    }[how]

    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return forward(x)

    feeds = masks(rng, 20, 7)
    one = check(exported(Module(), torch.from_numpy(feeds[0]["x"])), feeds)
    assert inside(one)[0][0] == "NonZero" and len(inside(one)[0]) >= 3

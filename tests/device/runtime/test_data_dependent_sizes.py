"""Sizes that depend on data inside of a launch: results are ONNX Runtime's, whatever number of rows there is."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from helpers.counted_models import HALF, HEAD, SELECTED, Feeds, check, inside, launches, masks, steps
from native.harness import native
from tunewright import Core, ExecutionError

pytestmark = native


def test_what_is_behind_is_part_of_the_launch() -> None:
    one = check("g (float[6,7] x) => (float[n] y) {" + SELECTED + "y = Mul(picked, half) }", masks(6, 7))
    assert inside(one) == [["NonZero", "Transpose", "GatherND", "Mul"]]


def test_open_sizes_beside_those_of_the_data() -> None:
    feeds = [feed for shape in ((6, 7), (2, 3), (30, 40), (9, 2), (40, 4)) for feed in masks(*shape)]
    one = check("g (float[a,b] x) => (float[n] y, int64[2,n] at) {" + SELECTED + "y = Mul(picked, half) }", feeds)
    assert ["NonZero", "Transpose", "GatherND", "Mul"] in inside(one)
    assert len(one.program.plans) == 1


def test_a_number_of_rows_alone() -> None:
    one = check("g (float[6,7] x) => (int64[2] s) {" + HALF + "at = NonZero(m) s = Shape(at) }", masks(6, 7))
    assert inside(one) == [["NonZero", "Shape"]]


def test_results_of_known_shape() -> None:
    rng = np.random.default_rng(1)
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
    feeds = [feed | {"w": rng.random((4, 3)).astype(np.float32)} for feed in masks(9, 4)]
    one = check(text, feeds)
    assert inside(one)[0][0] == "Compress" and "MatMul" in inside(one)[0]


def test_rows_of_rows() -> None:
    """How many there are depends on another number of rows; memory is planned for the most."""
    rng = np.random.default_rng(2)
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
    feeds = [feed | {"w": rng.random((4, 4)).astype(np.float32)} for feed in masks(30, 4)]
    names = ["Compress", "MatMul", "ReduceMean", "Greater", "NonZero", "Squeeze", "Gather"]
    assert inside(check(text, feeds)) == [names]


def test_the_best_of_as_many_as_there_are() -> None:
    text = (
        "g (float[40] x) => (float[k] v, int64[k] i) {"
        + SELECTED
        + """
        most = Constant <value_ints = [7]> () count = Shape(picked) k = Min(most, count) v, i = TopK(picked, k) }"""
    )
    one = check(text, masks(40)[:4])
    assert "TopK" in inside(one)[0]


# -- few rows ---------------------------------------------------------------------------------------------------------
def selected(*counts: int, size: int) -> list[Feeds]:
    """These many numbers that are above a half."""
    rng = np.random.default_rng(3)
    feeds = []
    for count in counts:
        x = np.zeros(size, np.float32)
        x[rng.permutation(size)[:count]] = 0.75
        feeds.append({"x": x})
    return feeds


#: what is different for no rows and for one: broadcasts, parts, products, means
BEHIND = {
    "broadcast": "wide = Unsqueeze(picked, one) y = Add(wide, picked)",
    "product": "wide = Unsqueeze(picked, zero) tall = Unsqueeze(picked, one) y = MatMul(wide, tall)",
    "part": "y = Slice(picked, one, far)",
    "concatenated": "tall = Unsqueeze(picked, one) y = Concat <axis = 1> (tall, tall, tall)",
    "sorted": "y, order = TopK(picked, n)",
    "softmax": "y = Softmax(picked)",
    "sum": "y = ReduceSum <keepdims = 0> (picked, zero)",
    "counted": "first = Squeeze(zero) last = Squeeze(n) step = Squeeze(one) y = Range(first, last, step)",
    "filled": "y = ConstantOfShape <value = float[1] {2.0}> (n)",
    "spread": "three = Constant <value_ints = [3]> () to = Concat <axis = 0> (three, n) y = Expand(picked, to)",
}
SHAPES = {"broadcast": "n,n", "product": "1,1", "concatenated": "n,3", "sum": "", "spread": "3,n"}


@pytest.mark.parametrize("behind", BEHIND)
def test_few_rows_are_one_launch_as_many_are(behind: str) -> None:
    feeds = selected(0, 1, 2, 3, 40, size=40)
    dtype = "int64" if behind == "counted" else "float"
    text = (
        f"g (float[40] x) => ({dtype}[{SHAPES.get(behind, 'n')}] y, float[m] picked) {{"
        + SELECTED
        + """
        zero = Constant <value_ints = [0]> ()
        one = Constant <value_ints = [1]> ()
        far = Constant <value_ints = [999]> ()
        n = Shape(picked)
        """
        + BEHIND[behind]
        + "}"
    )
    assert launches(check(text, feeds), feeds) == [1] * len(feeds)


def test_one_row_whose_result_has_another_rank() -> None:
    """There is no room for that: the request runs it."""
    feeds = selected(0, 1, 2, 3, 40, size=40)
    one = check("g (float[40] x) => (int64 y) {" + HALF + "at = NonZero(m) y = Squeeze(at) }", feeds)
    counts = launches(one, feeds)
    assert counts[1] > 1 and counts[0] == 1 and counts[2:] == [1, 1, 1]


def test_as_many_rows_as_another_size_are_one_launch() -> None:
    """A bias of sixteen numbers is one for each column, and not one for each row."""
    rng = np.random.default_rng(4)
    text = "g (float[40] x, float[1,16] w, float[16] b) => (float[n,16] y) {" + SELECTED
    text += "one = Constant <value_ints = [1]> () tall = Unsqueeze(picked, one) p = MatMul(tall, w) "
    text += "s = Add(p, b) y = Relu(s) }"
    more = {"w": rng.random((1, 16)).astype(np.float32), "b": rng.random(16).astype(np.float32)}
    feeds = [feed | more for feed in selected(15, 16, 17, 39, 40, size=40)]
    assert launches(check(text, feeds), feeds) == [1] * 5


def test_few_rows_of_rows_are_one_launch() -> None:
    rng = np.random.default_rng(5)
    text = """g (float[30,4] x) => (float[n,4] y, int64[1,k] again)
    {
        half = Constant <value = float {0.5}> ()
        most = Constant <value = float {0.8}> ()
        zero = Constant <value_ints = [0]> ()
        one = Constant <value_ints = [1]> ()
        first = ReduceMax <keepdims = 0> (x, one)
        m = Greater(first, half)
        rows = Compress <axis = 0> (x, m)
        tops = ReduceMax <keepdims = 0> (rows, one)
        m2 = Greater(tops, most)
        again = NonZero(m2)
        flat = Squeeze(again, zero)
        y = Gather(rows, flat)
    }"""
    feeds = []
    for above, far_above in ((0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (30, 0), (30, 1), (30, 30)):
        x = np.zeros((30, 4), np.float32)
        x[:above, 1] = 0.6
        x[:far_above, 2] = 0.9
        feeds.append({"x": x[rng.permutation(30)]})
    one = check(text, feeds)
    assert inside(one) == [["Compress", "ReduceMax", "Greater", "NonZero", "Squeeze", "Gather"]]
    assert launches(one, feeds) == [1] * len(feeds)


# -- Unique -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ordered", [0, 1])
def test_unique_and_what_is_behind(ordered: int) -> None:
    rng = np.random.default_rng(6)
    text = """g (int64[30] x, float[9] table)
        => (int64[n] y, int64[n] first, int64[30] at, int64[n] counts, float[n] z) {
        y, first, at, counts = Unique <sorted = %d> (x)
        looked_up = Gather(table, y)
        z = Exp(looked_up)
    }"""
    feeds = [{"x": rng.integers(0, most, 30), "table": rng.random(9).astype(np.float32)} for most in (1, 2, 9)]
    one = check(text % ordered, feeds)
    assert inside(one) == [["Unique", "Gather", "Exp"]]
    assert launches(one, feeds) == [1, 1, 1]


def test_unique_rows_of_open_sizes() -> None:
    rng = np.random.default_rng(7)
    text = """g (float[n,m] x) => (float[k,m] y, int64[k] counts) {
        one = Constant <value_ints = [1]> ()
        rows, first, at, counts = Unique <axis = 0> (x)
        sum = ReduceSum(rows, one)
        y = Sub(rows, sum)
    }"""
    feeds = [{"x": rng.integers(0, 2, shape).astype(np.float32)} for shape in ((20, 3), (5, 2), (70, 4), (3, 9))]
    one = check(text, feeds)
    assert len(one.program.plans) == 1 and launches(one, feeds) == [1] * 4


def test_unique_of_rows_that_are_selected() -> None:
    text = "g (float[40] x) => (float[n] y, int64[n] counts) {" + SELECTED
    text += "y, first, of, counts = Unique(picked) }"
    feeds = selected(0, 1, 2, 3, 40, size=40)
    assert launches(check(text, feeds), feeds) == [1] * 5


# -- control flow behind rows -----------------------------------------------------------------------------------------
AROUND = """
    zero = Constant <value_ints = [0]> ()
    n = Size(picked)
    yes = Constant <value = bool {1}> ()
    """
CONTROL = {
    "a branch by their number": """
        none = Squeeze(zero)
        c = Equal(n, none)
        y = If(c) <then_branch = t () => (float[a] u) { u = Identity(x) },
                   else_branch = e () => (float[b] v) { v = Exp(picked) }>
        """,
    "a branch by data": """
        s = ReduceSum <keepdims = 0> (picked)
        c = Greater(s, half)
        y = If(c) <then_branch = t () => (float[a] u) { u = Sqrt(picked) },
                   else_branch = e () => (float[b] v) { v = Exp(picked) }>
        """,
    "a loop over them": """
        begin = Constant <value = float {0.0}> ()
        sum, y = Loop(n, yes, begin) <body = b (int64 i, bool go, float s) => (bool more, float t, float row)
            { more = Identity(go) r = Gather(picked, i) t = Add(s, r) row = Exp(t) }>
        """,
    "a loop that changes them": """
        times = Constant <value = int64 {50}> ()
        y = Loop(times, yes, picked) <body = b (int64 i, bool go, float[k] s) => (bool more, float[k] t)
            { more = Identity(go) t = Sin(s) }>
        """,
}


@pytest.mark.parametrize("how", CONTROL)
def test_control_flow_behind_rows_is_part_of_the_launch(how: str) -> None:
    feeds = selected(0, 1, 2, 3, 20, 40, size=40)
    one = check("g (float[40] x) => (float[q] y) {" + SELECTED + AROUND + CONTROL[how] + "}", feeds)
    found = launches(one, feeds)
    assert found[1:] == [1] * 5
    if how != "a loop over them":  # of nothing: its body has no kernels for that
        assert found[0] == 1


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


def detections(count: int, classes: int, scale: float) -> Feeds:
    rng = np.random.default_rng(8)
    low, size = rng.uniform(0, 8, (1, count, 2)), rng.uniform(0.5, 4, (1, count, 2))
    scores = rng.random((1, classes, count)) * scale
    return {
        "boxes": np.concatenate([low, low + size], -1).astype(np.float32), "scores": scores.astype(np.float32)
    }  # fmt: skip


@pytest.mark.parametrize("centre", [0, 1])
def test_a_detector(centre: int) -> None:
    feeds = [detections(50, 3, scale) for scale in (1, 2, 0.7, 0.61, 0.1)]
    one = check(DETECTOR % (50, 3, 50, centre), feeds, HOST_FALLBACK="NO")
    assert inside(one)[0][0] == "NonMaxSuppression" and not any(step.on_host for step in steps(one))
    few = []
    for count in (0, 1, 2):
        few.append(detections(50, 3, 0.5))
        few[-1]["scores"][0, 1, :count] = 0.9
        few[-1]["boxes"][0, :2] = [[0, 0, 1, 1], [5, 5, 1, 1]]
    assert launches(check(DETECTOR % (50, 3, 50, centre), few), [*few, *feeds]) == [1] * 8


def test_a_detector_of_open_sizes() -> None:
    feeds = [detections(count, classes, 1) for count, classes in ((50, 3), (7, 2), (200, 5), (90, 3))]
    one = check(DETECTOR % ("n", "c", "n", 0), feeds)
    assert len(one.program.plans) == 1 and len(inside(one)[0]) > 6


# -- what cannot be part of it ----------------------------------------------------------------------------------------
def test_a_step_without_kernel_ends_what_is_inside() -> None:
    text = "g (float[6,7] x) => (float[n] y, string[2,k] u) {" + SELECTED
    text += "y = Mul(picked, half) u = Cast <to = 8> (at) }"
    one = check(text, masks(6, 7))
    assert inside(one) == [["NonZero", "Transpose", "GatherND", "Mul"]]


@pytest.mark.parametrize("config", [{"JOIN_LAUNCHES": "NO"}, {"SHAPE_TEMPLATES": "NO"}])
def test_without_classes_of_shapes_a_kernel_makes_the_rows(config: dict[str, str]) -> None:
    rng = np.random.default_rng(9)
    text = "g (float[6,7] x, float[1,3] w) => (float[n,3] y) {" + SELECTED
    text += "one = Constant <value_ints = [1]> () wide = Unsqueeze(picked, one) y = MatMul(wide, w) }"
    feeds = [feed | {"w": rng.random((1, 3)).astype(np.float32)} for feed in masks(6, 7)]
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
def test_what_torch_exports(how: str) -> None:
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

    feeds = masks(20, 7)
    one = check(exported(Module(), torch.from_numpy(feeds[0]["x"])), feeds)
    assert inside(one)[0][0] == "NonZero" and len(inside(one)[0]) >= 3

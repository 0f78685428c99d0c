"""Inference with open dimensions: what can be told is told, what cannot stays open, and mistakes are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tunewright.ir.graph import Fused, Graph
from tunewright.ir.types import Dim, DType, TensorType
from tunewright.ops import lookup
from tunewright.ops.base import Operand
from tunewright.ops.infer import Budget, propagate

F32 = DType.FLOAT32


def t(*dims: Dim, dtype: DType = F32) -> Operand:
    return Operand(TensorType(dtype, dims))


def const(*values: Any, dtype: Any = np.int64) -> Operand:
    array = np.array(values, dtype)
    return Operand(TensorType.of(array), array)


UNRANKED = Operand(TensorType(F32))


def infer(op: str, *operands: Operand | None, n: int = 1, **attrs: Any) -> list[Any]:
    spec = lookup(op)
    assert spec is not None
    return [None if r is None else r.shape for r in spec.infer(operands, attrs, n)]


def one(op: str, *operands: Operand | None, **attrs: Any) -> Any:
    return infer(op, *operands, **attrs)[0]


@pytest.mark.parametrize(
    ("shape", "wanted", "expected"),
    [
        (("N", 128, 768), (0, 0, 12, 64), ("N", 128, 12, 64)),
        (("N", 128, 768), (0, -1, 12, 64), ("N", 128, 12, 64)),
        (("N", 128, 12, 64), (-1, 128, 768), ("N", 128, 768)),
        ((None, 3, 4), (0, -1), (None, 12)),
        ((None, 3, 4), (-1, 12), (None, 12)),
        ((None, "S"), (-1, 1), (None, 1)),
        ((2, 3), (-1,), (6,)),
        (("N", 2, 3), (-1, 2), (None, 2)),
        ((1,), (), ()),
    ],
)
def test_reshape(shape: Any, wanted: Any, expected: Any) -> None:
    assert one("Reshape", t(*shape), const(*wanted)) == expected


def test_reshape_by_unknown_shape() -> None:
    assert one("Reshape", t(2, 3), t(4, dtype=DType.INT64)) == (None,) * 4
    assert one("Reshape", t(2, 3), t(None, dtype=DType.INT64)) is None
    assert one("Reshape", UNRANKED, const(0, -1, 5)) == (None, None, 5)


@pytest.mark.parametrize("wanted", [(7,), (-1, 4), (-1, -1), (0, 0, 0), (-2,)])
def test_reshape_mistakes(wanted: Any) -> None:
    with pytest.raises(ValueError, match="shape"):
        one("Reshape", t(2, 3), const(*wanted))


def test_slice() -> None:
    far = np.iinfo(np.int64).max
    assert one("Slice", t("N", 10), const(0), const(far), const(0)) == ("N", 10)
    assert one("Slice", t("N", 10), const(1), const(far), const(0)) == (None, 10)
    assert one("Slice", t("N", 10), const(-3), const(far), const(1)) == ("N", 3)
    assert one("Slice", t("N", 10), t(1, dtype=DType.INT64), t(1, dtype=DType.INT64), const(1)) == ("N", None)
    assert one("Slice", t(4, 10), const(0, 0), const(2, 9), None, const(1, 2)) == (2, 5)
    with pytest.raises(ValueError, match="step"):
        one("Slice", t(4), const(0), const(2), const(0), const(0))


def test_concat_and_split() -> None:
    assert one("Concat", t("N", 3), t("N", 4), axis=1) == ("N", 7)
    assert one("Concat", t("N", 3), t("M", 3), axis=0) == (None, 3)
    assert infer("Split", t(None, 7), n=3, axis=1, num_outputs=3) == [(None, 3), (None, 3), (None, 1)]
    assert infer("Split", t(None, 7), const(2, 5), n=2, axis=0) == [(2, 7), (5, 7)]
    assert infer("Split", t("N", 7), n=2, axis=0, num_outputs=2) == [(None, 7), (None, 7)]
    with pytest.raises(ValueError, match="split"):
        infer("Split", t(4), const(1, 2), n=2)


def test_convolution() -> None:
    w = t(8, 3, 3, 3)
    assert one("Conv", t("N", 3, "H", "W"), w, pads=(1, 1, 1, 1)) == ("N", 8, "H", "W")
    assert one("Conv", t("N", 3, "H", 9), w, strides=(2, 2)) == ("N", 8, None, 4)
    assert one("Conv", t("N", 3, "H", 9), w, auto_pad="SAME_UPPER") == ("N", 8, "H", 9)
    assert one("Conv", UNRANKED, w) == (None, 8, None, None)
    assert one("ConvTranspose", t("N", 3, "H", 5), t(3, 4, 2, 2), strides=(2, 2), group=2) == ("N", 8, None, 10)
    for attrs, text in (
        ({"group": 2}, "channels"),
        ({"strides": (0, 1)}, "strides"),
        ({"pads": (1, 1)}, "pads"),
        ({"auto_pad": "SOME"}, "auto_pad"),
        ({"dilations": (9, 9)}, "larger"),
        ({"kernel_shape": (2, 2)}, "kernel_shape"),
        ({"pads": (1 << 40,) * 4}, "pads"),
    ):
        with pytest.raises(ValueError, match=text):
            one("Conv", t(1, 3, 8, 8), w, **attrs)


def test_pooling_in_ceil_mode_never_starts_in_the_padding() -> None:
    attrs = {"kernel_shape": (3,), "strides": (2,), "ceil_mode": 1}
    assert one("MaxPool", t(1, 1, 8), **attrs) == (1, 1, 4)
    assert one("AveragePool", t(1, 1, 5), kernel_shape=(1,), strides=(3,), pads=(0, 2), ceil_mode=1) == (1, 1, 2)


def test_products() -> None:
    assert one("MatMul", t("B", "S", 64), t(64, 32)) == ("B", "S", 32)
    assert one("MatMul", t("B", 1, "S", 64), t(8, 64, "T")) == ("B", 8, "S", "T")
    assert one("Gemm", t("N", 4), t(5, 4), t(5), transB=1) == ("N", 5)
    assert one("Einsum", t("B", "H", "S", 8), t("B", "H", "T", 8), equation="bhsd,bhtd->bhst") == ("B", "H", "S", "T")
    with pytest.raises(ValueError, match="matrix product"):
        one("MatMul", t(2, 3), t(4, 5))
    with pytest.raises(ValueError, match="terms"):
        one("Einsum", t(2, 3), equation="ij,jk->ik")


def test_broadcasting() -> None:
    assert one("Add", t("N", 1, 5), t(4, 1)) == ("N", 4, 5)
    assert one("Add", t("N"), t("M")) == (None,)
    assert one("Add", t("N"), t("N")) == ("N",)
    assert one("Add", t(None), t(7)) == (7,)
    assert one("Where", t("N", 1, dtype=DType.BOOL), t(3), t()) == ("N", 3)
    with pytest.raises(ValueError, match="type"):
        one("Add", t(2), t(2, dtype=DType.INT64))
    with pytest.raises(ValueError, match="broadcast"):
        one("Add", t(2), t(3))


def test_reductions_and_indices() -> None:
    assert one("ReduceMean", t("N", 3, 5), const(-1)) == ("N", 3, 1)
    assert one("ReduceMean", t("N", 3, 5), const(-1), keepdims=0) == ("N", 3)
    assert one("ReduceMean", t("N", 3, 5), t(1, dtype=DType.INT64)) == (None, None, None)
    assert one("ReduceSum", UNRANKED, keepdims=0) == ()
    assert one("Gather", t("V", 64), t("B", "S", dtype=DType.INT64)) == ("B", "S", 64)
    assert infer("TopK", t("N", 100), const(5), n=2) == [("N", 5), ("N", 5)]
    assert one("NonZero", t("N", 3)) == (2, None)
    assert one("Expand", t(1, 3), t(3, dtype=DType.INT64)) == (None, None, 3)
    assert one("Squeeze", t(1, "N")) is None
    assert one("Squeeze", t(1, "N"), const(0)) == ("N",)


def test_attention_with_cache() -> None:
    q, k = t("B", 8, 1, 64), t("B", 2, 1, 64)
    past = t("B", 2, 15, 64)
    assert infer("Attention", q, k, k, None, past, past, n=3) == [("B", 8, 1, 64), ("B", 2, 16, 64), ("B", 2, 16, 64)]


# -- values that types tell -------------------------------------------------------------------------------------------
def shape_graph(shape: tuple[Dim, ...], op: str = "Shape", **attrs: Any) -> Graph:
    graph = Graph()
    x = graph.add_input("x", TensorType(F32, shape))
    graph.add_output(graph.add(op, [x], attrs).output)
    return graph


@pytest.mark.parametrize(
    ("op", "shape", "attrs", "expected"),
    [
        ("Shape", (2, 3, 5), {}, [2, 3, 5]),
        ("Shape", ("N", 3, 5), {"start": 1}, [3, 5]),
        ("Shape", ("N", 3, None), {"start": -2, "end": -1}, [3]),
        ("Shape", ("N", 3), {"start": 1, "end": 1}, []),
        ("Size", (2, 3, 5), {}, 30),
        ("Size", (), {}, 1),
    ],
)
def test_shapes_of_what_is_not_constant_fold(op: str, shape: Any, attrs: Any, expected: Any) -> None:
    graph = shape_graph(shape, op, **attrs)
    assert propagate(graph, Budget())
    (value,) = graph.outputs
    assert value.const is not None and value.const.dtype == np.int64
    assert value.const.tolist() == expected
    assert len(graph) == 0


@pytest.mark.parametrize("attrs", [{}, {"end": 1}])
def test_open_shapes_do_not_fold(attrs: Any) -> None:
    graph = shape_graph(("N", 3), **attrs)
    propagate(graph, Budget())
    assert graph.outputs[0].const is None
    assert len(graph) == 1


def test_folded_constants_are_plain_memory() -> None:
    graph = Graph()
    weights = graph.constant(np.arange(6, dtype=np.float32).reshape(2, 3))
    graph.add_output(graph.add("Transpose", [weights]).output)
    propagate(graph, Budget())
    folded = graph.outputs[0].const
    assert folded is not None and folded.flags.c_contiguous
    assert folded.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_what_was_fused_folds_too() -> None:
    """Arithmetic of shapes is fused before they are known: a scale from the size of heads."""
    graph = Graph("g")
    four, eight = (graph.constant(np.array(n, dtype), "n") for n, dtype in ((4, np.int64), (8.0, np.float32)))
    steps = (Fused("Sqrt", (-1,)), Fused("Mul", (-2, 1)), Fused("Sub", (-3, -1)))
    node = graph.add("Cast", [four, eight], {"to": 1}, epilogue=steps, operands=1)
    graph.add_output(node.output)
    assert propagate(graph, Budget()) and not graph.nodes
    made = graph.outputs[0].const
    assert made is not None and made.dtype == np.float32 and float(made) == 2 * 8 - 4


def test_what_was_fused_with_something_random_does_not_fold() -> None:
    graph = Graph("g")
    node = graph.add("Abs", [graph.constant(np.ones(3, np.float32))], epilogue=(Fused("RandomNormalLike", (-1,)),))
    graph.add_output(node.output)
    propagate(graph, Budget())
    assert len(graph) == 1

"""Tables instead of arithmetic.

A row of zeros with a single one, times a matrix, is a row of the matrix. Values computed from each row of a constant
table are computed once, from the table. Networks that jax exports look up embeddings by such products. That way
Magika's first layer, a product with 257 rows, a bias and Gelu, becomes a table.
"""

from __future__ import annotations

import numpy as np

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.types import DType
from tunewright.ops.base import Array

from .. import value_facts
from ..fusion.fuse import UNARY
from ..pattern import Const, Match, OneOf, Op, Rule

#: The most elements of a newly computed table: a larger one would cost more model size than it gains.
MOST_ELEMENTS = 1 << 20
_ACTIVATIONS = UNARY - {"Cast", "IsInf", "IsNaN", "Not", "BitwiseNot"}
_INDICES = frozenset({DType.INT8, DType.INT16, DType.INT32, DType.INT64, DType.UINT8, DType.UINT16, DType.UINT32})


def _is_count(array: Array) -> bool:
    """Whether an array is 0, 1, 2, ... along the last axis."""
    last = array.shape[-1] if array.ndim else 0
    return array.dtype.kind in "iu" and array.size == last > 0 and bool((array.reshape(-1) == np.arange(last)).all())


def _is_table(array: Array) -> bool:
    return array.ndim == 2 and array.dtype.kind == "f" and 0 < array.size <= MOST_ELEMENTS


def _is_finite_table(array: Array) -> bool:
    """Whether an array is a finite table: zeros of a row times an infinity would be NaN."""
    return _is_table(array) and bool(np.isfinite(array).all())


# -- products with one-hot rows ----------------------------------------------------------------------------------------


def _check_one_hot(match: Match) -> str | None:
    x, counts, table = match["x"], match.const("counts"), match.const("table")
    known = value_facts.shape(x)
    if known is None or not known or known[-1] != 1 or len(known) < counts.ndim:
        return f"{x!r} is not known to have one index for each row"
    if value_facts.dtype(x) not in _INDICES:
        return f"indices of type {value_facts.dtype(x)}"
    return None if counts.size == len(table) else "the number of rows of the matrix differs from the number of indices"


def _row_of(graph: Graph, match: Match) -> Value:
    """Replaces the product with a Gather. Indices outside of the matrix read a row of zeros, at either end of the
    table."""
    table = np.pad(match.const("table"), ((1, 1), (0, 0)))
    bounds = [graph.constant(np.array(n, np.int64), "bound") for n in (-1, len(table) - 2, 1)]
    x = graph.add("Squeeze", [match["x"], graph.constant(np.array([-1], np.int64), "axes")]).output
    x = graph.add("Cast", [x], {"to": DType.INT64.onnx_code}).output
    at = graph.add("Add", [graph.add("Clip", [x, *bounds[:2]]).output, bounds[2]]).output
    return graph.add("Gather", [graph.constant(table, "table"), at], {"axis": 0}).output


# -- values computed from rows -----------------------------------------------------------------------------------------


def _takes_rows(node: Node) -> bool:
    return int(node.attrs.get("axis", 0)) in (0, -2)


def _operand(match: Match) -> Array | None:
    """The constant operand as a vector or a number; None if it differs between rows."""
    constant, n = match.const("c"), value_facts.rank(match["rows"])
    columns = match.const("table").shape[1]
    if n is None or constant.ndim > n or constant.dtype != match.const("table").dtype:
        return None
    dims = (1,) * (n - constant.ndim) + constant.shape
    return constant.reshape(-1) if set(dims[:-1]) <= {1} and dims[-1] in (1, columns) else None


def _check_rows(match: Match) -> str | None:
    if "c" in match and _operand(match) is None:
        return f"{match['c']!r} is not the same for each row"
    return None


def _computed(graph: Graph, match: Match) -> Value:
    root, rows = match.root, match["rows"]
    constant = None
    if "c" in match:
        operand = _operand(match)
        assert operand is not None
        constant = graph.constant(operand, "c")
    inputs = [match["table"] if v is rows else constant for v in root.inputs]
    table = graph.add(root.op, inputs, root.attrs).output
    return graph.add("Gather", [table, match["at"]], {"axis": 0}).output


_ROWS = Op("Gather", Const("table", _is_table), "at", name="rows", where=_takes_rows)

#: Run while other operations are recognised: both sides of a product may be folded later.
RULES = (
    Rule(
        "one-hot-product",
        Op("MatMul", Op("Cast", Op("Equal", "x", Const("counts", _is_count))), Const("table", _is_finite_table)),
        _row_of, _check_one_hot,
    ),
)  # fmt: skip
#: Run while constants are folded: only then is the new table a constant.
FOLDED = (
    Rule(
        "computed-table",
        OneOf(
            Op(_ACTIVATIONS, _ROWS), Op("Add|Sub|Mul|Div", _ROWS, Const("c")), Op("Sub|Div", Const("c"), _ROWS),
        ),
        _computed, _check_rows,
    ),
)  # fmt: skip

"""Append: adds rows behind those that a buffer already holds. An operation of the IR alone.

It stands for ``Concat(past, new)`` where the past grows from inference to inference. Its result has room for more rows
than it holds, so the next inference can add its own in place (`runtime/plans/growing_buffers.py`). Readers take the
rows that are in use. Attributes: ``axis``, ``rows`` (of past and new together) and ``capacity`` (rows of the result).

A third input allows the sequences of a batch to end in different places: it says how many rows each has with its new
ones. Rows behind the end of a sequence are those of the past, and zero where the past has none. If ``rows`` counts only
the past, new rows are written over past ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec, Sample
from ..input_errors import check_rows
from ..samples.base import Rng, normal
from ..shapes import given, optional, same_dim, tensor

APPEND = "tunewright::Append"
#: attribute: the model's operation that errors name
STANDS_FOR = "stands_for"


def _reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    past, new = inputs[:2]
    axis, rows = int(attrs["axis"]), int(attrs["rows"])
    whole = np.zeros((*past.shape[:axis], int(attrs["capacity"]), *past.shape[axis + 1 :]), past.dtype)
    whole[(*(slice(None),) * axis, slice(0, past.shape[axis]))] = past
    ends, count = optional(inputs, 2), new.shape[axis]
    if ends is None:
        whole[(*(slice(None),) * axis, slice(past.shape[axis], past.shape[axis] + count))] = new
        return [whole]
    check_rows(ends - count, rows - count + 1)
    for cache, more, end in zip(whole, new, ends.tolist(), strict=True):
        cache[(*(slice(None),) * (axis - 1), slice(end - count, end))] = more
    return [whole]


def _infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    past, new = tensor(operands, 0), tensor(operands, 1)
    if past.dtype is not new.dtype:
        raise ValueError(f"inputs differ in type: {past.dtype} and {new.dtype}")
    if past.shape is None or new.shape is None or len(past.shape) != len(new.shape):
        raise ValueError("inputs differ in rank")
    axis = int(attrs["axis"])
    if given(operands, 2) and not axis:
        raise ValueError("sequences that end in different places lie along axis 0")
    dims = [same_dim(a, b, f"dimension {i}") if i != axis else attrs["capacity"]
            for i, (a, b) in enumerate(zip(past.shape, new.shape, strict=True))]  # fmt: skip
    return [TensorType(past.dtype, tuple(dims))]


def _samples(rng: Rng) -> Iterator[Sample]:
    for past, new, capacity in ((3, 1, 4), (0, 2, 2), (5, 3, 8)):
        attrs = {"axis": 1, "rows": past + new, "capacity": past + new}
        assert capacity >= past + new
        yield Sample([normal(rng, 2, past, 5), normal(rng, 2, new, 5)], attrs)
    for ends, rows in (((4, 2), 4), ((3, 6), 6)):  # over rows of the past, and behind them
        attrs = {"axis": 2, "rows": rows, "capacity": rows}
        sequences = np.array(ends, np.int64)
        yield Sample([normal(rng, 2, 3, 4, 5), normal(rng, 2, 3, 2, 5), sequences], attrs)


OPS = (OpSpec(APPEND, _reference, _infer, samples=_samples),)

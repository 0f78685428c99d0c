"""Rows behind those that a buffer holds already: an operation of the IR alone.

It stands for ``Concat(past, new)`` where the past grows from inference to inference. Its result has room for more rows
than there are, so that the next inference can add its own in place (`runtime/states.py`); who reads it takes the rows
that are there. Attributes: ``axis``, ``rows`` (of past and new together) and ``capacity`` (rows of the result).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..ir.types import TensorType, Type
from .base import Array, Attrs, Operands, OpSpec, Sample
from .samples import Rng, normal
from .shapes import same_dim, tensor

APPEND = "tunewright::Append"


def _reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    past, new = inputs
    axis = int(attrs["axis"])
    whole = np.zeros((*past.shape[:axis], int(attrs["capacity"]), *past.shape[axis + 1 :]), past.dtype)
    rows = np.concatenate([past, new], axis)
    whole[(*(slice(None),) * axis, slice(0, rows.shape[axis]))] = rows
    return [whole]


def _infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    past, new = tensor(operands, 0), tensor(operands, 1)
    if past.dtype is not new.dtype:
        raise ValueError(f"inputs differ in type: {past.dtype} and {new.dtype}")
    if past.shape is None or new.shape is None or len(past.shape) != len(new.shape):
        raise ValueError("inputs differ in rank")
    axis = int(attrs["axis"])
    dims = [same_dim(a, b, f"dimension {i}") if i != axis else attrs["capacity"]
            for i, (a, b) in enumerate(zip(past.shape, new.shape, strict=True))]  # fmt: skip
    return [TensorType(past.dtype, tuple(dims))]


def _samples(rng: Rng) -> Iterator[Sample]:
    for past, new, capacity in ((3, 1, 4), (0, 2, 2), (5, 3, 8)):
        attrs = {"axis": 1, "rows": past + new, "capacity": past + new}
        assert capacity >= past + new
        yield Sample([normal(rng, 2, past, 5), normal(rng, 2, new, 5)], attrs)


OPS = (OpSpec(APPEND, _reference, _infer, samples=_samples),)
